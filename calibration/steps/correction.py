"""The parts of a step's time, and the correction of their sum, which is fitted to whole steps.

Each part is the sum of similar operations, and a correction has a factor for each part. The time of a GEMM is split
into the time that it takes for one token, which is spent reading weights, and the rest, which is spent computing. The
time of experts is split in the same way, at the number of tokens that reach nearly all experts. The two need different
factors, because a long prompt runs at a clock that the power limit reduces, and a decode step does not. Attention of
prompts is split into attention to their own chunk and to their past. `imbalance` is the time that decode rows of
unequal context add; see `imbalance_ns`.

The times of kernels measured alone do not add up to the time of a step: clocks drop under sustained load, launches
leave gaps, and the engine computes between kernels. A correction multiplies each part by a factor, and adds times per
step, row and prompt. It is fitted to measured steps by their log errors. Each regime (kind of step) has a weight
proportional to the square root of its number of steps, and outliers have little weight (soft L1). Each multiplier is
pulled towards its prior, usually 1, so a part that does not occur in the measured steps keeps the time of its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.context_parallel import DecodeExchange, PastExchange, share_of_step
from tokentwin.calibration.latent_attention import DecodeIndexScores, IndexScores, LatentDecode, SparsePrefill
from tokentwin.calibration.linear_attention import LinearDecode, LinearPrefill
from tokentwin.calibration.operations import (
    Collective,
    DecodeAttention,
    Elementwise,
    Estimate,
    Exchange,
    Experts,
    Gemm,
    KernelTimes,
    Operation,
    PrefillAttention,
    Scores,
    StepSizes,
    own_pairs,
)
from tokentwin.calibration.step_operations import heads_per_device, step_operations
from tokentwin.calibration.steps.calibration_file import Price
from tokentwin.calibration.steps.features import REGIMES, regimes
from tokentwin.serving.cost_model import DECODE_BUCKETS
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.kv_layout import kv_dtype
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES
from tokentwin.serving.errors import UserError

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
_WAVES_MORE = 1.5  # number of further waves over which the imbalance grows; beyond them, other rows fill the gaps


TypeFactors = Mapping[str, Mapping[str, float]]
"""Factors on the parts of GEMMs and experts, by weight type: the empty name is the operation's own type."""


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
    DecodeExchange: "decode attention",
    PastExchange: "past attention",
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
    head_bytes /= deployment.decode_context_parallel_size
    ns_per_token = 1e9 * head_bytes * gpu.sm_count / gpu.memory_bytes_per_s
    rows = np.asarray(share_of_step(deployment, sizes).decode_rows)
    if not deployment.enforce_eager:  # a graph launches the thread blocks of its bucket
        rows = np.where(rows <= _BUCKETS[-1], _BUCKETS[np.searchsorted(_BUCKETS, np.minimum(rows, _BUCKETS[-1]))], rows)
    cuts = _INVARIANT_CUTS if ours else 1
    waves = rows * cuts * kv_heads / gpu.sm_count
    return sizes.decode_spread / cuts * ns_per_token * np.clip(waves - _WAVE_SHARE, 0.0, _WAVES_MORE)


Floats = NDArray[np.float64]

CLOCK_KNOTS = (256, 1024, 3072, 8192)  # numbers of tokens in a step at which the multiplier of `compute` is fitted
COMPUTE = tuple(f"compute@{tokens}" for tokens in CLOCK_KNOTS)
WEIGHTS = ("weights", "compute", "experts", "expert compute")  # parts that depend on the number type of the weights
PROMPT_PARTS = ("compute", "expert compute", "prompt attention", "past attention")  # parts that prompts add to a step
FACTORS = ("weights", *COMPUTE, *(part for part in PARTS if part not in ("weights", "compute")))
ADDED = {
    "step": "every step",
    "decode row": "decode row",
    "prompt": "prompt in the step",
    "prompts only": "step without decode rows",
    "prompts only, token": "prompt token of such a step",
}
_OF_PROMPTS = (*COMPUTE, *PROMPT_PARTS, "prompt", "prompts only", "prompts only, token")

