"""The fit of corrected surfaces to the measured steps of our own engine.

The unknowns are the factors and times of `tokentwin.calibration.steps.correction`, and the factor of eager steps. They
are fitted by non-negative least squares on relative errors, as linear prices are, with the same weight for each kind of
step as in `fit_correction`, and pulled towards the kernels' own times, so that a part which never occurs keeps them. A
slow machine slows what reads memory and what computes by two exponents of its speed: a GPU that lowers its clock
computes more slowly, and reads as fast as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.kernels.cpu_roofline import BALANCES
from tokentwin.calibration.kernels.own_kernels import KernelRatio, kernel_ratios
from tokentwin.calibration.steps.correction import (
    ADDED,
    ADDED_PRIOR_NS,
    COMPUTE,
    FACTORS,
    LOOSE,
    PROMPT_PARTS,
    TIGHT,
    Correction,
    added_amounts,
    balanced,
    correction_columns,
    domain_amounts,
)
from tokentwin.calibration.steps.features import Floats, MeasuredSteps, pads_mixed_steps
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.surfaces import (
    CPU,
    LINE,
    Surfaces,
    beyond_graphs,
    kernels_of,
    line_amounts,
    measured_parts,
    run_tokens,
)
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_ROUNDS = 6
_HUBER = 3.0  # residuals beyond this many robust standard deviations weigh less
_LEAST_SPREAD = 0.02  # relative errors of this size are no outliers, however exact the other steps are
_LEAST = 0.3  # smallest predicted time as a share of the measured one, which bounds the weight of a step
_PULL = 0.01  # weight with which a factor is pulled to that of the kernels alone
_ADDED_PULL = 0.001  # weight with which a time around the kernels is pulled to none, in units of its usual size
_LIKE = {"past attention": "prompt attention", **dict(zip(COMPUTE[1:], COMPUTE, strict=False))}
"""A factor that few steps teach is like another: that of the same kernel, or of the same kernels in smaller steps."""
_USUAL = {**ADDED_PRIOR_NS, "eager": 0.2, **dict.fromkeys(LINE, 1e6)}  # sizes of what steps take beside kernels
_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_SWEEPS = 2
_MOST_TRIED = 2500  # number of steps that choose the exponents and the balance of a CPU
_KNOTS = tuple(2.0**power for power in range(14))  # tokens of a step at which the share of computing is kept
_COMPUTING = (*COMPUTE, *PROMPT_PARTS)


def surfaces_for(
    steps: MeasuredSteps, deployment: Deployment, gpu: str, own: Path | None = None
) -> list[SurfaceFeatures]:
    """Return the surfaces that may be corrected by `steps`: one on a GPU, one for each balance on a CPU.

    `own` is the table of the engine's own kernels, on a GPU. Raises UserError that says why there are none.
    """
    if own is not None and deployment.device == CPU:
        raise UserError(
            "kernels", str(own), "cannot be used: they are a GPU's, and the engine ran on a CPU; leave it out"
        )
    if deployment.scheduler.speculative is not None:
        raise UserError("surfaces", "speculative decoding", "has no kernel times here")
    if "adapters" in steps.features:
        raise UserError("surfaces", "LoRA adapters", "have no kernel times here")
    model = known_model(deployment.model)
    if deployment.device == CPU:
        return [SurfaceFeatures(steps, deployment, model, CPU, balance) for balance in BALANCES]
    name = find_gpu(gpu).name
    backend = "triton" if deployment.attention == "auto" else deployment.attention
    ratios = (
        () if own is None else tuple(kernel_ratios(kernels_of(name, 0.0), own, backend, deployment.batch_invariant))
    )
    return [SurfaceFeatures(steps, deployment, model, name, 0.0, ratios)]


def known_model(name: str) -> ModelSpec:
    """Return the shape of a model of our engine; raise UserError if the catalogue does not have it."""
    plain = name.removeprefix("random:")
    return find_model("SmolLM2-135M" if plain == "smollm2" else plain)


@dataclass(frozen=True)
class LearntSurfaces:
    """What steps taught: the value of each column, and the slowdown of the machine that the values include."""

    values: Floats
    machine: MachineSlowdown


@dataclass(frozen=True)
class SurfaceFeatures:
    """The columns whose weighted sum is the time of each step, on the kernel times of one device."""

    steps: MeasuredSteps
    deployment: Deployment
    model: ModelSpec
    gpu: str
    balance: float
    own: tuple[KernelRatio, ...] = ()

    @property
    def captures(self) -> bool:
        """Whether mixed steps run as CUDA graphs."""
        return pads_mixed_steps(self.deployment)

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """The amounts `[steps]` of each unknown, without those that are always 0."""
        kernels = kernels_of(self.gpu, self.balance, self.own)
        sizes, captures = self.steps.sizes, self.captures
        parts = measured_parts(self.model, self.deployment, kernels, sizes, captures)
        tokens = run_tokens(sizes, captures)
        columns = correction_columns(parts, tokens) | added_amounts(sizes)
        if self.gpu == CPU:
            columns |= line_amounts(sizes)
        dense = sum(ns for name, ns in parts.items() if "attention" not in name)
        columns["eager"] = beyond_graphs(tokens, captures) * dense
        return {name: column for name, column in columns.items() if np.any(column > 0)}

    def learnt(self, used: NDArray[np.bool_], like: MachineSlowdown | None = None) -> LearntSurfaces:
        """Fit the unknowns to the `used` steps; the exponents are those of `like`, or fitted as well.

        A fit that borrows its exponents is one of several that only measure errors, so fewer steps will do.
        """
        steps = self.steps
        taken = float(steps.step_ns[used].sum() / steps.own_ns[used].sum())
        machine = MachineSlowdown(taken, float(np.median(steps.speed[used])), 0.0, compute_exponent=0.0)
        if like is not None:
            machine = replace(machine, exponent=like.exponent, compute_exponent=like.compute_exponent)
            used = thinned(used)
        elif np.ptp(steps.speed[used]):
            machine = self._exponents(machine, used)
        values = self._values(machine, used)
        return LearntSurfaces(values * taken, replace(machine, compute_shares=self._shares(values)))

    def predicted_ns(self, learnt: LearntSurfaces) -> Floats:
        """Return the time of each step at the machine's usual speed, as the surfaces that are kept predict it."""
        predicted = np.asarray(self._matrix @ learnt.values)
        if "eager" not in self.columns:
            return predicted
        times = dict(zip(self.columns, (self._matrix * learnt.values).T, strict=True))
        longer = self._eager_share(learnt) * _outside_attention(times)
        return np.asarray(predicted - times["eager"] + np.where(self.columns["eager"] > 0, longer, 0.0))

    def error(self, learnt: LearntSurfaces, used: NDArray[np.bool_]) -> float:
        """Return the mean relative error of the `used` steps, with the machine's speed known."""
        predicted = learnt.machine.own_ns(self.predicted_ns(learnt), self.steps)
        return float(np.abs(predicted[used] / self.steps.own_ns[used] - 1).mean())

    def surfaces(self, learnt: LearntSurfaces) -> Surfaces:
        """Return what a calibration keeps."""
        values = dict(zip(self.columns, learnt.values.tolist(), strict=True))
        # A part that no step has, has the kernels' own time; unequal contexts add nothing, as no recording has them.
        factors = {name: values.get(name, float(name != "imbalance")) for name in FACTORS}
        correction = Correction(
            factors=factors,
            added_ns={name: values.get(name, 0.0) for name in ADDED},
            domain={
                name: (float(np.min(amounts)), float(np.max(amounts)))
                for name, amounts in domain_amounts(self.steps.sizes).items()
            },
            source="measured steps",
        )
        shape, eager = self.model.model_dump_json(), self._eager_share(learnt)
        line_ns = {name: values.get(name, 0.0) for name in LINE if self.gpu == CPU}
        return Surfaces(shape, self.gpu, correction, self.balance, self.own, eager, self.captures, line_ns)

    def _eager_share(self, learnt: LearntSurfaces) -> float:
        """Return the additional time of eager steps as a share of their corrected time outside of attention."""
        eager = self.columns.get("eager", np.zeros(1)) > 0
        if not eager.any():
            return 0.0
        times = {name: ns[eager].sum() for name, ns in zip(self.columns, (self._matrix * learnt.values).T, strict=True)}
        dense = _outside_attention(times)
        return float(times["eager"] / dense) if dense else 0.0

    @cached_property
    def _matrix(self) -> Floats:
        return np.column_stack(list(self.columns.values()))

    @cached_property
    def _computes(self) -> NDArray[np.bool_]:
        return np.array([name in _COMPUTING for name in self.columns])

    def _values(self, machine: MachineSlowdown, used: NDArray[np.bool_]) -> Floats:
        """Return the unknowns that explain the CPU time of the `used` steps at their speed."""
        from scipy.optimize import nnls  # slow import

        steps, names = self.steps, list(self.columns)
        slower = machine.speed / steps.speed[used, None]
        exponents = np.where(self._computes, machine.compute_exponent or 0.0, machine.exponent)
        prior = np.array([_USUAL.get(name, 1.0) for name in names])
        amounts = self._matrix[used] * slower**exponents * prior
        own_ns = steps.own_ns[used]
        is_added = np.array([name in _USUAL for name in names])
        spreads = np.array([TIGHT.get(name, LOOSE) for name in names])
        pull = np.where(is_added, _ADDED_PULL, _PULL / spreads)
        pulls = np.diag(pull)
        target = pull * ~is_added
        for name, other in _LIKE.items():
            if name in names and other in names:
                at = names.index(name)
                pulls[at, names.index(other)], target[at] = -pull[at], 0.0
        even, expected, robust = balanced(steps.regime[used]), own_ns.copy(), np.ones(len(own_ns))
        solution = np.ones(len(names))
        for _ in range(_ROUNDS):
            weights = even * robust / expected
            rows = np.vstack([amounts * weights[:, None], pulls])
            solution, _ = nnls(rows, np.concatenate([own_ns * weights, target]))
            expected = np.maximum(amounts @ solution, _LEAST * own_ns)
            error = own_ns / expected - 1
            spread = max(1.4826 * float(np.median(np.abs(error - np.median(error)))), _LEAST_SPREAD)
            robust = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(error), 1e-12)))
        return np.asarray(solution * prior)

    def _exponents(self, machine: MachineSlowdown, used: NDArray[np.bool_]) -> MachineSlowdown:
        """Return `machine` with the exponents that leave the smallest errors, found one after the other."""
        chosen = thinned(used)
        best = self._tried(machine, chosen), machine
        for _ in range(_SWEEPS):
            for computing in (True, False):
                for value in _EXPONENTS:
                    one = replace(best[1], compute_exponent=value) if computing else replace(best[1], exponent=value)
                    best = min(best, (self._tried(one, chosen), one), key=lambda pair: pair[0])
        return best[1]

    def _tried(self, machine: MachineSlowdown, used: NDArray[np.bool_]) -> float:
        values = self._values(machine, used)
        slower = machine.speed / self.steps.speed[used, None]
        exponents = np.where(self._computes, machine.compute_exponent or 0.0, machine.exponent)
        predicted = (self._matrix[used] * slower**exponents) @ values
        return float(np.abs(predicted / self.steps.own_ns[used] - 1).mean())

    def _shares(self, values: Floats) -> tuple[tuple[float, float], ...]:
        """Return the median share of computing in steps of about so many tokens, for the number of tokens at a knot."""
        times = self._matrix * values
        share = times[:, self._computes].sum(axis=1) / np.maximum(times.sum(axis=1), 1.0)
        nearest = np.abs(np.log2(np.maximum(self.steps.sizes.tokens, 1.0))[:, None] - np.log2(_KNOTS)).argmin(axis=1)
        return tuple(
            (knot, round(float(np.median(share[nearest == at])), 4))
            for at, knot in enumerate(_KNOTS)
            if (nearest == at).any()
        )


def _outside_attention(times: dict[str, Any]) -> Any:
    """Return the sum of the corrected kernel times outside of attention."""
    return sum(ns for name, ns in times.items() if name in FACTORS and "attention" not in name)


def best_balance(tried: list[SurfaceFeatures], used: NDArray[np.bool_]) -> SurfaceFeatures:
    """Return the surfaces that the `used` steps correct best, all with the exponents that fit the middle one."""
    if len(tried) == 1:
        return tried[0]
    chosen = thinned(used)
    machine = tried[len(tried) // 2].learnt(chosen).machine
    return min(tried, key=lambda one: one.error(one.learnt(chosen, like=machine), chosen))


def thinned(used: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return at most `_MOST_TRIED` of the `used` steps, evenly spread."""
    places = np.flatnonzero(used)
    chosen = np.zeros_like(used)
    chosen[places[:: -(-len(places) // _MOST_TRIED)]] = True
    return chosen
