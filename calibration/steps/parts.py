"""The named parts of a step's time, each of which is the sum of similar operations.

A correction has a factor for each part. The time of a GEMM is split into the time that it takes for one token, which is
spent reading weights, and the rest, which is spent computing. The time of experts is split in the same way, at the
number of tokens that reach nearly all experts. The two need different factors, because a long prompt runs at a clock
that the power limit reduces, and a decode step does not. Attention of prompts is split into attention to their own
chunk and to their past. `imbalance` is the time that decode rows of unequal context add; see `imbalance_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.kernels.times import Estimate, KernelTimes
from calibration.latent_attention import DecodeIndexScores, IndexScores, LatentDecode, SparsePrefill
from calibration.linear_attention import LinearDecode, LinearPrefill
from calibration.operations import (
    Collective,
    DecodeAttention,
    Elementwise,
    Exchange,
    Experts,
    Gemm,
    Operation,
    PrefillAttention,
    Scores,
    StepSizes,
    own_pairs,
)
from calibration.step_operations import heads_per_device, step_operations
from serving.cost_model import DECODE_BUCKETS
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import GpuSpec
from serving.deployments.kv_layout import kv_dtype
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import DTYPE_BYTES

PARTS = {
    "weights": "GEMMs as long as they only read weights",
    "compute": "GEMMs beyond that",
    "decode attention": "attention of decode rows",
    "imbalance": "waiting for the longest decode row",
    "prompt attention": "attention of prompt tokens to their own chunk",
    "past attention": "attention of prompt tokens to what was computed before",
    "experts": "routed experts as long as they only read weights",
    "expert compute": "routed experts beyond that",
    "elementwise": "norms, rotary embedding, activation, sampling",
    "collectives": "communication between devices",
}
_BUCKETS = np.array((0, *DECODE_BUCKETS))
_SATURATED = 2.0  # mean choices per expert at which all experts but a share of exp(-2) have a token
_WAVE_SHARE = 0.5  # waves of thread blocks up to which kernels split rows so that blocks have equal work
_INVARIANT_CUTS = 16  # number of pieces into which our own kernels cut each row
_WAVES_MORE = 1.5  # number of further waves, after which more rows fill the gaps


TypeFactors = Mapping[str, Mapping[str, float]]
"""By type of weights, what the parts of GEMMs and experts are multiplied by afterwards: without a name their own type,
with one those of more bits."""


def step_parts(
    model: ModelSpec,
    deployment: Deployment,
    kernels: KernelTimes,
    sizes: StepSizes,
    factors: TypeFactors | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the uncorrected nanoseconds of every part of the step, in the array shape of `sizes`.

    With `factors`, an operation takes the fastest weight type after correction: its own, or one with more bits.
    """
    parts: dict[str, Any] = {}
    for name, ns in parts_of(step_operations(model, deployment, sizes), kernels, factors or {}):
        parts[name] = parts.get(name, 0.0) + ns
    parts["imbalance"] = imbalance_ns(model, deployment, kernels.gpu, sizes)
    return {name: np.asarray(ns, dtype=np.float64) for name, ns in parts.items()}