_PRIOR = {"imbalance": 0.3}
ADDED_PRIOR_NS = {"step": 1e6, "decode row": 5e4, "prompt": 5e4, "prompts only": 1e6, "prompts only, token": 2e3}
TIGHT = {"weights": 0.2, **dict.fromkeys(COMPUTE, 0.3), "decode attention": 0.3, "elementwise": 0.5}
LOOSE = 1.0  # standard deviation of the logarithm of the other multipliers, which may be off by a factor of e
_RIDGE = 0.02
# with a belief: weight of its multipliers, and the added times that it takes for none
_BELIEF_RIDGE = 0.25
_BELIEVED_ADDED_NS = {"step": 1e5, "decode row": 2e3, "prompt": 2e4, "prompts only": 1e5, "prompts only, token": 20.0}
_OUTLIER = 0.02  # relative error above which a step's weight falls
_SMALLEST_NS = 1e-6


@dataclass(frozen=True)
class Correction:
    """Multipliers of parts, and added nanoseconds. The default changes nothing, but drops the imbalance part.

    Attributes:
        source: description of the steps that were fitted; empty without a fit
        sigma: remaining relative error of a step by regime (robust standard deviation)
        domain: minimum and maximum of the tokens, decode rows and decode context of the fitted steps, by name
        wider: for each weight type that has more bits than the narrowest type, the ratios of its multipliers of
            `WEIGHTS` to those of the narrowest type
    """

    factors: Mapping[str, Price] = field(default_factory=lambda: {name: float(name != "imbalance") for name in FACTORS})
    added_ns: Mapping[str, Price] = field(default_factory=lambda: dict.fromkeys(ADDED, 0.0))
    sigma: Mapping[str, float] = field(default_factory=dict)
    domain: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    source: str = ""
    wider: TypeFactors = field(default_factory=dict, repr=False)

    @property
    def by_type(self) -> TypeFactors:
        """The multipliers of each weight type in the form for `step_parts`; the narrowest type has an empty name."""
        own = {**self.factors, "compute": self.factors[COMPUTE[0]]}
        return self.wider and {
            "": own,
            **{dtype: {name: own[name] * ratio for name, ratio in to.items()} for dtype, to in self.wider.items()},
        }

    def scaled(self, decode: float, prompts: float) -> Correction:
        """Return the correction with the times of prompts multiplied by `prompts`, and all other times by `decode`."""

        def factor(name: str) -> float:
            return prompts if name in _OF_PROMPTS else decode

        return replace(
            self,
            factors={name: value * factor(name) for name, value in self.factors.items()},
            added_ns={name: value * factor(name) for name, value in self.added_ns.items()},
        )

    def of_kernels(self) -> Correction:
        """Return the correction without its added times.

        An engine adds its time per step, row and prompt only once, so further passes of a step use this correction.
        """
        return replace(self, added_ns=dict.fromkeys(ADDED, 0.0))

    def apply(self, parts: Mapping[str, Floats], sizes: StepSizes) -> dict[str, Floats]:
        """Return the corrected nanoseconds of each part, including `host and launch`; their sum is the step's time."""
        tokens = np.asarray(sizes.tokens, dtype=np.float64)
        clock = np.interp(
            np.log(np.maximum(tokens, 1.0)), np.log(CLOCK_KNOTS), [self.factors[name] for name in COMPUTE]
        )
        corrected = {name: ns * (clock if name == "compute" else self.factors[name]) for name, ns in parts.items()}
        corrected["host and launch"] = sum(
            self.added_ns[name] * amount for name, amount in added_amounts(sizes).items()
        ) + np.zeros_like(tokens)
        return corrected


def added_amounts(sizes: StepSizes) -> dict[str, Floats]:
    """Return the amounts that the added times multiply, by name, each in the array shape of `sizes`."""
    rows = np.asarray(sizes.decode_rows, dtype=np.float64)
    prompts_only = (rows == 0).astype(np.float64)
    return {
        "step": np.ones_like(rows),
        "decode row": rows,
        "prompt": np.asarray(sizes.prefill_rows, dtype=np.float64) + 0.0 * rows,
        "prompts only": prompts_only,
        "prompts only, token": prompts_only * sizes.prefill_tokens,
    }


