"""The structured time of a kernel, from launches, waves of tiles and bytes, before any correction by measured ratios.

Every kind of operation has a *shape* (features that the model fixes), *sizes* (features that depend on the step), and a
structured time on a GPU, computed with the coefficients of `Efficiency`. The jumps of a kernel's time are in the
structured time. The ratio of measured to structured time is therefore smooth, and a `Surface` is fitted to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tokentwin.calibration.latent_attention import (
    DecodeIndexScores,
    HeadGemm,
    IndexScores,
    LatentDecode,
    LatentPrefill,
    SparsePrefill,
)
from tokentwin.calibration.linear_attention import LinearDecode, LinearPrefill
from tokentwin.calibration.operations import DecodeAttention, Experts, Gemm, Operation, PrefillAttention, own_pairs
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES

_TILES = ((128, 256), (128, 128), (64, 128), (64, 64))  # rows and columns of the output that a thread block computes
_UNPACKING_TILES = ((16, 64), (32, 64))  # more tiles, of kernels that unpack narrow weights to 16 bits (Marlin)
_SPLITS = (1, 2, 4, 8)  # numbers of parts of the k dimension, for when tiles alone would leave SMs idle
_WIDEST = 65536  # columns; a wider GEMM, such as the LM head, is as efficient as one of this width
_STEP_K = 64  # a tile's shortest step along k
_QUERY_TILE = 128  # queries of a thread block of prompt attention: tokens, and the heads that share a KV head
_NO_WINDOW = 2**17  # value of the window feature without a sliding window
_SHARP = 4.0  # exponent of the smooth maximum of two overlapped times


@dataclass(frozen=True)
class Efficiency:
    """The coefficients of a kernel's structured time on a GPU.

    launch_ns       time before and after the kernel's work
    compute, memory shares of the datasheet's rates that the kernel reaches
    unit_ns         added time of every piece of work: a row of activations that has to be quantised, or a wave of
                    thread blocks of an attention
    """

    launch_ns: float
    compute: float
    memory: float
    unit_ns: float


class Structure(NamedTuple):
    """The features and the structured time of one kind of operation.

    Attributes:
        key: function that returns an operation's key, such as `gemm/fp8`; operations with one key run roughly the same
            kernel
        shape, sizes: functions that return the features that the model fixes, and the features that depend on the step
            (numbers or arrays)
        ns: function that returns the structured time in nanoseconds
    """

    key: Callable[[Any], str]
    shape: Callable[[Any], tuple[float, ...]]
    sizes: Callable[[Any], tuple[Any, ...]]
    ns: Callable[[GpuSpec, Any, Efficiency], Any]


def structure_of(operation: Operation) -> Structure:
    """Return the structure of an operation's kind; raise KeyError for a kind without one, such as `Elementwise`."""
    return _STRUCTURES[type(operation)]


