"""Correction of the sum of a step's parts, fitted to whole steps.

The times of kernels measured alone do not add up to the time of a step: clocks drop under sustained load, launches
leave gaps, and the engine computes between kernels. A correction multiplies each part by a factor, and adds times per
step, row and prompt. It is fitted to measured steps by their log errors. Each regime (kind of step) has a weight
proportional to the square root of its number of steps, and outliers have little weight (soft L1). Each multiplier is
pulled towards its prior, usually 1, so a part that does not occur in the measured steps keeps the time of its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.operations import StepSizes
from calibration.steps.calibration_file import Price
from calibration.steps.features import REGIMES, regimes
from calibration.steps.parts import PARTS, TypeFactors
from serving.errors import UserError

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
_ADDED_PRIOR_NS = {"step": 1e6, "decode row": 5e4, "prompt": 5e4, "prompts only": 1e6, "prompts only, token": 2e3}
_TIGHT = {"weights": 0.2, **dict.fromkeys(COMPUTE, 0.3), "decode attention": 0.3, "elementwise": 0.5}
_LOOSE = 1.0  # standard deviation of the logarithm of the other numbers, which may be off by a factor of e
_RIDGE = 0.02
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
            self.added_ns[name] * amount for name, amount in _added_amounts(sizes).items()
        ) + np.zeros_like(tokens)
        return corrected


def _added_amounts(sizes: StepSizes) -> dict[str, Floats]:
    rows = np.asarray(sizes.decode_rows, dtype=np.float64)
    prompts_only = (rows == 0).astype(np.float64)
    return {
        "step": np.ones_like(rows),
        "decode row": rows,
        "prompt": np.asarray(sizes.prefill_rows, dtype=np.float64) + 0.0 * rows,
        "prompts only": prompts_only,
        "prompts only, token": prompts_only * sizes.prefill_tokens,
    }


def fit_correction(parts: Mapping[str, Floats], sizes: StepSizes, measured_ns: Floats, source: str) -> Correction:
    """Fit the correction that best explains `measured_ns` `[steps]` by the `parts` of these steps.

    Raises UserError if there are fewer than twenty steps.
    """
    from scipy.optimize import least_squares  # its import takes longer than the simulation of a short run

    if len(measured_ns) < 20:
        remedy = "measured steps are too few; a correction needs at least 20, so record a longer run"
        raise UserError("steps", len(measured_ns), remedy)
    names, columns = _columns(parts, sizes)
    prior = np.array([_ADDED_PRIOR_NS.get(name, _PRIOR.get(name, 1.0)) for name in names])
    spread = np.array([_TIGHT.get(name, _LOOSE) for name in names])
    regime = regimes(sizes)
    weight = _balanced(regime)
    log_measured = np.log(measured_ns)
    scaled = columns * prior

    def misfit(logs: Floats) -> Floats:
        error = np.log(np.maximum(scaled @ np.exp(logs), _SMALLEST_NS)) - log_measured
        robust = np.sqrt(2.0 * (np.sqrt(1.0 + (error / _OUTLIER) ** 2) - 1.0)) * np.sign(error)
        return np.concatenate([weight * robust, _RIDGE * logs / spread])

    solution = least_squares(misfit, np.zeros(len(names)), bounds=(-12.0, 4.0))
    values = dict(zip(names, (prior * np.exp(solution.x)).tolist(), strict=True))
    default = Correction()
    error = np.log(np.maximum(columns @ np.array(list(values.values())), _SMALLEST_NS)) - log_measured
    return Correction(
        factors={name: values.get(name, default.factors[name]) for name in FACTORS},
        added_ns={name: values.get(name, 0.0) for name in ADDED},
        sigma={
            name: float(1.4826 * np.median(np.abs(error[regime == index])))
            for index, name in enumerate(REGIMES)
            if (regime == index).any()
        },
        domain={name: (float(np.min(of)), float(np.max(of))) for name, of in domain_amounts(sizes).items()},
        source=source,
    )


def _columns(parts: Mapping[str, Floats], sizes: StepSizes) -> tuple[list[str], Floats]:
    """Return the names of the fitted numbers, and the amounts that they multiply (`[steps, names]`, not all 0)."""
    tokens = np.asarray(sizes.tokens, dtype=np.float64)
    share = _hats(np.log(np.maximum(tokens, 1.0)), np.log(CLOCK_KNOTS))
    columns: dict[str, Floats] = {}
    for name, ns in parts.items():
        if name == "compute":
            columns.update({knot: ns * share[:, i] for i, knot in enumerate(COMPUTE)})
        else:
            columns[name] = ns
    columns.update(_added_amounts(sizes))
    used = {name: column for name, column in columns.items() if np.any(column > 0)}
    return list(used), np.column_stack(list(used.values()))


def _hats(at: Floats, knots: Sequence[float] | Floats) -> Floats:
    """Return the weights `[len(at), knots]` of linear interpolation that is constant beyond the ends."""
    unit = np.eye(len(knots))
    return np.column_stack([np.interp(at, knots, unit[i]) for i in range(len(knots))])


def _balanced(regime: NDArray[np.int64]) -> Floats:
    """Return weights of steps by which a regime weighs as the root of its number of steps; mixed steps are few."""
    count = np.bincount(regime, minlength=len(REGIMES))
    return np.asarray((len(regime) * np.maximum(count[regime], 1)) ** -0.25)


def domain_amounts(sizes: StepSizes) -> dict[str, Any]:
    """Return the amounts whose range is a correction's domain, by name."""
    return {
        "tokens": sizes.tokens,
        "decode rows": sizes.decode_rows,
        "decode context": sizes.decode_context,
    }
