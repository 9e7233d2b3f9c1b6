"""The operations of a step: kinds of kernels with their minimum FLOPs and bytes, and the sizes of a step.

Every size may be a number or a numpy array (all of one shape), so the same code computes the time of one step or of ten
thousand. `count` is the number of occurrences of an operation in a step, usually one per layer. FLOPs and bytes are
those of one occurrence. `KernelTimes` is the interface of models that time operations on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from tokentwin.calibration.expert_routing import experts_touched
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.inter_node import NodeLink
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES

_WEIGHT_ONLY = ("int4", "int8")
Amount = Any  # float | int | NDArray: one step, or many at once


class Operation(Protocol):
    """One kind of kernel in a step.

    Attributes:
        name: name such as `qkv` or `decode attention`, unique in a step
        count: number of occurrences in a step
        size: amount that it processes (tokens, rows, elements, ...); if it is 0, the operation does not occur
        flops, bytes: numbers of FLOPs and bytes of one occurrence on one device
    """

    @property
    def name(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def size(self) -> Amount: ...
    @property
    def flops(self) -> Amount: ...
    @property
    def bytes(self) -> Amount: ...


@dataclass(frozen=True)
class Gemm:
    """A GEMM `[m, k] x [k, n]` of activations and weights, both in `dtype`, with outputs in 16 bits.

    With weights in int4 or int8, the activations are in 16 bits.

    Attributes:
        width: bytes of a weight with its share of scales; 0 stands for the bytes of `dtype`
    """

    name: str
    m: Amount
    n: int
    k: int
    dtype: str = "bfloat16"
    count: int = 1
    width: float = 0.0

    @property
    def size(self) -> Amount:
        return self.m

    @property
    def flops(self) -> Amount:
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes(self) -> Amount:
        width = self.width or DTYPE_BYTES[self.dtype]
        activation = 2.0 if self.dtype in _WEIGHT_ONLY else max(width, 1.0)
        return width * self.n * self.k + self.m * (activation * self.k + 2.0 * self.n)


@dataclass(frozen=True)
class PrefillAttention:
    """Causal attention of `rows` prompts to the chunks of this step and to the cached tokens before the chunks.

    `tokens` is the total number of query tokens, and `past` the total number of cached tokens.

    Attributes:
        pairs: number of query-key pairs: the sum of n (2c + n + 1) / 2 over prompts of n tokens with c past tokens
        window: maximum number of tokens that a query sees (the caller has clipped `pairs` to it); 0 stands for all
    """

    name: str
    rows: Amount
    tokens: Amount
    past: Amount
    pairs: Amount
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str = "bfloat16"
    window: int = 0
    count: int = 1

    @property
    def size(self) -> Amount:
        return self.tokens

    @property
    def flops(self) -> Amount:
        return 4.0 * self.pairs * self.heads * self.head_dim

    @property
    def bytes(self) -> Amount:
        kv = 2.0 * DTYPE_BYTES[self.kv_dtype] * self.kv_heads * self.head_dim
        return kv * (self.past + self.tokens) + 4.0 * self.tokens * self.heads * self.head_dim


@dataclass(frozen=True)
class DecodeAttention:
    """Attention of `rows` decode rows, with `queries` query tokens each, over `context` KV tokens in total.

    `context` includes the KV of the query tokens themselves.
    """

    name: str
    rows: Amount
    context: Amount
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str = "bfloat16"
    window: int = 0
    count: int = 1
    queries: Amount = 1

    @property
    def size(self) -> Amount:
        return self.rows

    @property
    def flops(self) -> Amount:
        return 4.0 * self.context * self.heads * self.head_dim * self.queries

    @property
    def bytes(self) -> Amount:
        kv = 2.0 * DTYPE_BYTES[self.kv_dtype] * self.kv_heads * self.head_dim
        return kv * self.context + 4.0 * self.rows * self.queries * self.heads * self.head_dim


@dataclass(frozen=True)
class Experts:
    """The routed experts of an MoE layer: GEMMs (gate, up and down) over `tokens x topk` rows in total.

    The rows and the experts are divided among `ep` groups of devices.
    """

    name: str
    tokens: Amount
    hidden: int
    inter: int
    topk: int
    experts: int
    tp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"
    count: int = 1
    width: float = 0.0  # bytes of a weight, as in `Gemm`
    # choices and weights, two to sort the rows by expert, gate and up, activation, down, sum (vLLM's `fused_experts`)
    launches: ClassVar[int] = 7

    @property
    def size(self) -> Amount:
        return self.tokens

    @property
    def touched(self) -> Amount:
        """Expected number of this device's experts that get a token, if tokens choose evenly and independently."""
        return experts_touched(self.experts, self.topk, self.tokens) / self.ep

    @property
    def flops(self) -> Amount:
        return 6.0 * self.tokens * self.topk / self.ep * self.hidden * self.inter / self.tp

    @property
    def bytes(self) -> Amount:
        weights = 3.0 * (self.width or DTYPE_BYTES[self.dtype]) * self.hidden * self.inter / self.tp * self.touched
        return weights + self.tokens * self.topk / self.ep * (4.0 * self.hidden + 6.0 * self.inter / self.tp)


