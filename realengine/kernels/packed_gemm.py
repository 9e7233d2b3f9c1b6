"""GEMM with weights of 4 or 8 bits, converted to floats in registers on their way to the tensor cores.

With few tokens the time is that of reading the weights. So each weight is read once, and the tile that a program reads
in one step along the inputs is contiguous. Within a step, the integer i of word j is input 16 i + j, so one shift of a
tile gives the operand of a product over 16 inputs without moving anything. Weights are the left operand and tokens the
right operand, because a product on tensor cores has many rows on the left. An integer minus its zero point is exact in
16 bits; scales are applied to sums. If a weight's inputs are divided among programs, the one that ends last adds their
sums in order.

With many tokens the time is that of computing, and cuBLAS is faster. `unpacked` writes the weight in 16 bits for it.
"""

from collections.abc import Iterator
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentwin.realengine.kernels.kv_splits import is_last_part
from tokentwin.realengine.kernels.launches import (
    I32,
    TRITON_NAME,
    U8,
    Specialisation,
    capability,
    compute_dtype,
    shaped,
)
from tokentwin.realengine.models.linear import PackedWeight

_STEP = 16  # words of a row that a step reads: 64 bytes, or 128 inputs of 4 bits
_BASE = {"fp32": 0x4B000000, "fp16": 0x6400, "bf16": 0x4300}  # 2**23, 1024, 128, whose last bits count ones
_FEWEST_STEPS = 4  # minimum number of steps of a split
_MOST_SPLITS = 8
_RESIDENT_PROGRAMS = 2  # programs on a multiprocessor
_UNPACKED_ROWS = 64
_HOPPER_PROCESSORS = 132  # multiprocessors of an H100 or H200, which the meta device stands for