def parts_of(
    operations: Iterable[Operation], kernels: KernelTimes, factors: TypeFactors
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield part name and nanoseconds of every operation, for all its occurrences in a step."""
    for operation in operations:
        parts = _split(operation, never_slower(operation, kernels).ns, kernels)
        if factors and isinstance(operation, Gemm | Experts):
            parts = _cheapest(operation, parts, kernels, factors)
        for name, ns in parts:
            yield name, operation.count * np.where(np.asarray(operation.size) > 0, ns, 0.0)


def _cheapest(
    operation: Gemm | Experts, parts: list[tuple[str, Any]], kernels: KernelTimes, factors: TypeFactors
) -> list[tuple[str, Any]]:
    """Return the parts of the operation, or of it with weights of more bits, whichever is faster after correction."""
    own = factors[""]
    least = sum(own[name] * ns for name, ns in parts)
    for dtype, theirs in factors.items():
        other = replace(operation, dtype=dtype, width=0.0) if dtype and operation.dtype in _NARROW else operation
        if other is not operation or any(theirs[name] != own[name] for name, _ in parts):
            others = _split(other, never_slower(other, kernels).ns, kernels)
            whole = sum(theirs[name] * ns for name, ns in others)
            parts = [
                (name, np.where(whole < least, theirs[name] / own[name] * ns, kept))
                for (name, ns), (_, kept) in zip(others, parts, strict=True)
            ]
            least = np.minimum(whole, least)
    return parts


_FOUR_BITS = ("mxfp4", "nvfp4")
_NARROW = ("fp8", "fp8_block", "int8", "int4", *_FOUR_BITS)


def never_slower(operation: Operation, kernels: KernelTimes) -> Estimate:
    """Return the time of an operation, which is never longer than with a wider weight type.

    An engine whose kernel for the narrower type is slower would use the kernel for the wider type.
    """
    time = kernels.time(operation)
    if not isinstance(operation, Gemm | Experts):
        return time
    for dtype in wider_types(operation.dtype, kernels.gpu):
        other = kernels.time(replace(operation, dtype=dtype, width=0.0))
        slower = np.asarray(time.ns) > other.ns
        time = Estimate(*(np.where(slower, theirs, own) for own, theirs in zip(time, other, strict=True)))
    return time


def wider_types(dtype: str, gpu: GpuSpec) -> tuple[str, ...]:
    """Return the weight types with more bits than `dtype` whose arithmetic is no faster.

    On a GPU without 4-bit units, types of 4 bits are computed in 16 bits.
    """
    if dtype in _FOUR_BITS and gpu.fp4_flop_per_s:
        return "fp8", "fp8_block", "bfloat16"
    return ("bfloat16",) if dtype in _NARROW else ()


def _split(operation: Operation, ns: Any, kernels: KernelTimes) -> list[tuple[str, Any]]:
    """Split the `ns` nanoseconds of one occurrence of `operation` into parts."""
    if isinstance(operation, Gemm):
        weights = np.minimum(ns, never_slower(replace(operation, m=1), kernels).ns)
        return [("weights", weights), ("compute", ns - weights)]
    if isinstance(operation, Experts):
        full = _SATURATED * operation.experts / operation.topk  # tokens at which nearly every expert is read
        weights = np.minimum(ns, never_slower(replace(operation, tokens=full), kernels).ns)
        return [("experts", weights), ("expert compute", ns - weights)]
    if isinstance(operation, PrefillAttention):
        alone = np.minimum(ns, kernels.time(_without_past(operation)).ns)
        return [("prompt attention", alone), ("past attention", ns - alone)]
    if isinstance(operation, Scores):
        return [("prompt attention" if operation.of_prompts else "decode attention", ns)]
    return [(_KINDS[type(operation)], ns)]


_KINDS = {
    DecodeAttention: "decode attention",
    LatentDecode: "decode attention",
    SparsePrefill: "prompt attention",
    IndexScores: "prompt attention",
    DecodeIndexScores: "decode attention",
    LinearPrefill: "prompt attention",
    LinearDecode: "decode attention",
    Elementwise: "elementwise",
    Collective: "collectives",
    Exchange: "collectives",
}


def _without_past(operation: PrefillAttention) -> PrefillAttention:
    own = own_pairs(operation.rows, operation.tokens, operation.past, operation.pairs)
    return replace(operation, past=0.0 * np.asarray(operation.past), pairs=np.minimum(own, operation.pairs))


def imbalance_ns(model: ModelSpec, deployment: Deployment, gpu: GpuSpec, sizes: StepSizes) -> Any:
    """Return the extra time if decode rows have unequal contexts: the part `imbalance` before its factor.

    A thread block reads one row's KV of one head, at its share of the bandwidth. If there are few blocks, kernels split
    rows, and all blocks have equal work. If the blocks fill the device, a row that is one standard deviation longer
    keeps its block busy for that much longer than the others. Kernels of latent attention divide the KV of all rows
    evenly. Our own kernels do so, too: they cut the rows of a step into pieces of one length (docs/kernels.md), or in
    the batch-invariant mode each row into 16 pieces.
    """
    ours = deployment.attention in ("triton", "hybrid")
    if model.latent is not None or (ours and not deployment.batch_invariant):
        return 0.0 * np.asarray(sizes.decode_rows)
    _, kv_heads = heads_per_device(model, deployment.tensor_parallel_size)
    head_bytes = 2.0 * DTYPE_BYTES[kv_dtype(deployment)] * model.head_dim * model.full_layers
    ns_per_token = 1e9 * head_bytes * gpu.sm_count / gpu.memory_bytes_per_s
    rows = np.asarray(sizes.decode_rows)
    if not deployment.enforce_eager:  # a graph launches the thread blocks of its bucket
        rows = np.where(rows <= _BUCKETS[-1], _BUCKETS[np.searchsorted(_BUCKETS, np.minimum(rows, _BUCKETS[-1]))], rows)
    cuts = _INVARIANT_CUTS if ours else 1
    waves = rows * cuts * kv_heads / gpu.sm_count
    return sizes.decode_spread / cuts * ns_per_token * np.clip(waves - _WAVE_SHARE, 0.0, _WAVES_MORE)
