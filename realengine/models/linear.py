"""Linear layers: the layouts of their stored weights, and products with them.

Weights are stored in the model's type, in FP8 (e4m3), or in integers of 4 or 8 bits. Each kind has one layout, whatever
the format of the checkpoint. Integers are in 32-bit words, with a scale and a zero point for each group of inputs, as
in compressed-tensors' `pack-quantized`: a weight is `scale * (integer - zero)` with an unsigned integer. Readers of
checkpoints, the division among ranks and the kernels all use these layouts.

Products are in the model's type, or in FP8 with a scale for each output channel and each token. Kernels compute
products with packed integers (`triton_ops`). The reference converts the integers to floats and multiplies these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear

from tokentwin.serving.deployments.weight_types import GROUP_SIZE
from tokentwin.serving.errors import UserError

FP8_BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Fp8Weight(NamedTuple):
    """Weights in e4m3, with a scale for each output channel, or for blocks of 128 x 128.

    Attributes:
        values: [out, in] e4m3
        scale: [out / n, groups] float32: a scale is shared by n outputs, and by all inputs or by a group of 128 inputs
    """

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers `[out, in]`, computed in float32 and rounded once."""
        outputs, inputs = self.values.shape
        scale = self.scale.repeat_interleave(outputs // len(self.scale), dim=0)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(FP8_BLOCK, dim=1)[:, :inputs]
        return (self.values.float() * scale).to(dtype)


class PackedWeight(NamedTuple):
    """Weights in integers.

    Attributes:
        packed: [out, in * bits / 32] int32: the lowest bits of a word have its first integer
        scale: [out, groups] floats
        zero: [out, groups] uint8; None if all are the middle of the range, 8 or 128
        bits: 4 or 8
        group: number of inputs that share a scale; the last group may be smaller
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    group: int

    @property
    def inputs(self) -> int:
        return self.packed.shape[1] * (32 // self.bits)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.packed), self.inputs

    def integers(self) -> torch.Tensor:
        """Return the integers `[out, in]`, uint8."""
        return unpack(self.packed, self.bits)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers `[out, in]`, computed in float32 and rounded once."""
        middle = 2.0 ** (self.bits - 1)
        groups = [self.scale.float(), torch.full_like(self.scale, middle) if self.zero is None else self.zero.float()]
        scale, zero = (factor.repeat_interleave(self.group, dim=1)[:, : self.inputs] for factor in groups)
        return ((self.integers().float() - zero) * scale).to(dtype)


# weight `[out, in]` of one linear layer, or of several layers with the same input
StoredWeight = torch.Tensor | Fp8Weight | PackedWeight


def each_tensor(weight: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `weight` with `change` applied to every tensor in it."""
    if isinstance(weight, torch.Tensor):
        return change(weight)
    return type(weight)(*(change(part) if isinstance(part, torch.Tensor) else part for part in weight))


def joined(weights: Sequence[Any]) -> Any:
    """Return weights of the same type as one weight, whose outputs are concatenated in order."""
    if isinstance(weights[0], torch.Tensor):
        return torch.cat(list(weights))
    parts = zip(*weights, strict=True)
    return type(weights[0])(
        *(torch.cat(tensors) if isinstance(tensors[0], torch.Tensor) else tensors[0] for tensors in parts)
    )


def stacked(weights: Iterable[Any], count: int) -> Any:
    """Return `count` tensors, or named tuples of tensors, as one with a new first dimension for experts.

    Fields that are not tensors must be equal in all tuples.
    """
    parts: list[Any] = []
    for place, weight in enumerate(weights):
        fields = (weight,) if isinstance(weight, torch.Tensor) else weight
        if not place:
            parts = [part.new_empty(count, *part.shape) if isinstance(part, torch.Tensor) else part for part in fields]
        for into, part in zip(parts, fields, strict=True):
            if isinstance(part, torch.Tensor):
                into[place] = part
    return parts[0] if isinstance(weight, torch.Tensor) else type(weight)(*parts)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of int32 `words` `[rows, n]` as uint8 `[rows, n * 32 / bits]`, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack `integers` into words, as the inverse of `unpack`; the integers of a row must fill its words."""
    values = 32 // bits
    words = torch.zeros(*integers.shape[:-1], integers.shape[-1] // values, dtype=torch.int32, device=integers.device)
    for at in range(values):
        words |= integers[..., at::values].to(torch.int32) << (bits * at)
    return words


def round_to_integers(weight: torch.Tensor, quantization: str) -> PackedWeight:
    """Round `weight` `[out, in]` to the nearest integers, symmetrically.

    The largest weight of each group gets the largest integer.

    Scales are rounded to the weight's type before the integers are computed with them. Raises UserError if the inputs
    do not fill whole words.
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


class Fp8Rows(NamedTuple):
    """Activations `[rows, n]` in e4m3, their float32 scales `[rows, 1]`, and their type before rounding."""

    rows: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, x: torch.Tensor) -> Fp8Rows:
        return cls(*round_to_fp8(x), x.dtype)


class Projection(Protocol):
    """Linear layers that share their input: `[rows, in]` to `[rows, out]`, both in the data type of the model.

    Attributes:
        fp8: True if it computes in FP8; its input should then be `Fp8Rows`, which saves a pass over the activations
    """

    fp8: bool

    def __call__(self, x: Any) -> torch.Tensor: ...


class DenseProjection:
    """Linear layers in the data type of the model."""

    fp8 = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


class Fp8Projection:
    """Weights in e4m3 and activations rounded token by token; products are accumulated in float32.

    Attributes:
        weight: [out, in] e4m3
        scale: [out, 1] float32; a weight is its e4m3 number times the scale
    """

    fp8 = True

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._scale, self._bias = weight, scale.t().contiguous(), bias

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        rows, scale, dtype = x if isinstance(x, Fp8Rows) else Fp8Rows.from_tensor(x)
        out = torch._scaled_mm(rows, self._weight.t(), scale_a=scale, scale_b=self._scale, out_dtype=torch.bfloat16)
        return out.to(dtype) if self._bias is None else out.to(dtype) + self._bias


def round_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` `[rows, n]` as e4m3, and its float32 scales `[rows, 1]`, which are each row's largest value / 448."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _LARGEST
    return (wide / scale).to(torch.float8_e4m3fn), scale
