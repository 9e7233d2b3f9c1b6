"""The stages of pipeline parallelism: consecutive layers of a model, as vLLM shares them out.

A stage is itself a `ModelSpec`, of fewer layers, so that code that prices or sizes a model does so for a stage. The
embedding is on the first stage, the last norm, the head and the sampler on the last. A spec does not say that; code
that needs it knows which stage it asks about.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError


def layers_of_stages(num_layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, in order.

    Stages get equal shares. Layers left over go one by one to the stages from the last but one on forwards (vLLM's
    `get_pp_indices`): the first stage has the embedding, the last the head. Raises UserError if a stage would be
    without layers.
    """
    if stages > num_layers:
        remedy = f"must be at most {num_layers}, the number of the model's layers"
        raise UserError("pipeline_parallel_size", stages, remedy)
    share, left = divmod(num_layers, stages)
    return [share + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]


def stage_models(model: ModelSpec, stages: int) -> list[ModelSpec]:
    """Return the layers of each stage as a model; `[model]` for one stage.

    Layers with a window or a constant state are spread evenly over the model. Raises UserError if a stage would be
    without layers.
    """
    bounds = list(accumulate(layers_of_stages(model.num_layers, stages), initial=0))
    return [_layers(model, first, end) for first, end in pairwise(bounds)]


def _layers(model: ModelSpec, first: int, end: int) -> ModelSpec:
    if end - first == model.num_layers:
        return model
    sliding = end * model.sliding_layers // model.num_layers - first * model.sliding_layers // model.num_layers
    linear = end * model.linear_layers // model.num_layers - first * model.linear_layers // model.num_layers
    return model.model_copy(
        update={
            "num_layers": end - first,
            "dense_at": tuple(layer - first for layer in model.dense_at if first <= layer < end),
            "sliding_layers": sliding,
            "sliding_at": (),
            "linear_layers": linear,
            "latent": model.latent and model.latent.of_layers(first, end),
            "linear": model.linear if linear else None,
            "sliding_window": model.sliding_window if sliding else 0,
            "checkpoint_kept": tuple(
                (projection, tuple(layer - first for layer in layers if first <= layer < end))
                for projection, layers in model.checkpoint_kept
            ),
        }
    )
