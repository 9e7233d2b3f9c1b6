"""The types of weights and activations, and the bytes of a weight: the basis of both memory and times."""

from __future__ import annotations

from typing import NamedTuple

from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,  # without the 4-byte scale for 128 x 128 weights: 0.02 %
    "int8": 1.0,  # `weight_width` adds scales and zero points of groups
    "int4": 0.5,
    "mxfp4": 17 / 32,  # 4 bits, and one shared 8-bit scale for 32 of them (OCP Microscaling Formats 1.0)
    "nvfp4": 9 / 16,  # 4 bits, and one 8-bit scale for 16 of them
}


GROUP_SIZE = {"int4": 128, "int8": 0}  # inputs that share a scale if 16-bit weights are quantised; 0: all
ATTENTION = ("qkv", "attention out", "linear in", "linear out")  # projections, by their names in a step
_SCALE_BYTES = 2.0


class Stored(NamedTuple):
    """A projection of so many `layers`: `width` bytes a weight, its share of scales included, for GEMMs in `dtype`.

    Attributes:
        suffix: added to the names of its operations, if other layers store it otherwise
    """

    layers: int
    dtype: str
    width: float
    suffix: str = ""


def weights_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """Return the type that weights are kept in: the deployment's, else the published one, else `dtype`.

    Some weights are in 16 bits all the same; see `stored`.
    """
    if deployment.quantization != "none":
        return deployment.quantization
    published = model.checkpoint_quantization
    return deployment.dtype if published == "none" else published


def narrowest_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """Return the type of a mixture's experts, which may be of fewer bits than the rest, else of all weights."""
    return stored(model, deployment, "experts", 1)[0].dtype if model.num_experts else weights_dtype(model, deployment)


def stored(model: ModelSpec, deployment: Deployment, projection: str, layers: int) -> list[Stored]:
    """Return how `layers` layers keep a projection, named as in a step.

    First come layers that keep it in the model's usual type, then layers that keep it in 16 bits. An entry without
    layers is left out.
    """
    dtype, kept = weights_dtype(model, deployment), _kept(model, deployment, projection, layers)
    if projection == "experts" and dtype == model.checkpoint_quantization:
        dtype = model.checkpoint_experts or dtype
    suffix = " (16 bits)" if kept < layers else ""
    parts = [
        Stored(layers - kept, dtype, weight_width(dtype, model, deployment)),
        Stored(kept, deployment.dtype, DTYPE_BYTES[deployment.dtype], suffix),
    ]
    return [part for part in parts if part.layers]


def _kept(model: ModelSpec, deployment: Deployment, projection: str, layers: int) -> int:
    """Return how many of `layers` layers keep a projection in 16 bits: as published, else as makers do.

    mxfp4 is for experts only; NVIDIA's editions of mixtures in nvfp4 keep attention in 16 bits.
    """
    dtype = weights_dtype(model, deployment)
    if dtype == "mxfp4":
        return 0 if projection == "experts" else layers
    if dtype == model.checkpoint_quantization:
        return min(len(dict(model.checkpoint_kept).get(projection, ())), layers)
    return layers if dtype == "nvfp4" and model.num_experts and projection in ATTENTION else 0


def check_experts(model: ModelSpec, deployment: Deployment) -> None:
    """Raise UserError for mxfp4 if there are no experts to store in it."""
    if deployment.quantization == "mxfp4" and not model.num_experts:
        remedy = f"is for a mixture's experts, and {model.name} has none; use int4 or fp8"
        raise UserError("quantization", "mxfp4", remedy)


def check_heads(model: ModelSpec, tp: int) -> None:
    """Raise UserError if heads cannot be split over `tp` devices; KV heads may be repeated."""
    if model.num_heads % tp or max(model.num_kv_heads, tp) % min(model.num_kv_heads, tp):
        remedy = f"must split {model.name}'s {model.num_heads} heads and {model.num_kv_heads} KV heads evenly"
        raise UserError("tensor_parallel_size", tp, remedy)


def check_linear_heads(model: ModelSpec, tp: int) -> None:
    """Raise UserError if heads with a constant state cannot be split over `tp` devices."""
    heads = model.linear.linear_num_key_heads if model.linear is not None else tp
    if heads % tp:
        remedy = f"must divide the {heads} key heads of {model.name}'s layers with a constant state"
        raise UserError("tensor_parallel_size", tp, remedy)


def weight_width(dtype: str, model: ModelSpec, deployment: Deployment) -> float:
    """Return the bytes of a weight of `dtype`, with its share of the 16-bit scale and the zero point of its group.

    The checkpoint gives the groups, or `GROUP_SIZE` if weights are quantised on loading. A scale for all of an output's
    inputs is shared out among as many weights as the hidden size.
    """
    if dtype not in GROUP_SIZE:
        return DTYPE_BYTES[dtype]
    number = DTYPE_BYTES[dtype]
    group, zeros = GROUP_SIZE[dtype], False
    if model.checkpoint_quantization == dtype:
        group, zeros = model.checkpoint_group_size, model.checkpoint_zero_points
    return number + (_SCALE_BYTES + (number if zeros else 0.0)) / (group or model.hidden_size)
