"""The life of a step's tokens: from ids over embedding, layers and logits to the ids that are sampled.

Each stage is a tensor as it stands on one device: its shape and its bytes, without padding. Activations are of the
deployment's `dtype`, ids are int64, and sampling is in float32, as in vLLM.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from calibration.operations import StepSizes
from calibration.step_operations import heads_per_device
from serving.deployments.config import Deployment
from serving.deployments.kv_layout import kv_dtype
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import DTYPE_BYTES

_ID_BYTES, _FLOAT_BYTES = 8, 4


class Stage(NamedTuple):
    """A tensor on a token's way: it occurs `times` in a step and has `bytes` bytes in all."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    times: int
    bytes: int


def token_life(model: ModelSpec, deployment: Deployment, sizes: StepSizes) -> list[Stage]:
    """Return the stages of the step of `sizes` (plain numbers), in the order in which its tokens pass them.

    Layers with a constant state instead of KV have no stages for their attention.
    """
    tokens, sampled = int(sizes.tokens), int(sizes.sampled_rows)
    tp, dtype, cached = deployment.tensor_parallel_size, deployment.dtype, kv_dtype(deployment)
    heads, kv_heads = heads_per_device(model, tp)
    hidden, layers, vocabulary = model.hidden_size, model.num_layers, -(-model.vocab_size // tp)
    values = model.latent.v_head_dim if model.latent is not None else model.head_dim

    def stage(name: str, *shape: int, of: str = dtype, times: int = 1) -> Stage:
        width = {"int64": _ID_BYTES, "float32": _FLOAT_BYTES}.get(of) or DTYPE_BYTES[of]
        return Stage(name, shape, of, times, int(times * prod(shape) * width))

    kept = (
        stage("latent vectors, kept as KV", tokens, model.latent.kv_dim, of=cached, times=layers)
        if model.latent is not None
        else stage("keys and values, kept as KV", 2, tokens, kv_heads, model.head_dim, of=cached, times=model.kv_layers)
    )
    stages = [
        stage("token ids", tokens, of="int64"),
        stage("embeddings", tokens, hidden),
        stage("layer: queries", tokens, heads, model.head_dim, times=model.kv_layers),
        kept._replace(name=f"layer: {kept.name}"),
        stage("layer: attention", tokens, heads, values, times=model.kv_layers),
    ]
    if dense := layers - model.moe_layers:
        stages.append(stage("layer: gate and up", tokens, 2, -(-model.intermediate_size // tp), times=dense))
    if model.moe_layers:
        inter = model.moe_intermediate_size
        ranks = deployment.data_parallel_size  # the ranks step together and share their experts
        inter = inter if deployment.enable_expert_parallel else -(-inter // (tp * ranks))
        routed = tokens * ranks * model.experts_per_token // deployment.expert_parallel_size
        stages += [
            stage("layer: scores of experts", tokens, model.num_experts, times=model.moe_layers),
            stage("layer: experts' gate and up", routed, 2, inter, times=model.moe_layers),
        ]
    return [
        *stages,
        stage("layer: hidden states", tokens, hidden, times=layers),
        stage("last hidden states", sampled, hidden),
        stage("logits", sampled, vocabulary),
        stage("probabilities", sampled, model.vocab_size, of="float32"),
        stage("sampled ids", sampled, of="int64"),
    ]
