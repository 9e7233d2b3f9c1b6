"""The smallest tensor-parallel size with which a model fits on a GPU."""

from __future__ import annotations

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import with_kv_groups
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_SIZES = (1, 2, 4, 8, 16, 32, 64)


def smallest_tensor_parallel_size(model: ModelSpec, deployment: Deployment, gpu: GpuSpec) -> int | None:
    """Return the smallest power of two, up to 64, with room for one request of the usual length; None if none has."""
    for size in _SIZES:
        wide = deployment.model_copy(update={"tensor_parallel_size": size})
        try:
            wide = with_kv_groups(with_engine_defaults(wide, gpu)[0])
            kv_capacity(model, gpu, wide).check(wide)
        except UserError:  # there is too little memory, or the model cannot be split so
            continue
        return size
    return None