@dataclass(frozen=True)
class Elementwise:
    """Norms, rotary embedding, activations or sampling: `launches` kernels that read and write `moved` bytes in all.

    Attributes:
        after: the all-reduce just before it, with which it may be fused into one kernel
    """

    name: str
    moved: Amount
    launches: int = 1
    count: int = 1
    after: Collective | None = None

    @property
    def size(self) -> Amount:
        return self.moved

    @property
    def flops(self) -> Amount:
        return 0.0 * self.moved

    @property
    def bytes(self) -> Amount:
        return self.moved


@dataclass(frozen=True)
class Scores(Elementwise):
    """Attention scores that are written to memory and read back; `masked` is the number of FLOPs for masked scores."""

    masked: Amount = 0.0
    of_prompts: bool = True

    @property
    def flops(self) -> Amount:
        return self.masked


@dataclass(frozen=True)
class Collective:
    """A collective over `gpus` devices; `elements` is the number of 16-bit elements in a device's message.

    kind    all_reduce, all_gather, reduce_scatter, all_to_all, or p2p (from one device to another)
    fusible True if one kernel may do an all-reduce and the norm after it
    nodes   number of nodes, which have equal numbers of devices
    link    link of one device to the other nodes; None within a node
    """

    name: str
    kind: str
    gpus: int
    elements: Amount
    count: int = 1
    fusible: bool = False
    nodes: int = 1
    link: NodeLink | None = None

    @property
    def size(self) -> Amount:
        return self.elements

    @property
    def flops(self) -> Amount:
        return 0.0 * self.elements

    @property
    def bytes(self) -> Amount:
        """Bytes that a device sends over its links, by the ring algorithm."""
        share = 1.0 if self.kind == "p2p" else (self.gpus - 1) / self.gpus
        return 2.0 * self.elements * share * (2.0 if self.kind == "all_reduce" else 1.0)

    @property
    def sent_between_nodes(self) -> Amount:
        """Bytes that a device sends to other nodes; the devices of a node share the work."""
        if self.kind == "p2p":
            return 2.0 * self.elements * (self.nodes > 1)
        own = 1.0 if self.kind == "all_to_all" else self.nodes / self.gpus
        twice = 2.0 if self.kind == "all_reduce" else 1.0
        return 2.0 * self.elements * own * twice * (self.nodes - 1) / self.nodes


