"""Weights of 4 or 8 bits in 32-bit words, with a scale and a zero point for each group of inputs.

One layout, whatever a checkpoint has: that of compressed-tensors' `pack-quantized`. A weight is `scale * (integer -
zero)`, its integer unsigned. Reading formats, dividing among ranks and the GEMM's kernel all start from here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from serving.deployments.weight_types import GROUP_SIZE
from serving.errors import UserError


class PackedWeight(NamedTuple):
    """The weights of one linear layer, or of several that are multiplied at once.

    packed  [out, in * bits / 32] int32: the first integer of a word in its lowest bits
    scale   [out, groups] floats
    zero    [out, groups] uint8; None: the middle, 8 or 128, everywhere
    bits    4 or 8
    group   inputs that share a scale; the last group may be shorter
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    group: int

    @property
    def inputs(self) -> int:
        return self.packed.shape[1] * (32 // self.bits)

    def integers(self) -> torch.Tensor:
        """`[out, in]`, uint8."""
        return unpack(self.packed, self.bits)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]`: what the integers stand for, computed in float32 and rounded once."""
        middle = 2.0 ** (self.bits - 1)
        groups = [self.scale.float(), torch.full_like(self.scale, middle) if self.zero is None else self.zero.float()]
        scale, zero = (each.repeat_interleave(self.group, dim=1)[:, : self.inputs] for each in groups)
        return ((self.integers().float() - zero) * scale).to(dtype)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers of int32 `words` `[rows, n]` as uint8 `[rows, n * 32 / bits]`, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack`; the integers of a row must fill its words."""
    values = 32 // bits
    words = torch.zeros(*integers.shape[:-1], integers.shape[-1] // values, dtype=torch.int32, device=integers.device)
    for at in range(values):
        words |= integers[..., at::values].to(torch.int32) << (bits * at)
    return words


def quantise(weight: torch.Tensor, quantization: str) -> PackedWeight:
    """`weight` `[out, in]` rounded to nearest, symmetrically; each group's largest number is kept.

    Scales have the weight's type, by which the integers are found. Raises UserError for inputs that do not fill words.
    """
    bits, inputs = int(quantization.removeprefix("int")), weight.shape[1]
    if inputs * bits % 32:
        raise UserError("quantization", quantization, f"needs layers whose inputs fill 32-bit words; one has {inputs}")
    group = GROUP_SIZE[quantization] or inputs
    middle, groups = 2 ** (bits - 1), -(-inputs // group)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group - inputs)).unflatten(1, (groups, group))
    scale = (wide.abs().amax(-1) / (middle - 1)).clamp(min=1e-6).to(weight.dtype)
    rounded = (wide / scale.float()[..., None]).round().clamp(-middle, middle - 1) + middle
    integers = rounded.to(torch.uint8).flatten(1)[:, :inputs]
    return PackedWeight(pack(integers, bits), scale, None, bits, group)
