"""What the weights of GEMMs are kept in, and how many bytes one takes: what both memory and times are counted from."""

from __future__ import annotations

from serving.deployments.config import Deployment
from serving.deployments.dtypes import DTYPE_BYTES
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

GROUP_SIZE = {"int4": 128, "int8": 0}  # inputs that share a scale where 16-bit weights are quantised; 0: all of them
_SCALE_BYTES = 2.0


def weights_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """What weights are kept in: as the deployment says, else as they are published, else `dtype`.

    In mxfp4 that is a mixture's experts, see `linear_dtype`. Raises UserError for weights that are published in more
    than one type.
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


def linear_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """What weights other than those of routed experts are kept in: mxfp4 is for experts only."""
    dtype = weights_dtype(model, deployment)
    return deployment.dtype if dtype == "mxfp4" else dtype


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