@dataclass(frozen=True)
class Exchange(Collective):
    """The exchange of tokens to their experts (kind `dispatch`) or back (kind `combine`), by DeepEP's kernels.

    `elements` is the number of elements of a device's own tokens, `hidden` for each token. In the mode low_latency a
    copy of a token goes to each of its `topk` experts. In the mode high_throughput one copy goes to each other node
    that has one of its experts, and from there one to each device. Tokens are assumed to choose experts evenly and
    independently.

    Attributes:
        fp8: True if elements are sent in 8 bits, with a scale for every 128 elements
    """

    hidden: int = 1
    topk: int = 1
    mode: str = "low_latency"
    fp8: bool = False

    @property
    def form(self) -> str:
        """The name of DeepEP's kernel: its mode and direction."""
        return f"{self.mode}/{self.kind}"

    @property
    def backend(self) -> str:
        """The name that vLLM gives the mode."""
        return f"deepep_{self.mode}"

    @property
    def bytes(self) -> Amount:
        return self.sent_within_node + self.sent_between_nodes

    @property
    def sent_within_node(self) -> Amount:
        """Bytes that a device sends over the node's links; in high_throughput mode, bytes for any other device."""
        if self.mode == "low_latency":
            return self._sent * self.topk * (self.gpus / self.nodes - 1) / self.gpus
        return self._sent * self._met(self.gpus) * (self.gpus - 1) / self.gpus

    @property
    def sent_between_nodes(self) -> Amount:
        copies = self.topk if self.mode == "low_latency" else self._met(self.nodes)
        return self._sent * copies * (self.nodes - 1) / self.nodes

    @property
    def _sent(self) -> Amount:
        return self.elements * (1.0 + 4.0 / 128.0 if self.fp8 else 2.0)

    def _met(self, places: int) -> float:
        """Return the expected number of nodes or devices, of `places` in all, that have an expert of a token."""
        return places * (1.0 - (1.0 - 1.0 / places) ** self.topk)


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step, defined as in `StepPlan`; every field is a number or an array.

    Attributes:
        decode_spread: standard deviation of the decode rows' contexts
        draft_tokens: number of draft tokens that decode rows verify in addition to their own token
    """

    prefill_rows: Amount = 0
    prefill_tokens: Amount = 0
    prefill_context: Amount = 0
    prefill_pairs: Amount = 0
    decode_rows: Amount = 0
    decode_context: Amount = 0
    decode_spread: Amount = 0
    sampled_rows: Amount = 0
    draft_tokens: Amount = 0

    @property
    def tokens(self) -> Amount:
        """Number of tokens that go through the layers."""
        return self.prefill_tokens + self.decode_rows + self.draft_tokens


def uniform_step(rows: int, context: int, prompts: int, chunk: int, past: int, drafts: int = 0) -> StepSizes:
    """Return a step of `rows` decode rows with `context` tokens each and of `prompts` chunks of `chunk` tokens.

    Every chunk follows `past` tokens of its prompt. Every decode row verifies `drafts` draft tokens.
    """
    return StepSizes(
        prefill_rows=prompts,
        prefill_tokens=prompts * chunk,
        prefill_context=prompts * past,
        prefill_pairs=prompts * (chunk * past + chunk * (chunk + 1) // 2),
        decode_rows=rows,
        decode_context=rows * context,
        sampled_rows=rows + prompts,
        draft_tokens=rows * drafts,
    )


def own_pairs(rows: Amount, tokens: Amount, past: Amount, pairs: Amount) -> Amount:
    """Return the number of query-key pairs that lie within the chunks of some prompts.

    All prompts are assumed to have equally long pasts. The result is between the pairs of equal chunks and those of a
    single chunk, as it is for any prompts.
    """
    least = tokens * (tokens / np.maximum(rows, 1) + 1) / 2
    return np.clip(pairs - tokens * (past / np.maximum(rows, 1)), least, tokens * (tokens + 1) / 2)


class Estimate(NamedTuple):
    """The time of one occurrence of an operation.

    Attributes:
        ns: nanoseconds, a number or an array
        sigma: standard error of log(ns): 0.05 is about 5 %
        level: a `tokentwin.calibration.trust.TrustLevel`, or an array of them
    """

    ns: Any
    sigma: Any
    level: Any


class KernelTimes(Protocol):
    """Times of kernels on one GPU."""

    gpu: GpuSpec

    def time(self, operation: Operation) -> Estimate:
        """Return the time of one occurrence of `operation`.

        It is never below the roofline, which is the longer of FLOPs over peak rate and bytes over bandwidth.
        """
        ...


def floor_ns(gpu: GpuSpec, operation: Operation) -> Any:
    """Return the roofline in nanoseconds: the shortest time that the datasheet allows for `operation`."""
    if isinstance(operation, Collective):
        if operation.link is not None:
            return 1e9 * operation.sent_between_nodes / operation.link.bytes_per_s
        return 1e9 * operation.bytes / gpu.link_bytes_per_s
    rate = gpu.flop_per_s(getattr(operation, "dtype", "bfloat16"))
    return 1e9 * np.maximum(operation.flops / rate, operation.bytes / gpu.memory_bytes_per_s)


def bound_by(gpu: GpuSpec, operation: Operation, flops: float, moved_bytes: float) -> str:
    """Return what limits an operation at the roofline: `compute`, `memory`, `link` or `network`."""
    if isinstance(operation, Collective):
        return "link" if operation.link is None else "network"
    rate = gpu.flop_per_s(getattr(operation, "dtype", "bfloat16"))
    return "compute" if flops / rate > moved_bytes / gpu.memory_bytes_per_s else "memory"
