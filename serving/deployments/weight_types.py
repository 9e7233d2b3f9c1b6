"""What the weights of GEMMs are kept in, and how many bytes one takes: what both memory and times are counted from."""

from __future__ import annotations

from serving.deployments.config import Deployment
from serving.deployments.dtypes import DTYPE_BYTES
from serving.deployments.model_spec import ModelSpec, Part
from serving.errors import UserError

GROUP_SIZE = {"int4": 128, "int8": 0}  # inputs that share a scale where 16-bit weights are quantised; 0: all of them
ATTENTION: tuple[Part, ...] = ("attention", "attention_out")
_SCALE_BYTES = 2.0


def weights_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """What weights are kept in: as the deployment says, else as they are published, else `dtype`.

    Not all of a layer need be: see `linear_dtype`. Raises UserError for weights of which more than whole parts are
    published in another type.
    """
    if deployment.quantization != "none":
        return deployment.quantization
    stored = model.checkpoint_quantization
    if stored != "none" and model.checkpoint_kept:
        remedy = (
            "stays in 16 bits, and a mix of precisions has no cost model; set quantization to fp8 or int4, which then "
            "counts for all layers"
        )
        raise UserError(f"{model.name}.quantization_config", model.checkpoint_kept[0][:80], remedy)
    return deployment.dtype if stored == "none" else stored


def linear_dtype(model: ModelSpec, deployment: Deployment, part: Part) -> str:
    """What the weights of a part of every layer are kept in, which are not those of routed experts."""
    dtype = weights_dtype(model, deployment)
    return deployment.dtype if part in _kept_parts(model, dtype) else dtype


def _kept_parts(model: ModelSpec, dtype: str) -> tuple[Part, ...]:
    """What stays in 16 bits beside weights of `dtype`: as published, else as makers do.

    mxfp4 is for experts only; of mixtures in nvfp4 NVIDIA's editions keep attention in 16 bits.
    """
    if dtype == "mxfp4":
        return "attention", "attention_out", "mlp"
    if dtype == model.checkpoint_quantization:
        return model.checkpoint_kept_parts
    return ATTENTION if dtype == "nvfp4" and model.num_experts else ()


def check_experts(model: ModelSpec, deployment: Deployment) -> None:
    """Raise UserError for mxfp4 where there are no experts to store in it."""
    if deployment.quantization == "mxfp4" and not model.num_experts:
        remedy = f"is for a mixture's experts, and {model.name} has none; use int4 or fp8"
        raise UserError("quantization", "mxfp4", remedy)


def weight_width(dtype: str, model: ModelSpec, deployment: Deployment) -> float:
    """Bytes of a weight of `dtype`, with its share of the 16-bit scale and the zero point of its group.

    Groups are those of the checkpoint, or `GROUP_SIZE` where weights are quantised on loading. A scale for all of an
    output's inputs is shared out among as many as the hidden size.
    """
    if dtype not in GROUP_SIZE:
        return DTYPE_BYTES[dtype]
    number = DTYPE_BYTES[dtype]
    group, zeros = GROUP_SIZE[dtype], False
    if model.checkpoint_quantization == dtype:
        group, zeros = model.checkpoint_group_size, model.checkpoint_zero_points
    return number + (_SCALE_BYTES + (number if zeros else 0.0)) / (group or model.hidden_size)