class KernelWeight(NamedTuple):
    """A `PackedWeight` in the layout of the kernel.

    Attributes:
        words: [steps, out, 16] int32; the integer i of word j in step s is input (s * 32 / bits + i) * 16 + j
        scale: [groups, out]; `zero` has the same shape or is None
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    inputs: int


def kernel_weight(weight: PackedWeight) -> KernelWeight:
    """Return `weight` in the kernel's order, with zeros appended to fill the last step of inputs."""
    values, outputs = 32 // weight.bits, len(weight.packed)
    steps = -(-weight.inputs // (_STEP * values))
    integers = torch.nn.functional.pad(weight.integers(), (0, steps * _STEP * values - weight.inputs))
    ordered = integers.view(outputs, steps, values, _STEP).permute(1, 0, 3, 2)
    words = torch.zeros(steps, outputs, _STEP, dtype=torch.int32, device=integers.device)
    for at in range(values):
        words |= ordered[..., at].to(torch.int32) << (weight.bits * at)
    zero = None if weight.zero is None else weight.zero.t().contiguous()
    return KernelWeight(words, weight.scale.t().contiguous(), zero, weight.bits, weight.group, weight.inputs)


@triton.jit
def _exact(integer, BASE: tl.constexpr, COMPUTE: tl.constexpr):
    """Return, as a float, a small integer plus the power of two with the bits `BASE`; this needs no conversion."""
    number = integer | BASE
    if COMPUTE.primitive_bitwidth == 16:
        number = number.to(tl.int16)
    return number.to(COMPUTE, bitcast=True)


@triton.jit
def packed_sum(
    tokens, tokens_inside, words, scales, zeros, rows, rows_inside, begin, end,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr,
    SPAN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COMPUTE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Return the product `[ROWS, TOKENS]` of weights and tokens over steps `begin` to `end`; `tokens` are pointers."""
    VALUES: tl.constexpr = 32 // BITS
    STEP: tl.constexpr = 16
    LARGEST: tl.constexpr = 2**BITS - 1
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)
    inner = tl.arange(0, STEP)
    from_words = words + rows[:, None] * STEP + inner[None, :]
    from_tokens = tokens[None, :] + inner[:, None]
    total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for step in range(begin, end):
        packed = tl.load(from_words + step * OUTPUTS * STEP, mask=rows_inside[:, None], other=0)
        part = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        for at in tl.static_range(VALUES):
            first = (step * VALUES + at) * STEP
            if at * STEP % SPAN == 0:
                group = tl.minimum(first, INPUTS - 1) // GROUP  # nothing is counted beyond the last input
                scale = tl.load(scales + group * OUTPUTS + rows, mask=rows_inside, other=0.0).to(tl.float32)
                if ASYMMETRIC:
                    zero = tl.load(zeros + group * OUTPUTS + rows, mask=rows_inside, other=0).to(tl.int32)
                else:
                    zero = tl.full((ROWS,), MIDDLE, dtype=tl.int32)
            integer = (packed >> (BITS * at)) & LARGEST
            if BITS == 4:
                weight = _exact(integer, BASE, COMPUTE) - _exact(zero, BASE, COMPUTE)[:, None]
            else:
                weight = (integer - zero[:, None]).to(COMPUTE)
            inside = (inner + first < INPUTS)[:, None] & tokens_inside[None, :]
            activation = tl.load(from_tokens + first, mask=inside, other=0.0).to(COMPUTE)
            part = tl.dot(weight, activation, part, input_precision="ieee")
            if (at + 1) * STEP % SPAN == 0:
                total += part * scale[:, None]
                part = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _packed_gemm(
    x, words, scales, zeros, out, sums, arrived, tokens,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr,
    SPAN: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COMPUTE: tl.constexpr,
    BASE: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (INPUTS * BITS + 511) // 512
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    rows_inside = rows < OUTPUTS
    batch_inside = batch < tokens
    total = packed_sum(
        x + batch.to(tl.int64) * INPUTS, batch_inside, words, scales, zeros, rows, rows_inside,
        split * SHARE, tl.minimum(split * SHARE + SHARE, STEPS),
        OUTPUTS, INPUTS, GROUP, BITS, ASYMMETRIC, SPAN, TOKENS, ROWS, COMPUTE, BASE,
    )  # fmt: skip
    inside = rows_inside[:, None] & batch_inside[None, :]
    place = batch[None, :].to(tl.int64) * OUTPUTS + rows[:, None]
    if SPLITS == 1:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
    else:
        apart = tokens.to(tl.int64) * OUTPUTS
        tl.store(sums + split * apart + place, total, mask=inside)
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if is_last_part(arrived, tile, SPLITS, 0, 1):
            total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
            for one in tl.static_range(SPLITS):
                # The load bypasses the L1 cache, which may have the sums of the projection before.
                total += tl.load(sums + one * apart + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def packed_gemm(x: Tensor, weight: KernelWeight, splits: int | None = None, arrived: Tensor | None = None) -> Tensor:
    """Return `x` times the transposed weights: [T, in] contiguous to [T, out] in the dtype of `x`, summed in fp32.

    Args:
        splits: number of programs among which a row's inputs are divided. None to choose by the sizes and the GPU
        arrived: int32 zeros, which stay zeros, as `counters` makes them; by default they are made for this call
    """
    tokens, outputs = len(x), weight.words.shape[1]
    splits = splits or _choose_splits(tokens, weight, x.device)
    batch, rows = _tile(tokens, x.device)
    grid = (triton.cdiv(outputs, rows), triton.cdiv(tokens, batch), splits)
    out = x.new_empty(tokens, outputs)
    sums = out if splits == 1 else x.new_empty(splits, tokens, outputs, dtype=torch.float32)
    if splits == 1:
        arrived = weight.words  # not used
    elif arrived is None or grid[0] * grid[1] > len(arrived):
        arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=x.device)
    zero = weight.words if weight.zero is None else weight.zero
    _packed_gemm[grid](
        x, weight.words, weight.scale, zero, out, sums, arrived, tokens, OUTPUTS=outputs, SPLITS=splits, TOKENS=batch,
        ROWS=rows, **compiled_weight(weight, x.dtype), num_warps=4 if batch < 64 else 8,
        num_stages=4 if batch < 64 else 3,
    )  # fmt: skip
    return out


def counters(device: torch.device) -> Tensor:
    """Return counters for every tile of a GEMM whose inputs are divided. GEMMs that overlap need different ones."""
    return torch.zeros(_RESIDENT_PROGRAMS * _processors(device), dtype=torch.int32, device=device)


@triton.jit
def _unpacked(
    words, scales, zeros, out, COMPUTE: tl.constexpr, BASE: tl.constexpr, SPAN: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    VALUES: tl.constexpr = 32 // BITS
    STEP: tl.constexpr = 16
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1)
    inside = rows < OUTPUTS
    inner = tl.arange(0, STEP)
    at_words = (step.to(tl.int64) * OUTPUTS + rows[:, None]) * STEP + inner[None, :]
    packed = tl.load(words + at_words, mask=inside[:, None], other=0)
    for at in tl.static_range(VALUES):
        first = (step * VALUES + at) * STEP
        place = tl.minimum(first, INPUTS - 1) // GROUP * OUTPUTS + rows
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zeros + place, mask=inside, other=0).to(tl.int32) if ASYMMETRIC else 2 ** (BITS - 1)
        integer = (packed >> (BITS * at)) & (2**BITS - 1)
        number = (integer - (zero[:, None] if ASYMMETRIC else zero)).to(tl.float32) * scale[:, None]
        column = first + inner
        to = out + rows[:, None].to(tl.int64) * INPUTS + column[None, :]
        tl.store(to, number.to(out.dtype.element_ty), mask=inside[:, None] & (column < INPUTS)[None, :])


def unpacked(weight: KernelWeight, dtype: torch.dtype) -> Tensor:
    """Return the weights [out, in], computed in fp32 and rounded once to `dtype`."""
    steps, outputs, _ = weight.words.shape
    out = weight.scale.new_empty(outputs, weight.inputs, dtype=dtype)
    zero = weight.words if weight.zero is None else weight.zero
    grid = (triton.cdiv(outputs, _UNPACKED_ROWS), steps)
    _unpacked[grid](
        weight.words, weight.scale, zero, out, OUTPUTS=outputs, ROWS=_UNPACKED_ROWS, **compiled_weight(weight, dtype),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def only_few_tokens(device: torch.device) -> bool:
    """Return whether a program must have fewer than 64 tokens.

    On Blackwell (sm_100) each of the eight products of a step has sums of its own in tensor memory. For 64 tokens and
    128 rows they take more than its 512 columns, and Triton refuses the launch.
    """
    return capability(device)[0] == 10


def _tile(tokens: int, device: torch.device) -> tuple[int, int]:
    """Return the numbers of tokens and of weight rows of one program."""
    sizes: tuple[tuple[int, int], ...] = ((16, 64), (32, 64), (64, 128), (128, 128))  # measured on an H200
    if only_few_tokens(device):
        sizes = sizes[:2]
    return next((size for size in sizes if tokens <= size[0]), sizes[-1])


def _choose_splits(tokens: int, weight: KernelWeight, device: torch.device) -> int:
    """Return a number of splits that gives every multiprocessor work, but leaves each split enough steps."""
    if device.type == "cpu":
        return 1
    steps, outputs, _ = weight.words.shape
    batch, rows = _tile(tokens, device)
    programs = triton.cdiv(outputs, rows) * triton.cdiv(tokens, batch)
    wanted = _RESIDENT_PROGRAMS * _processors(device)
    splits = 1
    while splits < _MOST_SPLITS and programs * splits < wanted and steps >= 2 * splits * _FEWEST_STEPS:
        splits *= 2
    return splits


def _processors(device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else _HOPPER_PROCESSORS


def compiled_weight(weight: KernelWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time constants of a weight, or of stacked ones, for kernels that call `packed_sum`."""
    step = _STEP * 32 // weight.bits
    group = weight.group if weight.scale.shape[-2] > 1 else weight.words.shape[-3] * step
    compute = compute_dtype(dtype)
    return {
        "INPUTS": weight.inputs,
        "GROUP": group,
        "BITS": weight.bits,
        "ASYMMETRIC": weight.zero is not None,
        "SPAN": gcd(group, step),
        "COMPUTE": compute,
        "BASE": _BASE[compute.name],
    }


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernels for layers of Llama-3.1-8B and 70B, for few tokens and many."""
    whole = []
    for model, outputs, inputs, bits, zeros, tokens, splits, dtype in [
        ("Llama-3.1-8B qkv", 6144, 4096, 4, False, 1, 4, torch.bfloat16),
        ("Llama-3.1-8B down", 4096, 14336, 4, True, 1, 4, torch.bfloat16),
        ("Llama-3.1-70B gate and up", 57344, 8192, 4, False, 16, 1, torch.bfloat16),
        ("Llama-3.1-70B gate and up", 57344, 8192, 4, True, 32, 1, torch.float16),
        ("Llama-3.1-70B gate and up", 57344, 8192, 4, False, 4096, 1, torch.bfloat16),
        ("Llama-3.1-8B qkv", 6144, 4096, 8, False, 1, 4, torch.bfloat16),
        ("Llama-3.1-8B qkv", 6144, 4096, 8, False, 4096, 1, torch.bfloat16),
    ]:
        groups = 1 if bits == 8 else inputs // 128
        words = shaped(triton.cdiv(inputs * bits, 32 * _STEP), outputs, _STEP, dtype=I32)
        zero = shaped(groups, outputs, dtype=U8) if zeros else None
        weight = KernelWeight(words, shaped(groups, outputs, dtype=dtype), zero, bits, inputs // groups, inputs)
        launch = partial(packed_gemm, shaped(tokens, inputs, dtype=dtype), weight, splits)
        batch = _tile(tokens, words.device)[0]
        kind = f"int{bits}{' with zeros' if zeros else ''} {TRITON_NAME[dtype]}, {batch} tokens, {splits} splits"
        ceiling = 80 if batch < 64 else 208
        yield Specialisation(f"packed_gemm {model} {kind}", _packed_gemm, launch, ceiling, ("wgmma", "cp.async"))
        if tokens == 4096:
            name = f"unpacked {model} int{bits}{' with zeros' if zeros else ''}"
            whole.append(Specialisation(name, _unpacked, partial(unpacked, weight, dtype), 64, ("st.global",)))
    yield from whole