def _gemm_ns(gpu: GpuSpec, gemm: Gemm, efficiency: Efficiency, batch: int = 1) -> Any:
    """Return a GEMM's time: SMs compute tiles of the output in waves, and the last wave may be partly empty."""
    per_flop = 1e9 * gpu.sm_count / gpu.flop_per_s(gemm.dtype) / efficiency.compute
    compute: Any = np.inf
    unpacks = DTYPE_BYTES[gemm.dtype] < 2 and not gpu.has_unit_for(gemm.dtype)
    for rows, columns in (*_TILES, *_UNPACKING_TILES) if unpacks else _TILES:
        tiles = np.ceil(gemm.m / rows) * (-(-gemm.n // columns) * batch)
        for split in _SPLITS:
            waves = np.ceil(tiles * split / gpu.sm_count)
            work = 2.0 * rows * columns * max(gemm.k / split, _STEP_K)
            merging = efficiency.launch_ns * np.log2(split) / 2
            compute = np.minimum(compute, waves * work * per_flop + merging)
    return _launched(gpu, gemm, efficiency, compute, gemm.m)


def _prefill_ns(gpu: GpuSpec, attention: PrefillAttention, efficiency: Efficiency) -> Any:
    """Return the time of prompt attention, with equal prompts in place of the actual prompts.

    In total the equal prompts have as many tokens as the actual ones, as many query-key pairs within the chunks, and as
    many with earlier tokens.
    """
    length, _ = _equal_prompts(attention)
    group = attention.heads / attention.kv_heads
    tiles = attention.tokens / length * np.ceil(length * group / _QUERY_TILE)
    blocks = np.maximum(tiles * attention.kv_heads, 1.0)
    waves = np.maximum(blocks / gpu.sm_count, 1.0)
    idle = waves * gpu.sm_count / blocks
    compute = 1e9 * attention.flops * idle / gpu.flop_per_s("bfloat16") / efficiency.compute
    return _launched(gpu, attention, efficiency, compute, waves)


def _prefill_sizes(attention: PrefillAttention) -> tuple[Any, ...]:
    """Return the number and the length of prompts without past tokens that stand for a batch.

    The kernel loops of a prompt of n tokens with c past tokens are as long as those of a prompt of n + 2c tokens
    without past. The number of thread blocks depends on the n tokens alone. The kernel tables have only prompts without
    past tokens, so a time is read at the size of such a prompt.
    """
    length, past = _equal_prompts(attention)
    reach = length + 2.0 * past
    return np.maximum(attention.tokens / reach, 1.0), reach


def _decode_sizes(attention: DecodeAttention) -> tuple[Any, ...]:
    return attention.rows, attention.context / np.maximum(attention.rows, 1)


def heads_as_rows(attention: DecodeAttention, most: int) -> DecodeAttention:
    """Return attention of equal work with only `most` KV heads, and more rows in their place.

    Each KV head of a row is computed apart from the others, like a row. In NVIDIA's tables of H100 and H200 twice the
    rows with half the heads take 0.99 to 1.00 times as long (medians of shapes; 8 of 10 points: 0.94 to 1.11).
    """
    times, heads = attention.kv_heads / most, attention.heads // attention.kv_heads * most
    return replace(
        attention, rows=attention.rows * times, context=attention.context * times, heads=heads, kv_heads=most
    )


def _decode_ns(gpu: GpuSpec, attention: DecodeAttention, efficiency: Efficiency) -> Any:
    """Return the time of decode attention, which reads the KV once; rows of equal context stand for the batch."""
    compute = 1e9 * attention.flops / gpu.flop_per_s("bfloat16") / efficiency.compute
    waves = attention.rows * attention.kv_heads / gpu.sm_count
    return _launched(gpu, attention, efficiency, compute, waves)


def _linear_ns(gpu: GpuSpec, attention: LinearPrefill | LinearDecode, efficiency: Efficiency) -> Any:
    """Return the time of linear attention.

    Decode rows read and write their states. The chunks of a prompt run one after another. A thread block computes one
    value head, and SMs without a head are idle.
    """
    blocks, idle = attention.rows * attention.value_heads, 1.0
    if isinstance(attention, LinearPrefill):
        blocks = np.maximum(blocks, 1.0)
        idle = np.maximum(gpu.sm_count / blocks, 1.0)
    compute = 1e9 * attention.flops * idle / gpu.flop_per_s("bfloat16") / efficiency.compute
    more = (attention.launches - 1) * efficiency.launch_ns
    return more + _launched(gpu, attention, efficiency, compute, blocks / gpu.sm_count)


def _experts_ns(gpu: GpuSpec, experts: Experts, efficiency: Efficiency) -> Any:
    """Return the time of experts: the chosen experts' weights are read, and each expert's rows are padded to a tile."""
    compute = 1e9 * experts.flops / gpu.flop_per_s(experts.dtype) / efficiency.compute
    return _launched(gpu, experts, efficiency, compute, experts.tokens)


def _launched(gpu: GpuSpec, operation: Any, efficiency: Efficiency, compute_ns: Any, units: Any) -> Any:
    """Return the launch time plus the times of `units` pieces of work and of computing beside memory traffic."""
    memory_ns = 1e9 * operation.bytes / gpu.memory_bytes_per_s / efficiency.memory
    return efficiency.launch_ns + units * efficiency.unit_ns + overlapped(compute_ns, memory_ns)


def overlapped(one: Any, other: Any) -> Any:
    """Return the time of two kinds of work that overlap, which is about the longer of the two times."""
    longer = np.maximum(np.maximum(one, other), 1e-9)
    return longer * ((one / longer) ** _SHARP + (other / longer) ** _SHARP) ** (1 / _SHARP)


def _sixteen_bits(dtype: str) -> str:
    return "bfloat16" if dtype in ("float16", "float32") else dtype


def _heads(operation: PrefillAttention | DecodeAttention) -> tuple[float, ...]:
    group = operation.heads / operation.kv_heads
    return operation.kv_heads, group, operation.head_dim, operation.window or _NO_WINDOW


def _latent_heads(operation: LatentPrefill | LatentDecode) -> tuple[float, ...]:
    return operation.heads, operation.head_dim, operation.value_dim


def _linear_heads(operation: LinearPrefill) -> tuple[float, ...]:
    return operation.key_heads, operation.value_heads, operation.key_dim, operation.value_dim


def _equal_prompts(operation: PrefillAttention) -> tuple[Any, Any]:
    """Return the numbers of tokens and of past tokens of each of the equal prompts that stand for `operation`."""
    tokens = np.maximum(operation.tokens, 1)
    if operation.window:  # the window cuts pairs off, so they do not determine a length
        rows = np.maximum(operation.rows, 1)
        return tokens / rows, operation.past / rows
    own = own_pairs(operation.rows, operation.tokens, operation.past, operation.pairs)
    length = np.maximum(2.0 * own / tokens - 1.0, 1.0)
    return length, np.maximum(operation.pairs - own, 0.0) / tokens


_STRUCTURES: dict[type, Structure] = {
    Gemm: Structure(
        lambda gemm: f"gemm/{_sixteen_bits(gemm.dtype)}",
        lambda gemm: (min(gemm.n, _WIDEST), gemm.k),
        lambda gemm: (gemm.m,),
        _gemm_ns,
    ),
    PrefillAttention: Structure(
        lambda attention: f"prefill/{_sixteen_bits(attention.kv_dtype)}", _heads, _prefill_sizes, _prefill_ns
    ),
    DecodeAttention: Structure(
        lambda attention: f"decode/{_sixteen_bits(attention.kv_dtype)}",
        _heads,
        _decode_sizes,
        _decode_ns,
    ),
    HeadGemm: Structure(
        lambda gemm: f"head_gemm/{_sixteen_bits(gemm.dtype)}",
        lambda gemm: (gemm.heads, gemm.n, gemm.k),
        lambda gemm: (gemm.m,),
        lambda gpu, gemm, efficiency: _gemm_ns(gpu, gemm, efficiency, gemm.heads),
    ),
    LatentPrefill: Structure(
        lambda attention: f"mla_prefill/{_sixteen_bits(attention.kv_dtype)}", _latent_heads, _prefill_sizes, _prefill_ns
    ),
    LatentDecode: Structure(
        lambda attention: f"mla_decode/{_sixteen_bits(attention.kv_dtype)}", _latent_heads, _decode_sizes, _decode_ns
    ),
    SparsePrefill: Structure(
        lambda attention: f"sparse_prefill/{_sixteen_bits(attention.kv_dtype)}",
        _latent_heads,
        _decode_sizes,
        _decode_ns,
    ),
    **dict.fromkeys(
        (IndexScores, DecodeIndexScores),
        Structure(
            lambda index: "index/fp8",
            lambda index: (index.heads, index.head_dim),
            lambda index: (index.tokens, index.pairs / np.maximum(index.tokens, 1)),
            lambda gpu, index, efficiency: _launched(
                gpu, index, efficiency, 1e9 * index.flops / gpu.flop_per_s(index.dtype) / efficiency.compute, 0.0
            ),
        ),
    ),
    LinearPrefill: Structure(
        lambda attention: "linear_prefill/bfloat16",
        _linear_heads,
        lambda attention: (attention.rows, attention.tokens / np.maximum(attention.rows, 1)),
        _linear_ns,
    ),
    LinearDecode: Structure(
        lambda attention: "linear_decode/bfloat16",
        _linear_heads,
        lambda attention: (attention.rows,),
        _linear_ns,
    ),
    Experts: Structure(
        lambda e: f"experts/{_sixteen_bits(e.dtype)}",
        lambda e: (e.hidden, e.inter / e.tp, e.topk, e.experts, e.experts / e.ep),
        lambda e: (e.tokens,),
        _experts_ns,
    ),
}