def fit_correction(
    parts: Mapping[str, Floats], sizes: StepSizes, measured_ns: Floats, source: str, around: Correction | None = None
) -> Correction:
    """Fit the correction that best explains `measured_ns` `[steps]` by the `parts` of these steps.

    Multipliers are pulled towards those of `around`, and a part that does not occur keeps them. Without it they are
    pulled towards the kernels' own times. Raises UserError if there are fewer than twenty steps.
    """
    from scipy.optimize import least_squares  # its import takes longer than the simulation of a short run

    if len(measured_ns) < 20:
        remedy = "measured steps are too few; a correction needs at least 20, so record a longer run"
        raise UserError("steps", len(measured_ns), remedy)
    names, columns = _columns(parts, sizes)
    believed = {} if around is None else {**around.factors, **around.added_ns}
    ridge, added_ns = (_RIDGE, ADDED_PRIOR_NS) if around is None else (_BELIEF_RIDGE, _BELIEVED_ADDED_NS)
    prior = np.array([believed.get(name) or added_ns.get(name, _PRIOR.get(name, 1.0)) for name in names])
    spread = np.array([TIGHT.get(name, LOOSE) for name in names])
    regime = regimes(sizes)
    weight = balanced(regime)
    log_measured = np.log(measured_ns)
    scaled = columns * prior

    def misfit(logs: Floats) -> Floats:
        error = np.log(np.maximum(scaled @ np.exp(logs), _SMALLEST_NS)) - log_measured
        robust = np.sqrt(2.0 * (np.sqrt(1.0 + (error / _OUTLIER) ** 2) - 1.0)) * np.sign(error)
        return np.concatenate([weight * robust, ridge * logs / spread])

    solution = least_squares(misfit, np.zeros(len(names)), bounds=(-12.0, 4.0))
    values = dict(zip(names, (prior * np.exp(solution.x)).tolist(), strict=True))
    default = around or Correction()
    error = np.log(np.maximum(columns @ np.array(list(values.values())), _SMALLEST_NS)) - log_measured
    return Correction(
        factors={name: values.get(name, default.factors[name]) for name in FACTORS},
        added_ns={name: values.get(name, default.added_ns[name]) for name in ADDED},
        sigma={
            name: float(1.4826 * np.median(np.abs(error[regime == index])))
            for index, name in enumerate(REGIMES)
            if (regime == index).any()
        },
        domain={
            name: (float(np.min(amounts)), float(np.max(amounts))) for name, amounts in domain_amounts(sizes).items()
        },
        source=source,
        wider=default.wider,
    )


def _columns(parts: Mapping[str, Floats], sizes: StepSizes) -> tuple[list[str], Floats]:
    """Return the names of the fitted numbers, and the amounts that they multiply (`[steps, names]`, not all 0)."""
    columns = correction_columns(parts, np.asarray(sizes.tokens, dtype=np.float64))
    columns.update(added_amounts(sizes))
    used = {name: column for name, column in columns.items() if np.any(column > 0)}
    return list(used), np.column_stack(list(used.values()))


def correction_columns(parts: Mapping[str, Floats], tokens: Floats) -> dict[str, Floats]:
    """Return the amounts `[steps]` that factors multiply, by name; `compute` is divided among the clock's knots."""
    share = hats(np.log(np.maximum(tokens, 1.0)), np.log(CLOCK_KNOTS))
    columns: dict[str, Floats] = {}
    for name, ns in parts.items():
        if name == "compute":
            columns.update({knot: ns * share[:, i] for i, knot in enumerate(COMPUTE)})
        else:
            columns[name] = ns
    return columns


def hats(at: Floats, knots: Sequence[float] | Floats) -> Floats:
    """Return the weights `[len(at), knots]` of linear interpolation that is constant beyond the ends."""
    unit = np.eye(len(knots))
    return np.column_stack([np.interp(at, knots, unit[i]) for i in range(len(knots))])


def balanced(regime: NDArray[np.int64]) -> Floats:
    """Return weights of steps that sum in each regime to the root of its number of steps: mixed steps are few."""
    count = np.bincount(regime, minlength=len(REGIMES))
    return np.asarray((len(regime) * np.maximum(count[regime], 1)) ** -0.25)


def domain_amounts(sizes: StepSizes) -> dict[str, Any]:
    """Return the amounts whose range is a correction's domain, by name."""
    return {
        "tokens": sizes.tokens,
        "decode rows": sizes.decode_rows,
        "decode context": sizes.decode_context,
    }
