"""The bytes that the KV of one token takes, over all layers and devices of an engine."""

from __future__ import annotations

from serving.deployments.config import Deployment
from serving.deployments.model_catalogue import find_model
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import DTYPE_BYTES
from serving.errors import UserError


def kv_dtype(deployment: Deployment) -> str:
    """Return the data type of keys and values."""
    return deployment.dtype if deployment.kv_cache_dtype == "auto" else deployment.kv_cache_dtype


def kv_bytes_per_token(deployment: Deployment, given: int | None, setting: str) -> int:
    """Return `given`, or the bytes by the shapes of the model and of its draft model.

    Raises UserError that names `setting` if the shapes are not known.
    """
    if given is not None:
        return given
    drafts, dtype_bytes = deployment.scheduler.speculative, int(DTYPE_BYTES[kv_dtype(deployment)])
    return sum(
        _shapes(name, setting).kv_bytes_per_token(dtype_bytes)
        for name in (deployment.model, drafts and drafts.model)
        if name
    )


def _shapes(name: str, setting: str) -> ModelSpec:
    try:
        return find_model(name)
    except UserError:
        remedy = f"has no known shapes, which give the KV bytes of a token; set {setting}"
        raise UserError("model", name, remedy) from None
