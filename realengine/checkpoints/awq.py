"""AWQ checkpoints (AutoAWQ's gemm version): integers packed along outputs, in an order of their own.

Of a linear layer `[out, in]`: qweight `[in, out / 8]`, qzeros `[groups, out / 8]`, both int32; scales `[groups, out]`.
Of eight outputs, a word has 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realengine.checkpoints.tensors import CheckpointTensors
from realengine.packed_weight import PackedWeight, pack, unpack
from serving.deployments.model_spec import ModelSpec

_BITS = 4
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word each of eight outputs is


def read(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raises UserError for tensors that are missing, or not of 4 bits."""
    if spec.checkpoint_quantization != "int4":
        raise tensors.fault(f"is AWQ in {spec.checkpoint_quantization}; only 4 bits are supported")
    for module in tensors.modules("qweight"):
        integers, zero = (_outputs(tensors.take(module, part, torch.int32)) for part in ("qweight", "qzeros"))
        if not spec.checkpoint_zero_points and not torch.all(zero == 8):
            raise tensors.fault(f"{module}.qzeros are not 8, though config.json says zero_point false")
        scale = tensors.take(module, "scales").t().contiguous()
        kept = zero if spec.checkpoint_zero_points else None
        tensors.give(module, PackedWeight(pack(integers, _BITS), scale, kept, _BITS, spec.checkpoint_group_size))


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """`[rows, out / 8]` to `[out, rows]`."""
    return unpack(words, _BITS).unflatten(1, (-1, 8))[..., _PLACES].flatten(1).t().contiguous()
