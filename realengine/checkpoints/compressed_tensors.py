"""compressed-tensors checkpoints of integers: `pack-quantized`, which is the engine's own layout, and `int-quantized`.

Of a linear layer `[out, in]`, pack-quantized: weight_packed `[out, in * bits / 32]` int32; weight_scale `[out,
groups]`; weight_zero_point `[out * bits / 32, groups]` int32, packed along outputs; weight_shape. int-quantized: weight
`[out, in]` int8; weight_scale; weight_zero_point `[out, 1]` int8; both integers signed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realengine.checkpoints.tensors import CheckpointTensors
from realengine.packed_weight import PackedWeight, pack, unpack
from serving.deployments.model_spec import ModelSpec


def read(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raises UserError for tensors that are missing, of another type or in an order of their own."""
    bits, group = int(spec.checkpoint_quantization.removeprefix("int")), spec.checkpoint_group_size
    if config["format"] == "pack-quantized":
        for module in tensors.modules("weight_packed"):
            packed = tensors.take(module, "weight_packed", torch.int32)
            tensors.check_order(module, "weight_g_idx", packed.shape[1] * 32 // bits, group)
            tensors.drop(module, "weight_shape")
            zero = None
            if spec.checkpoint_zero_points:
                words = tensors.take(module, "weight_zero_point", torch.int32)
                zero = unpack(words.t().contiguous(), bits)[:, : len(packed)].t().contiguous()
            tensors.drop(module, "weight_zero_point")  # symmetric checkpoints may have zeros
            tensors.give(module, PackedWeight(packed, tensors.take(module, "weight_scale"), zero, bits, group))
        return
    for module in tensors.modules("weight_scale"):
        signed = tensors.take(module, "weight", torch.int8)
        scale = tensors.take(module, "weight_scale").reshape(-1, 1).expand(len(signed), 1).contiguous()
        zero = _unsigned(tensors.take(module, "weight_zero_point"), bits) if spec.checkpoint_zero_points else None
        tensors.drop(module, "weight_zero_point")
        tensors.give(module, PackedWeight(pack(_unsigned(signed, bits), bits), scale, zero, bits, group))


def _unsigned(integers: torch.Tensor, bits: int) -> torch.Tensor:
    return (integers.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
