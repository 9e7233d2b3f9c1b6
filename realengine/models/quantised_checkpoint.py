"""Readers of quantised checkpoints, which convert each format to the layout of `tokentwin.realengine.models.linear`.

A linear layer's weight is `[out, in]`.

FP8: the formats are AutoFP8's `fp8`, the block-wise `fp8` of DeepSeek and Qwen, `fbgemm_fp8`, ModelOpt's FP8 and
compressed-tensors' float-quantized. They differ only in the shape of `weight_scale` and, for blocks, in its name
(`weight_scale_inv`, although it is no inverse). Scales of activations are ignored, because the engine computes one for
each token.

GPTQ (AutoGPTQ, GPTQModel) is packed along inputs, and its stored zero points are too small by one: qweight `[in * bits
/ 32, out]`, qzeros `[groups, out * bits / 32]`, both int32 with the first integer in a word's lowest bits; scales
`[groups, out]`; g_idx `[in]`, the group of each input. The format gptq_v2 stores zero points unchanged.

AWQ (AutoAWQ's gemm version) is packed along outputs: qweight `[in, out / 8]`, qzeros `[groups, out / 8]`, both int32;
scales `[groups, out]`. A word has eight outputs, in this order from its lowest bits: 0, 2, 4, 6, 1, 3, 5, 7.

The format pack-quantized of compressed-tensors is the engine's own layout: weight_packed `[out, in * bits / 32]` int32;
weight_scale `[out, groups]`; weight_zero_point `[out * bits / 32, groups]` int32, packed along outputs; weight_shape.
Its format int-quantized: weight `[out, in]` int8; weight_scale; weight_zero_point `[out, 1]` int8; both are signed.

The readers raise UserError for tensors that are missing, have another type, or have their inputs in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokentwin.realengine.models.linear import (
    FP8_BLOCK,
    Fp8Weight,
    PackedWeight,
    StoredWeight,
    pack,
    round_to_fp8,
    unpack,
)
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_BLOCK = (FP8_BLOCK, FP8_BLOCK)
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "activation_scale")
_AWQ_BITS = 4
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # place of each of eight outputs in a word
_KV_SCALES = {  # by tool: compressed-tensors and transformers, ModelOpt, AutoFP8, early vLLM (one for both)
    "k_scale": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v_scale": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
_UNUSED_SCALES = ("q_scale", "prob_scale", "kv_scale", "q_proj.output_scale")  # queries and scores are in 16 bits


class CheckpointTensors:
    """The tensors of a checkpoint by Hugging Face name, which a reader converts in place for `WeightLoader`."""

    def __init__(self, state: dict[str, Any], where: str) -> None:
        self.state, self._where = state, where

    def modules(self, part: str) -> list[str]:
        """Return the names of the linear layers that have a tensor called `part`, such as `qweight`."""
        return [name.removesuffix(f".{part}") for name in self.state if name.endswith(f".{part}")]

    def take(self, module: str, part: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Remove and return a tensor; raise UserError if it is missing or does not have the type `dtype`."""
        tensor: torch.Tensor | None = self.state.pop(f"{module}.{part}", None)
        if tensor is None:
            raise self.fault(f"has no weight {module}.{part}; is the folder complete?")
        if dtype is not None and tensor.dtype != dtype:
            raise self.fault(f"{module}.{part} is {tensor.dtype}, but must be {dtype}; use another checkpoint")
        return tensor

    def drop(self, module: str, *parts: str) -> None:
        """Drop tensors that are not needed."""
        for part in parts:
            self.state.pop(f"{module}.{part}", None)

    def check_order(self, module: str, part: str, inputs: int, group: int) -> None:
        """Raise UserError if groups are not runs of consecutive inputs, as with `desc_act` and `actorder`."""
        order = self.state.pop(f"{module}.{part}", None)
        if order is not None and not torch.equal(order.long(), torch.arange(inputs) // (group or inputs)):
            remedy = "puts inputs into groups by their activations; use a checkpoint without desc_act or actorder group"
            raise self.fault(f"{module}.{part} {remedy}")

    def give(self, module: str, weight: PackedWeight) -> None:
        """Store the weight of a module; raise UserError if scales or zero points do not fit its groups."""
        weight = weight._replace(group=weight.group or weight.inputs)
        groups = (weight.shape[0], -(-weight.inputs // weight.group))
        for part in (weight.scale, weight.zero):
            if part is not None and part.shape != groups:
                remedy = f"has scales or zero points of shape {tuple(part.shape)}, but its groups are {groups}"
                raise self.fault(f"{module} {remedy}; use another checkpoint")
        self.state[f"{module}.weight"] = weight

    def fault(self, what: str) -> UserError:
        return UserError("model", self._where, what)


def read_fp8(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Read the weights of an FP8 checkpoint; scales become `[out, 1]` float32.

    Weights with a scale for each block are rounded again, with a scale for each output channel. Experts keep blocks of
    128 x 128, because their GEMM supports them; if the outputs do not fill whole blocks, each output gets its own copy
    of its block's scales. Raises UserError for tensors that are missing, have another type, or have a shape that fits
    no scheme.
    """
    for part in ("weight_scale", "weight_scale_inv"):
        for module in tensors.modules(part):
            weight = tensors.take(module, "weight", torch.float8_e4m3fn)
            scale = tensors.take(module, part).float()
            outputs, inputs = weight.shape
            rows, columns = config.get("weight_block_size") or _BLOCK
            if scale.numel() in (1, outputs):
                scale = scale.reshape(-1, 1).expand(outputs, 1)
            elif scale.shape != (-(-outputs // rows), -(-inputs // columns)):
                raise tensors.fault(
                    f"{module}.{part} has shape {tuple(scale.shape)}, which fits no way to scale weights"
                )
            elif ".experts." in module and (rows, columns) == _BLOCK:
                if outputs % rows:
                    scale = scale.repeat_interleave(rows, 0)[:outputs]
            else:
                wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
                weight, scale = round_to_fp8(weight.float() * wide)
            tensors.state[f"{module}.weight"] = Fp8Weight(weight, scale.contiguous())
    for part in _OF_ACTIVATIONS:
        for module in tensors.modules(part):
            tensors.drop(module, part)


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
    """Unpack words `[rows, out / 8]` into integers `[out, rows]`."""
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
            tensors.drop(module, "weight_zero_point")  # symmetric checkpoints may have zero points, too
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


_READERS = {  # other checkpoints are FP8
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
}


def read_quantised(state: dict[str, StoredWeight], config: Mapping[str, Any], spec: ModelSpec, where: str) -> None:
    """Convert the tensors of a quantised checkpoint in place to the layout that `WeightLoader` takes.

    Args:
        config: the checkpoint's config.json

    Other tensors stay as they are. Raises UserError, which names `where`, for tensors that are missing or with which
    the engine would compute wrong results.
    """
    if spec.checkpoint_quantization == "none":
        return
    tensors, stored = CheckpointTensors(state, where), config["quantization_config"]
    read = read_fp8 if spec.checkpoint_quantization.startswith("fp8") else _READERS[stored["quant_method"]]
    read(tensors, stored, spec)
    _read_kv_scales(tensors, spec.num_layers)
    for name, weight in state.items():
        if isinstance(weight, Fp8Weight | PackedWeight) and not name.startswith("model.layers."):
            module = name.removesuffix(".weight")
            raise tensors.fault(f"{module} is quantised, which only layers may be; use a checkpoint with it in 16 bits")


def _read_kv_scales(tensors: CheckpointTensors, layers: int) -> None:
    """Rename the scales of keys and values for an FP8 cache to `self_attn.k_scale` and `self_attn.v_scale`.

    Keys and values are divided by these scales. Raises UserError if a layer has several scales, for example one for
    each head.
    """
    for index in range(layers):
        attention = f"model.layers.{index}.self_attn"
        for name, called in _KV_SCALES.items():
            parts = [part for part in called if f"{attention}.{part}" in tensors.state]
            if not parts:
                continue
            scale = tensors.state[f"{attention}.{parts[0]}"].float()
            if scale.numel() != 1:
                raise tensors.fault(f"{attention}.{parts[0]} has {scale.numel()} scales; only one a layer is supported")
            if not 0 < scale.item() < float("inf"):
                raise tensors.fault(f"{attention}.{parts[0]} is {scale.item():g}, but must be positive")
            tensors.drop(attention, *(part for part in parts if part != "kv_scale"))
            tensors.state[f"{attention}.{name}"] = scale.reshape(1)
        tensors.drop(attention, *_UNUSED_SCALES)
