"""What the time of a kernel is made of before anything is learnt of its shape: launch, waves of tiles, bytes.

Every kind of operation says what its *shape* is (what a model fixes), what its *sizes* are (what a step brings), and
its structured time on a GPU by three coefficients. The jumps of a kernel's time live here, so that what is left for
a `Surface` to learn is smooth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calibration.operations import (
    Collective,
    DecodeAttention,
    Experts,
    Gemm,
    Operation,
    PrefillAttention,
    own_pairs,
)
from serving.deployments.gpu_spec import GpuSpec

_TILES = ((128, 256), (128, 128), (64, 128), (64, 64))  # rows and columns of the output that a thread block makes
_SPLITS = (1, 2, 4, 8)  # of the k dimension, when tiles alone would leave the device idle
_WIDEST = 65536  # columns; a wider GEMM, such as a head, is several side by side and no less efficient
_STEP_K = 64  # a tile's shortest step along k
_QUERY_TILE = 128  # queries of a thread block of prompt attention: tokens, and the heads that share a KV head
_NO_WINDOW = 2**17  # tokens seen without a sliding window, as a feature
_SHARP = 4.0  # how sharply the longer of two overlapped times wins


@dataclass(frozen=True)
class Efficiency:
    """What a kernel makes of a GPU.

    launch_ns       before and after its work
    compute, memory shares of the datasheet's rates; of a collective, `memory` is the share of the links'
    unit_ns         every piece of work takes so long, however small: a row of activations that has to be quantised,
                    a wave of thread blocks of an attention
    """

    launch_ns: float
    compute: float
    memory: float
    unit_ns: float


class Structure(Protocol):
    """Of one kind of operation: which surface it is on, and where.

    key     `gemm/fp8`: operations of one key are one kernel, more or less
    shape   what a model fixes; sizes: what a step brings, numbers or arrays
    ns      structured time, nanoseconds
    """

    def key(self, operation: Any) -> str: ...
    def shape(self, operation: Any) -> tuple[float, ...]: ...
    def sizes(self, operation: Any) -> tuple[Any, ...]: ...
    def ns(self, gpu: GpuSpec, operation: Any, efficiency: Efficiency) -> Any: ...


class GemmStructure:
    """Thread blocks make tiles of the output, as many at a time as there are SMs; the last wave may be half empty."""

    def key(self, operation: Gemm) -> str:
        return f"gemm/{_sixteen_bits(operation.dtype)}"

    def shape(self, operation: Gemm) -> tuple[float, ...]:
        return min(operation.n, _WIDEST), operation.k

    def sizes(self, operation: Gemm) -> tuple[Any, ...]:
        return (operation.m,)

    def ns(self, gpu: GpuSpec, operation: Gemm, efficiency: Efficiency) -> Any:
        per_flop = 1e9 * gpu.sm_count / gpu.flop_per_s(operation.dtype) / efficiency.compute
        compute: Any = np.inf
        for rows, columns in _TILES:
            tiles = np.ceil(operation.m / rows) * -(-operation.n // columns)
            for split in _SPLITS:
                waves = np.ceil(tiles * split / gpu.sm_count)
                work = 2.0 * rows * columns * max(operation.k / split, _STEP_K)
                merging = efficiency.launch_ns * np.log2(split) / 2
                compute = np.minimum(compute, waves * work * per_flop + merging)
        work = overlapped(compute, _memory_ns(gpu, operation, efficiency))
        return efficiency.launch_ns + operation.m * efficiency.unit_ns + work


class PrefillStructure:
    """Equal prompts stand for ragged ones: as many tokens, as many pairs among themselves and with their past.

    A prompt of n tokens over a past of c has key-value loops as long as a prompt of n + 2c without past, and as many
    thread blocks as its own n tokens give: tables without past are read at those sizes.
    """

    def key(self, operation: PrefillAttention) -> str:
        return f"prefill/{_sixteen_bits(operation.kv_dtype)}"

    def shape(self, operation: PrefillAttention) -> tuple[float, ...]:
        return _heads(operation)

    def sizes(self, operation: PrefillAttention) -> tuple[Any, ...]:
        length, past = _equal_prompts(operation)
        reach = length + 2.0 * past
        return np.maximum(operation.tokens / reach, 1.0), reach

    def ns(self, gpu: GpuSpec, operation: PrefillAttention, efficiency: Efficiency) -> Any:
        length, _ = _equal_prompts(operation)
        group = operation.heads / operation.kv_heads
        tiles = operation.tokens / length * np.ceil(length * group / _QUERY_TILE)
        blocks = np.maximum(tiles * operation.kv_heads, 1.0)
        waves = np.maximum(blocks / gpu.sm_count, 1.0)
        idle = waves * gpu.sm_count / blocks
        compute = 1e9 * operation.flops * idle / gpu.flop_per_s("bfloat16") / efficiency.compute
        work = overlapped(compute, _memory_ns(gpu, operation, efficiency))
        return efficiency.launch_ns + waves * efficiency.unit_ns + work


class DecodeStructure:
    """KV is read once; rows of equal context stand for the batch."""

    def key(self, operation: DecodeAttention) -> str:
        return f"decode/{_sixteen_bits(operation.kv_dtype)}"

    def shape(self, operation: DecodeAttention) -> tuple[float, ...]:
        return _heads(operation)

    def sizes(self, operation: DecodeAttention) -> tuple[Any, ...]:
        return operation.rows, operation.context / np.maximum(operation.rows, 1)

    def ns(self, gpu: GpuSpec, operation: DecodeAttention, efficiency: Efficiency) -> Any:
        compute = 1e9 * operation.flops / gpu.flop_per_s("bfloat16") / efficiency.compute
        waves = operation.rows * operation.kv_heads / gpu.sm_count
        work = overlapped(compute, _memory_ns(gpu, operation, efficiency))
        return efficiency.launch_ns + waves * efficiency.unit_ns + work


class ExpertsStructure:
    """Weights of the experts that some token chose are read; each expert's rows are padded to a tile."""

    def key(self, operation: Experts) -> str:
        return f"experts/{_sixteen_bits(operation.dtype)}"

    def shape(self, operation: Experts) -> tuple[float, ...]:
        return (
            operation.hidden,
            operation.inter / operation.tp,
            operation.topk,
            operation.experts,
            operation.experts / operation.ep,
        )

    def sizes(self, operation: Experts) -> tuple[Any, ...]:
        return (operation.tokens,)

    def ns(self, gpu: GpuSpec, operation: Experts, efficiency: Efficiency) -> Any:
        compute = 1e9 * operation.flops / gpu.flop_per_s(operation.dtype) / efficiency.compute
        work = overlapped(compute, _memory_ns(gpu, operation, efficiency))
        return efficiency.launch_ns + operation.tokens * efficiency.unit_ns + work


