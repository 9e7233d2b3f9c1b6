"""Parts of a model that are models of fewer layers: pipeline stages, and the module for multi-token prediction.

Code that prices or sizes a model does so for a part, too. Stages are consecutive layers, as vLLM shares them out: the
embedding is on the first stage, the last norm, the head and the sampler on the last. A spec does not say that; code
that needs it knows which stage it asks about.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from serving.deployments.config import Deployment
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


def draft_module(model: ModelSpec) -> ModelSpec:
    """Return the module of `model` for multi-token prediction. Raises UserError if it has none.

    The module (DeepSeek-V3, arXiv:2412.19437, section 2.2) takes the target's last hidden states and the embeddings of
    the tokens after them, joins the two in one projection, and goes through a layer like the target's last one.
    Embedding and head are the target's. Editions in NVFP4 keep the module in 16 bits. A module of several layers drafts
    with the first again and again.
    """
    if not model.draft_layers:
        remedy = f"cannot draft for {model.name}, which has no layers for multi-token prediction; use another method"
        raise UserError("scheduler.speculative.method", "mtp", remedy)
    stored = model.checkpoint_quantization
    return model.model_copy(
        update={
            "name": f"{model.name} MTP",
            "num_layers": 1,
            "dense_at": (),
            "sliding_window": 0,
            "sliding_layers": 0,
            "sliding_at": (),
            "latent": model.latent and model.latent.of_layers(model.num_layers, model.num_layers + 1),
            "linear": None,
            "linear_layers": 0,
            "draft_layers": 0,
            "is_draft_module": True,
            "checkpoint_quantization": "none" if stored == "nvfp4" else stored,
            "checkpoint_kept": (),
        }
    )


def module_deployment(deployment: Deployment) -> Deployment:
    """Return the deployment of the module beside `deployment`: without drafts, and in 16 bits beside NVFP4."""
    alone = deployment.rescheduled(speculative=None)
    return alone.model_copy(update={"quantization": "none"}) if deployment.quantization == "nvfp4" else alone
