"""Checkpoints of packed integers, each format in its own layout. A linear layer's weight is `[out, in]`.

GPTQ (AutoGPTQ, GPTQModel), packed along inputs, zero points stored one too small: qweight `[in * bits / 32, out]`,
qzeros `[groups, out * bits / 32]`, both int32 with the first integer in a word's lowest bits; scales `[groups, out]`;
g_idx `[in]`, the group of each input. gptq_v2 stores zero points as they are.

AWQ (AutoAWQ's gemm version), packed along outputs: qweight `[in, out / 8]`, qzeros `[groups, out / 8]`, both int32;
scales `[groups, out]`. A word holds eight outputs, from its lowest bits up: 0, 2, 4, 6, 1, 3, 5, 7.

compressed-tensors, pack-quantized, which is the engine's own layout: weight_packed `[out, in * bits / 32]` int32;
weight_scale `[out, groups]`; weight_zero_point `[out * bits / 32, groups]` int32, packed along outputs; weight_shape.
int-quantized: weight `[out, in]` int8; weight_scale; weight_zero_point `[out, 1]` int8; both integers signed.

The readers raise UserError for tensors that are missing, of another type or in an order of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realengine.checkpoints.tensors import CheckpointTensors
from realengine.stored_weight import PackedWeight, pack, unpack
from serving.deployments.model_spec import ModelSpec

_AWQ_BITS = 4
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # place of each of eight outputs in a word


def read_gptq(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
    bits, group = int(config["bits"]), spec.checkpoint_group_size
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    for module in tensors.modules("qweight"):
        integers = unpack(tensors.take(module, "qweight", torch.int32).t().contiguous(), bits)
        tensors.check_order(module, "g_idx", integers.shape[1], group)
        stored = unpack(tensors.take(module, "qzeros", torch.int32), bits).t() + offset
        if not spec.checkpoint_zero_points and not torch.all(stored == 2 ** (bits - 1)):
            raise tensors.fault(f"{module}.qzeros are not in the middle, though config.json says sym")
        zero = stored if spec.checkpoint_zero_points else None
        scale = tensors.take(module, "scales").t().contiguous()
        tensors.give(module, PackedWeight(pack(integers, bits), scale, zero, bits, group))
        bias = tensors.state.get(f"{module}.bias")
        if bias is not None and not bias.any():  # AutoGPTQ writes a bias for every layer
            tensors.drop(module, "bias")


def read_awq(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
    if spec.checkpoint_quantization != "int4":
        raise tensors.fault(f"is AWQ in {spec.checkpoint_quantization}; only 4 bits are supported")
    for module in tensors.modules("qweight"):
        integers, zero = (_awq_outputs(tensors.take(module, part, torch.int32)) for part in ("qweight", "qzeros"))
        if not spec.checkpoint_zero_points and not torch.all(zero == 8):
            raise tensors.fault(f"{module}.qzeros are not 8, though config.json says zero_point false")
        scale = tensors.take(module, "scales").t().contiguous()
        kept = zero if spec.checkpoint_zero_points else None
        tensors.give(
            module, PackedWeight(pack(integers, _AWQ_BITS), scale, kept, _AWQ_BITS, spec.checkpoint_group_size)
        )


def _awq_outputs(words: torch.Tensor) -> torch.Tensor:
    """Return integers `[out, rows]` from words `[rows, out / 8]`."""
    return unpack(words, _AWQ_BITS).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).t().contiguous()


def read_compressed_tensors(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
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
            tensors.drop(module, "weight_zero_point")  # symmetric checkpoints may have zero points
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