class CollectiveStructure:
    """Bytes that a device sends over its links by the ring algorithm."""

    def key(self, operation: Collective) -> str:
        return f"nccl/{operation.kind}"

    def shape(self, operation: Collective) -> tuple[float, ...]:
        return (operation.gpus,)

    def sizes(self, operation: Collective) -> tuple[Any, ...]:
        return (operation.elements,)

    def ns(self, gpu: GpuSpec, operation: Collective, efficiency: Efficiency) -> Any:
        return efficiency.launch_ns + 1e9 * operation.bytes / gpu.link_bytes_per_s / efficiency.memory


def structure_of(operation: Operation) -> Structure:
    """The structure of an operation's kind; KeyError for one without shape, such as `Elementwise`."""
    return _STRUCTURES[type(operation)]


_STRUCTURES: dict[type, Structure] = {
    Gemm: GemmStructure(),
    PrefillAttention: PrefillStructure(),
    DecodeAttention: DecodeStructure(),
    Experts: ExpertsStructure(),
    Collective: CollectiveStructure(),
}


def overlapped(one: Any, other: Any) -> Any:
    """Time of two kinds of work at once: about the longer of the two."""
    longer = np.maximum(np.maximum(one, other), 1e-9)
    return longer * ((one / longer) ** _SHARP + (other / longer) ** _SHARP) ** (1 / _SHARP)


def _sixteen_bits(dtype: str) -> str:
    return "bfloat16" if dtype in ("float16", "float32") else dtype


def _memory_ns(gpu: GpuSpec, operation: Any, efficiency: Efficiency) -> Any:
    return 1e9 * operation.bytes / gpu.memory_bytes_per_s / efficiency.memory


def _heads(operation: PrefillAttention | DecodeAttention) -> tuple[float, ...]:
    group = operation.heads / operation.kv_heads
    return operation.kv_heads, group, operation.head_dim, operation.window or _NO_WINDOW


def _equal_prompts(operation: PrefillAttention) -> tuple[Any, Any]:
    """Tokens and past tokens of each of the equal prompts that stand for `operation`'s."""
    tokens = np.maximum(operation.tokens, 1)
    if operation.window:  # pairs are cut off at the window and tell no length
        rows = np.maximum(operation.rows, 1)
        return tokens / rows, operation.past / rows
    own = own_pairs(operation.rows, operation.tokens, operation.past, operation.pairs)
    length = np.maximum(2.0 * own / tokens - 1.0, 1.0)
    return length, np.maximum(operation.pairs - own, 0.0) / tokens
