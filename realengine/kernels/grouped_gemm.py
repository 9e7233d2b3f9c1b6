"""The experts of a mixture as two grouped GEMMs: gate and up with SwiGLU's product, then down with weights.

A program takes a tile: some choices of one expert by some columns. Which expert that is it finds in `offsets`, on the
GPU, so that the grid depends on the number of tokens alone and a launch may be captured in a graph; programs beyond the
last tile end at once. The inner tensor lies sorted by expert, the answers by token, where its k answers are summed.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import TRITON_NAME
from realengine.kernels.interpreting import compute_dtype

if TYPE_CHECKING:
    from realengine.kernels.aot import Specialisation

_FEW = 16  # rows of a tile while experts have few: the least that tensor cores take
_MANY = 64  # rows of a tile of wgmma
_BLOCK_N, _BLOCK_K = 64, 64


@triton.jit
def _rows_of_tile(offsets, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of tile number `tile`, its rows in the sorted order and which of them there are; EXPERTS and nothing
    where there are not so many tiles."""
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
def _gate_up(
    x,
    weight,
    choices,
    offsets,
    out,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    expert, rows, held = _rows_of_tile(offsets, tl.program_id(0), EXPERTS, BLOCK_M)
    if expert < EXPERTS:
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < INNER
        tokens = tl.load(choices + rows, mask=held, other=0) // TOPK
        gates = weight + expert.to(tl.int64) * 2 * INNER * HIDDEN + columns.to(tl.int64)[None, :] * HIDDEN
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in tl.range(0, HIDDEN, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            some = k < HIDDEN
            a = tl.load(
                x + tokens.to(tl.int64)[:, None] * HIDDEN + k[None, :], mask=held[:, None] & some[None, :], other=0.0
            )
            taken = some[:, None] & inside[None, :]
            b = tl.load(gates + k[:, None], mask=taken, other=0.0)
            c = tl.load(gates + INNER * HIDDEN + k[:, None], mask=taken, other=0.0)
            gate = tl.dot(a.to(COMPUTE), b.to(COMPUTE), gate, input_precision="ieee")
            up = tl.dot(a.to(COMPUTE), c.to(COMPUTE), up, input_precision="ieee")
        product = gate * tl.sigmoid(gate) * up
        places = rows.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(out + places, product.to(out.dtype.element_ty), mask=held[:, None] & inside[None, :])


@triton.jit
def _down(
    inner,
    weight,
    choices,
    offsets,
    shares,
    out,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    expert, rows, held = _rows_of_tile(offsets, tl.program_id(0), EXPERTS, BLOCK_M)
    if expert < EXPERTS:
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < HIDDEN
        weights = weight + expert.to(tl.int64) * HIDDEN * INNER + columns.to(tl.int64)[None, :] * INNER
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in tl.range(0, INNER, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            some = k < INNER
            a = tl.load(
                inner + rows.to(tl.int64)[:, None] * INNER + k[None, :], mask=held[:, None] & some[None, :], other=0.0
            )
            b = tl.load(weights + k[:, None], mask=some[:, None] & inside[None, :], other=0.0)
            total = tl.dot(a.to(COMPUTE), b.to(COMPUTE), total, input_precision="ieee")
        choice = tl.load(choices + rows, mask=held, other=0)
        total *= tl.load(shares + choice, mask=held, other=0.0)[:, None]
        places = choice.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=held[:, None] & inside[None, :])


def grouped_mlp(x: Tensor, gate_up: Tensor, down: Tensor, choices: Tensor, offsets: Tensor, shares: Tensor) -> Tensor:
    """Each token through its experts, weighed and summed: `[T, hidden]`.

    x        [T, hidden] bf16, fp16 or fp32
    gate_up  [experts, 2 n, hidden], `down` [experts, hidden, n], as `x`; all contiguous
    choices  [T k] int64, token x k + number of the choice, sorted by expert
    offsets  [experts + 1] int32, where the choices of each of these experts begin; those outside add nothing
    shares   [T, k] float32, the weights of the choices
    """
    tokens, hidden = x.shape
    experts, _, inner = down.shape
    rows, topk = len(choices), shares.shape[1]
    compiled = _compiled_in(inner, hidden, experts, rows, x.dtype)
    tiles = min(rows, experts) + rows // compiled["BLOCK_M"]  # each expert has at most one that is not full
    product = x.new_empty(rows, inner)
    answers = x.new_zeros(tokens, topk, hidden)
    _gate_up[(tiles, triton.cdiv(inner, _BLOCK_N))](x, gate_up, choices, offsets, product, TOPK=topk, **compiled)
    _down[(tiles, triton.cdiv(hidden, _BLOCK_N))](product, down, choices, offsets, shares, answers, **compiled)
    return answers.sum(1)


def _compiled_in(inner: int, hidden: int, experts: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """All of a launch that is compiled into both kernels."""
    return {
        "INNER": inner,
        "HIDDEN": hidden,
        "EXPERTS": experts,
        "BLOCK_M": _FEW if rows < _FEW * experts else _MANY,
        "BLOCK_N": _BLOCK_N,
        "BLOCK_K": _BLOCK_K if dtype != torch.float32 else 32,
        "COMPUTE": compute_dtype(dtype),
        "num_warps": 4,
        "num_stages": 3,
    }


def specialisations() -> list["Specialisation"]:
    """How `grouped_mlp` launches for Mixtral 8x7B on two ranks and Qwen3-30B-A3B, in steps of both sizes."""
    from realengine.kernels.aot import Specialisation

    found = []
    for name, inner, hidden, experts, topk in [("8x7B/2", 7168, 4096, 8, 2), ("30B-A3B", 768, 2048, 128, 8)]:
        for rows in (topk, 8192 * topk):
            for kernel in (_gate_up, _down):
                constexprs = _compiled_in(inner, hidden, experts, rows, torch.bfloat16)
                stored = "*" + TRITON_NAME[torch.bfloat16]
                signature = {"weight": stored, "choices": "*i64", "offsets": "*i32", "out": stored}
                if kernel is _gate_up:
                    constexprs["TOPK"] = topk
                    signature["x"] = stored
                else:
                    signature |= {"inner": stored, "shares": "*fp32"}
                size = constexprs["BLOCK_M"]
                found.append(
                    Specialisation(
                        name=f"grouped{kernel.fn.__name__} {name} by {size}",
                        kernel=kernel,
                        signature=signature,
                        num_warps=constexprs.pop("num_warps"),
                        num_stages=constexprs.pop("num_stages"),
                        constexprs=constexprs,
                        register_ceiling=128,
                        expects=("cp.async", *(("wgmma",) if size == _MANY else ())),
                    )
                )
    return found
