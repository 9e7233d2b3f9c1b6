"""The experts of an MoE layer as two grouped GEMMs: gate and up with SwiGLU's product, then down and weighting.

A *choice* is a token with one of its k experts. A program computes a tile: some outputs for some choices of one expert.
It looks up the expert in `offsets` on the GPU. So the grid depends only on the number of tokens, and a launch may be
captured in a graph; programs beyond the last tile end at once. The tensor between the two GEMMs is sorted by expert.
The answers are sorted by token, and the k answers of a token are summed. Weights in FP8, 4 bits and 8 bits become
floats in registers; integers do so as in `packed_gemm`. As in `packed_gemm`, weights are the left operand and tokens
the right operand. The rows of a tile alternate between gate and up.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentwin.realengine.kernels.launches import F32, I32, I64, U8, Specialisation, compute_dtype, shaped
from tokentwin.realengine.kernels.packed_gemm import KernelWeight, compiled_weight, only_few_tokens, packed_sum
from tokentwin.realengine.models.linear import FP8_BLOCK, Fp8Weight

ExpertWeights = Tensor | Fp8Weight | KernelWeight  # weights of all experts; the first dimension is the expert

_FEW = 16  # tokens of a tile if each expert has few tokens
_MANY = 64
_BLOCK_K = 64


@triton.jit
def _rows_of_tile(offsets, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of tile number `tile`, its rows in the sorted order, and a mask of its existing rows.

    If there is no such tile, the result is EXPERTS and no rows.
    """
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    known = experts < EXPERTS
    starts = tl.load(offsets + experts, mask=known, other=0)
    ends = tl.load(offsets + experts + 1, mask=known, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where(known & (until <= tile), 1, 0), 0)
    mine = experts == expert
    first = tl.sum(tl.where(mine, starts + (tile - until + tiles) * BLOCK_M, 0), 0)
    rows = first + tl.arange(0, BLOCK_M)
    return expert, rows, rows < tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _float_sum(
    tokens, tokens_inside, values, scales, rows, rows_inside,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the same sum as `packed_sum`, for weights that are floats.

    A block of `SHARED` rows and `GROUP` inputs has one scale; SHARED is 0 without scales.
    """
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for first in tl.range(0, INPUTS, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        some = k < INPUTS
        weight = tl.load(
            values + rows.to(tl.int64)[:, None] * INPUTS + k[None, :],
            mask=rows_inside[:, None] & some[None, :],
            other=0.0,
        ).to(COMPUTE)
        activation = tl.load(tokens[None, :] + k[:, None], mask=some[:, None] & tokens_inside[None, :], other=0.0).to(
            COMPUTE
        )
        if GROUPS > 1:
            part = tl.dot(weight, activation, input_precision="ieee")
            scale = tl.load(scales + rows // SHARED * GROUPS + first // GROUP, mask=rows_inside, other=0.0)
            total += part * scale[:, None]
        else:
            total = tl.dot(weight, activation, total, input_precision="ieee")
    if SHARED and GROUPS == 1:
        total *= tl.load(scales + rows // SHARED, mask=rows_inside, other=0.0)[:, None]
    return total


@triton.jit
def _grouped(
    x, values, scales, zeros, choices, offsets, shares, out,
    GATED: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, ASYMMETRIC: tl.constexpr, SPAN: tl.constexpr,
    BASE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    expert, places, inside = _rows_of_tile(offsets, tl.program_id(0), EXPERTS, TOKENS)
    if expert < EXPERTS:
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        WEIGHTS: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
        rows_inside = rows < WEIGHTS
        if GATED:
            rows = rows // 2 + rows % 2 * OUTPUTS
            tokens = x + tl.load(choices + places, mask=inside, other=0) // TOPK * INPUTS
        else:
            tokens = x + places.to(tl.int64) * INPUTS
        which = expert.to(tl.int64)
        if BITS == 16:
            SCALES: tl.constexpr = WEIGHTS // max(SHARED, 1) * ((INPUTS + GROUP - 1) // GROUP)
            total = _float_sum(
                tokens, inside, values + which * WEIGHTS * INPUTS, scales + which * SCALES, rows, rows_inside,
                INPUTS, GROUP, SHARED, TOKENS, ROWS, BLOCK_K, COMPUTE,
            )  # fmt: skip
        else:
            STEPS: tl.constexpr = (INPUTS * BITS + 511) // 512
            SCALES: tl.constexpr = WEIGHTS * ((INPUTS + GROUP - 1) // GROUP)  # type: ignore[no-redef]
            total = packed_sum(
                tokens, inside, values + which * STEPS * WEIGHTS * 16, scales + which * SCALES, zeros + which * SCALES,
                rows, rows_inside, 0, STEPS,
                WEIGHTS, INPUTS, GROUP, BITS, ASYMMETRIC, SPAN, TOKENS, ROWS, COMPUTE, BASE,
            )  # fmt: skip
        if GATED:
            WIDTH: tl.constexpr = ROWS // 2
            gate, up = tl.split(tl.permute(tl.reshape(total, (WIDTH, 2, TOKENS)), (0, 2, 1)))
            result = gate * tl.sigmoid(gate) * up
            into = places.to(tl.int64)
        else:
            WIDTH: tl.constexpr = ROWS  # type: ignore[no-redef]
            into = tl.load(choices + places, mask=inside, other=0)
            result = total * tl.load(shares + into, mask=inside, other=0.0)[None, :]
        columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        to = out + into[None, :] * OUTPUTS + columns[:, None]
        tl.store(to, result.to(out.dtype.element_ty), mask=inside[None, :] & (columns < OUTPUTS)[:, None])


def grouped_mlp(
    x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, choices: Tensor, offsets: Tensor, shares: Tensor
) -> Tensor:
    """Return the weighted sum of the answers of each token's experts, `[T, hidden]`.

    Args:
        x: [T, hidden] bf16, fp16 or fp32
        gate_up: stacked layers [2 n, hidden]; `down`: stacked layers [hidden, n]; floats have the dtype of `x` or FP8;
            all are contiguous
        choices: [T x k] int64, sorted by expert; each is token x k + number of the token's choice
        offsets: [experts + 1] int32, index of the first choice of each of these experts; other choices add nothing
        shares: [T, k] float32, the weights of the choices
    """
    tokens, hidden = x.shape
    experts, rows, topk = len(offsets) - 1, len(choices), shares.shape[1]
    first = _compiled_in(gate_up, True, experts, rows, topk, x.dtype)
    second = _compiled_in(down, False, experts, rows, topk, x.dtype)
    # each expert has at most one tile that is not full
    tiles = min(rows, experts) + rows // min(first["TOKENS"], second["TOKENS"])
    product = x.new_empty(rows, first["OUTPUTS"])
    answers = x.new_zeros(tokens, topk, hidden)
    for compiled, weight, into, out in ((first, gate_up, x, product), (second, down, product, answers)):
        grid = (tiles, triton.cdiv(compiled["OUTPUTS"] * (1 + compiled["GATED"]), compiled["ROWS"]))
        _grouped[grid](into, *_tensors(weight), choices, offsets, shares, out, **compiled)
    return answers.sum(1)


def _tensors(weight: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, scales and zero points; a missing tensor is replaced by one that the kernel does not read."""
    if isinstance(weight, Tensor):
        return weight, weight, weight
    if isinstance(weight, Fp8Weight):
        return weight.values, weight.scale, weight.scale
    return weight.words, weight.scale, weight.words if weight.zero is None else weight.zero


def _compiled_in(
    weight: ExpertWeights, gated: bool, experts: int, rows: int, topk: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of a launch that are compile-time constants of the kernel."""
    few = rows < _FEW * experts
    if isinstance(weight, KernelWeight):
        few = few or only_few_tokens(weight.words.device)
        outputs = weight.words.shape[-2]
        compiled = {**compiled_weight(weight, dtype), "SHARED": 0, "BLOCK_K": 0}
    else:
        values = weight if isinstance(weight, Tensor) else weight.values
        outputs, inputs = values.shape[1:]
        grouped = isinstance(weight, Fp8Weight) and weight.scale.shape[2] > 1
        compiled = {
            "INPUTS": inputs,
            "GROUP": FP8_BLOCK if grouped else inputs,
            "BITS": 16,
            "ASYMMETRIC": False,
            "SPAN": 0,
            "COMPUTE": compute_dtype(dtype),
            "BASE": 0,
            "SHARED": outputs // weight.scale.shape[1] if isinstance(weight, Fp8Weight) else 0,
            "BLOCK_K": _BLOCK_K if dtype != torch.float32 else 32,
        }
    return {
        **compiled,
        "GATED": gated,
        "OUTPUTS": outputs // 2 if gated else outputs,
        "EXPERTS": experts,
        "TOPK": topk,
        "TOKENS": _FEW if few else _MANY,
        "ROWS": 64 if few else 128,
        "num_warps": 4 if few else 8,
        "num_stages": 4 if few else 3,
    }


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernels for Mixtral 8x7B on two ranks and Qwen3-30B-A3B, for steps of 1 and of 8192 tokens."""
    small, large = (8, 4096, 7168, 2), (128, 2048, 768, 8)
    kinds = ("bf16", "fp8", "fp8 by block", "int4", "int4 with zeros", "int8")
    for model, kind in [("8x7B/2", "bf16"), *(("30B-A3B", kind) for kind in kinds)]:
        experts, hidden, inner, topk = large if model == "30B-A3B" else small
        gate_up, down = _shaped(kind, experts, 2 * inner, hidden), _shaped(kind, experts, hidden, inner)
        for tokens in (1, 8192):
            choices, offsets = shaped(tokens * topk, dtype=I64), shaped(experts + 1, dtype=I32)
            shares = shaped(tokens, topk, dtype=F32)
            launch = partial(grouped_mlp, shaped(tokens, hidden), gate_up, down, choices, offsets, shares)
            width, ceiling = (_FEW, 80) if tokens == 1 else (_MANY, 128)
            for which, part in enumerate(("gate and up", "down")):
                name = f"grouped_gemm {part} {model} {kind}, by {width}"
                yield Specialisation(name, _grouped, launch, ceiling, ("wgmma", "cp.async"), which)


def _shaped(kind: str, experts: int, outputs: int, inputs: int) -> ExpertWeights:
    """Return weights of these shapes on the meta device, without content."""
    if kind == "bf16":
        return shaped(experts, outputs, inputs)
    if kind.startswith("fp8"):
        blocks = (outputs // FP8_BLOCK, inputs // FP8_BLOCK) if kind == "fp8 by block" else (outputs, 1)
        return Fp8Weight(
            shaped(experts, outputs, inputs, dtype=torch.float8_e4m3fn), shaped(experts, *blocks, dtype=F32)
        )
    bits, groups = (8, 1) if kind == "int8" else (4, inputs // 128)
    zero = shaped(experts, groups, outputs, dtype=U8) if kind.endswith("zeros") else None
    words = shaped(experts, inputs * bits // 512, outputs, 16, dtype=I32)
    return KernelWeight(words, shaped(experts, groups, outputs), zero, bits, inputs // groups, inputs)
