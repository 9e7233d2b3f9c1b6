"""The fit of a calibration to measured steps.

Prices (times per unit of a feature) are fitted by non-negative least squares on relative errors: the weight of a step
is 1 / its predicted time, so a decode step counts as much as a long prefill. Weights by measured time would favour fast
steps and make total times too short. Outliers have smaller weights (Huber). If the CPU time of the engine's thread and
the speed of the machine are recorded, prices are fitted to CPU time at the median speed, and then raised by the share
of time that other processes took. Prices are thus for the machine's usual slowdown, which is stored as
`MachineSlowdown`. Errors are stated for every fifth stretch of steps, predicted by a fit without these stretches.

Kernel times that the steps correct (`surface_fit`) are the rival of prices. The calibration uses the one with the
smaller errors in recordings that it was not fitted to. Its stated error and interval are those of recordings that had
no part in the choice either: it is repeated without each of them (nested cross-validation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokentwin.calibration.steps.features import (
    CPU_FEATURES,
    DRAFTING,
    REGIMES,
    SAMPLING,
    TOKEN_FEATURES,
    Floats,
    MeasuredSteps,
)
from tokentwin.calibration.steps.launches import UNKNOWN, LaunchCost
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.step_cost import Calibration, Residuals
from tokentwin.calibration.steps.surface_fit import SurfaceFeatures, best_balance
from tokentwin.calibration.steps.surfaces import Surfaces, surface_ns
from tokentwin.serving.errors import UserError
from tokentwin.traces.tables import percentiles

_STRETCH = 20  # number of successive steps that are held out together, because neighbours are alike
_HELD_OUT = 5  # one stretch in this number is held out
_ROUNDS = 8
_HUBER = 3.0  # residuals beyond this many robust standard deviations weigh less
_LEAST_STEPS = 100
_LEAST_ABOVE = 50  # minimum number of steps above a knee; with fewer steps, the price above the knee cannot be fitted
_LEAST_EXPECTED = 1e-3  # minimum predicted time as a share of the measured time, which bounds the weight of a step
_COVERAGE = 0.9
_EXPONENTS = tuple(n / 10 for n in range(16))
_MOST_MISSES = 1000
# minimum number of recordings to leave out in turn; fewer recordings are cut into this number of stretches
_LEAST_PARTS = 5
LINEAR, SURFACES = "linear prices", "corrected surfaces"
_RARE = 10  # kinds of steps with fewer steps do not count in the choice between the two

Learner = Callable[[NDArray[np.bool_]], tuple[Floats, MachineSlowdown]]
"""It learns from the steps of a mask, and returns the predicted ns of every step, and the machine's slowdown."""


class Better(NamedTuple):
    """What prices steps better: its predicted ns `[steps]`, the machine's slowdown, and the errors of both.

    `surfaces` is None if linear prices are better.
    """

    predicted_ns: Floats
    machine: MachineSlowdown
    errors: dict[str, float]
    surfaces: Surfaces | None


class Unseen(NamedTuple):
    """Steps predicted by fits to other recordings, `[steps]`: blind, with the machine's speed known, and CPU time."""

    part: NDArray[np.int64]
    blind_ns: Floats
    known_ns: Floats
    own_ns: Floats


def fit(
    steps: MeasuredSteps,
    *,
    deployment: str,
    hardware: Mapping[str, Any],
    version: str,
    created: str,
    noise: Mapping[str, Any],
    launches: LaunchCost = UNKNOWN,
    surfaces: Sequence[SurfaceFeatures] = (),
    why_none: str = "",
) -> Calibration:
    """Fit a calibration to `steps`; raise UserError if there are too few.

    `surfaces` are the kernel times that the steps may correct; without any, the calibration has linear prices, and
    says `why_none`.
    """
    if len(steps) < _LEAST_STEPS:
        remedy = f"measured steps are too few; calibration needs at least {_LEAST_STEPS}, so measure longer"
        raise UserError("steps", len(steps), remedy)
    held_out = (np.arange(len(steps)) // _STRETCH) % _HELD_OUT == _HELD_OUT - 1
    everything = np.ones_like(held_out)
    step_prices, _ = _model(steps, everything)
    timed = ~np.isnan(steps.cpu_ns)
    cpu_prices = _prices(steps.cpu[timed], steps.cpu_ns[timed])
    step_ps = {name: round(price * 1000) for name, price in zip(steps.features, step_prices, strict=True)}
    cpu_ps = {name: round(price * 1000) for name, price in zip(CPU_FEATURES, cpu_prices, strict=True)}
    adapter_ns = {"adapter_loads": steps.load_ns, "adapter_copies": steps.copy_ns}
    cpu_ps |= {name: round(ns * 1000) for name, ns in adapter_ns.items() if ns is not None}
    best = _better(steps, surfaces, everything)
    learn = (lambda used: _better(steps, surfaces, used)[:2]) if surfaces else linear(steps)
    unseen = unseen_by(steps, learn)
    blind_ns, machine_without = learn(~held_out)
    blind_own_ns = machine_without.own_ns(blind_ns, steps)
    known = (step_ps, cpu_ps, launches, deployment, created, *([best.surfaces] if best.surfaces else []))
    return Calibration(
        id=blake2b(repr(known).encode(), digest_size=6).hexdigest(),
        deployment=deployment,
        hardware=dict(hardware),
        version=version,
        created=created,
        step_prices_ps=step_ps,
        cpu_prices_ps=cpu_ps,
        domain=_domain(steps),
        residuals=residuals(steps.regime[held_out], steps.own_ns[held_out], blind_own_ns[held_out]),
        interval=interval(steps, unseen.part, unseen.blind_ns),
        weather=replace(
            best.machine,
            interval=interval(steps, unseen.part, unseen.known_ns),
            misses=_misses(steps, best.predicted_ns, best.machine),
        ),
        noise=dict(noise),
        launches=launches,
        fitted_steps=len(steps),
        mask_ps=None if steps.mask_ns is None else round(steps.mask_ns * 1000),
        surfaces=best.surfaces,
        no_surfaces=why_none,
        unseen_error_pct={name: round(100 * error, 2) for name, error in best.errors.items()},
        judged_error_pct=round(100 * _error(steps, unseen, everything), 2),
    )


def linear(steps: MeasuredSteps, exponents: Sequence[float] = _EXPONENTS) -> Learner:
    """Return the learner of linear prices, which tries these `exponents` of a slow machine."""

    def learn(used: NDArray[np.bool_]) -> tuple[Floats, MachineSlowdown]:
        prices, machine = _model(steps, used, exponents)
        return steps.step @ prices, machine

    return learn


def predict(calibration: Calibration, steps: MeasuredSteps) -> Floats:
    """Return the predicted time of each step in ns."""
    if calibration.surfaces is not None:
        return surface_ns(calibration.surfaces, calibration.learnt_as, steps.sizes)
    prices = np.array([calibration.step_prices_ps.get(name, 0) / 1000 for name in steps.features])
    return steps.step @ prices


def _better(steps: MeasuredSteps, surfaces: Sequence[SurfaceFeatures], used: NDArray[np.bool_]) -> Better:
    """Fit prices and `surfaces` to the `used` steps; keep what predicts recordings left out of them better.

    Fits without a recording borrow the exponents of a slow machine, and a CPU's balance, from the fit to all of them.
    """
    predicted, machine = linear(steps)(used)
    errors = {LINEAR: _error(steps, unseen_by(steps, linear(steps, (machine.exponent,)), used), used)}
    if surfaces:
        rival = best_balance(list(surfaces), used)
        learnt = rival.learnt(used)

        def correct(fewer: NDArray[np.bool_]) -> tuple[Floats, MachineSlowdown]:
            one = rival.learnt(fewer, like=learnt.machine)
            return rival.predicted_ns(one), one.machine

        errors[SURFACES] = _error(steps, unseen_by(steps, correct, used), used)
        if errors[SURFACES] < errors[LINEAR]:
            return Better(rival.predicted_ns(learnt), learnt.machine, errors, rival.surfaces(learnt))
    return Better(predicted, machine, errors, None)


def unseen_by(steps: MeasuredSteps, learn: Learner, used: NDArray[np.bool_] | None = None) -> Unseen:
    """Return the steps of each recording in turn, predicted by a fit to the other recordings.

    Only the `used` steps count, by default all; the others are NaN.
    """
    part = steps.recording
    if part[-1] + 1 < _LEAST_PARTS:
        part = np.arange(len(steps)) * _LEAST_PARTS // len(steps)
    used = np.ones(len(steps), dtype=np.bool_) if used is None else used
    blind, known, own = (np.full(len(steps), np.nan) for _ in range(3))
    for index in np.unique(part[used]):
        mine = used & (part == index)
        predicted, machine = learn(used & ~mine)
        blind[mine] = predicted[mine]
        known[mine] = (predicted * machine.slowdown(steps))[mine]
        own[mine] = machine.own_ns(predicted, steps)[mine]
    return Unseen(part, blind, known, own)


def _error(steps: MeasuredSteps, unseen: Unseen, used: NDArray[np.bool_]) -> float:
    """Return the error by which prices and surfaces are compared: of CPU time, with the machine's speed known.

    It is the mean over the kinds of steps of their median relative error: few steps have prompts only, but TTFT depends
    on them.
    """
    errors, regime = np.abs(unseen.own_ns / steps.own_ns - 1)[used], steps.regime[used]
    kinds = [errors[regime == kind] for kind in range(len(REGIMES))]
    counted = [kind for kind in kinds if len(kind) >= _RARE] or [errors]
    return float(np.mean([np.median(kind) for kind in counted]))


def interval(steps: MeasuredSteps, part: NDArray[np.int64], predicted: Floats) -> tuple[float, float]:
    """Return the factors of the predicted time between which 90 % of whole runs lie.

    `predicted` are times of steps by fits to other parts. The interval is that of the error of the total time of one
    more run (Student's t, because there are few recordings). Errors of single steps average out over a run, but this
    error does not.
    """
    logs = [np.log(steps.step_ns[part == i].sum() / predicted[part == i].sum()) for i in range(part[-1] + 1)]
    count = len(logs)
    from scipy.stats import t as student

    reach = student.ppf((1 + _COVERAGE) / 2, count - 1) * np.std(logs, ddof=1) * np.sqrt(1 + 1 / count)
    return float(np.exp(-reach)), float(np.exp(reach))


def residuals(regime: NDArray[np.int64], measured: Floats, predicted: Floats) -> dict[str, Residuals]:
    """Return the relative errors of each regime that has steps."""
    by_regime = {}
    for index, name in enumerate(REGIMES):
        mine = regime == index
        if not mine.any():
            continue
        error = 100 * (predicted[mine] - measured[mine]) / measured[mine]
        median, p95 = percentiles(np.abs(error), (50, 95))
        by_regime[name] = Residuals(
            steps=int(mine.sum()),
            median_error_pct=median,
            p95_error_pct=p95,
            bias_pct=float(100 * (predicted[mine].sum() - measured[mine].sum()) / measured[mine].sum()),
            quantiles_pct=tuple(percentiles(error, (5, 25, 50, 75, 95))),
        )
    return by_regime


def step_residuals_table(steps: MeasuredSteps, predicted: Floats) -> pa.Table:
    """Return a table of the steps with their regime, measured time, predicted time and sizes."""
    column = {name: steps.step[:, i] for i, name in enumerate(steps.features)}
    return pa.table(
        {
            "regime": [REGIMES[i] for i in steps.regime],
            "measured_ns": steps.step_ns.astype(np.int64),
            "predicted_ns": predicted.round().astype(np.int64),
            "decode_rows": column["decode_rows_padded"].astype(np.int64),
            "prefill_tokens": column["prefill_tokens"].astype(np.int64),
            "decode_context": column["decode_context"].astype(np.int64),
        }
    )


def _model(
    steps: MeasuredSteps, used: NDArray[np.bool_], exponents: Sequence[float] = _EXPONENTS
) -> tuple[Floats, MachineSlowdown]:
    """Return the prices of the features, fitted to the `used` steps, and the slowdown of the machine in these steps."""
    taken = float(steps.step_ns[used].sum() / steps.own_ns[used].sum())
    speed = float(np.median(steps.speed[used]))
    best: tuple[float, Floats, MachineSlowdown] | None = None
    for exponent in exponents if np.ptp(steps.speed[used]) else (0.0,):
        machine = MachineSlowdown(taken, speed, exponent)
        own_ns = steps.own_ns / machine.slowness(steps)
        prices = step_prices(steps, own_ns, used)
        error = float(np.abs(steps.step[used] @ prices / own_ns[used] - 1).mean())
        if best is None or error < best[0]:
            best = error, prices, machine
    assert best is not None
    return best[1] * taken, best[2]


def _misses(steps: MeasuredSteps, predicted: Floats, machine: MachineSlowdown) -> tuple[float, ...]:
    """Return log errors of the last steps relative to their mean, from which simulations draw random errors.

    The error of the mean is left out, because the interval includes it.
    """
    misses = np.log(steps.step_ns / (predicted * machine.slowdown(steps)))[-_MOST_MISSES:]
    return tuple(np.round(misses - np.log(np.exp(misses).mean()), 3).tolist())


def step_prices(steps: MeasuredSteps, times_ns: Floats, used: NDArray[np.bool_]) -> Floats:
    """Return the prices of the features, fitted to the times `times_ns` of the `used` steps.

    The prices of sampling and drafting are fitted to their own times if these were measured. The prices of the other
    features are fitted to the remaining time.
    """
    features, rest_ns = steps.step[used], times_ns[used]
    prices = np.zeros(features.shape[1])
    few = np.count_nonzero(features, axis=0) < _LEAST_ABOVE
    rest = ~(few & np.array([name in TOKEN_FEATURES for name in steps.features]))
    for place, part_ns in ((SAMPLING, steps.sample_ns), (DRAFTING, steps.draft_ns)):
        if not np.isnan(part_ns[used]).any():
            own_ns = (part_ns * times_ns / steps.step_ns)[used]
            prices[place] = _prices(features[:, place], own_ns)
            rest_ns, rest[place] = rest_ns - own_ns, False
    prices[rest] = _prices(features[:, rest], rest_ns)
    return prices


def _prices(features: Floats, times: Floats) -> Floats:
    """Return non-negative prices `[features]` in ns that minimise relative errors (robust, iteratively reweighted)."""
    from scipy.optimize import nnls  # slow import, as is scipy.stats

    scale = np.maximum(np.abs(features).max(axis=0), 1.0)
    least = np.maximum(_LEAST_EXPECTED * times, 1.0)  # the drafting of a step without drafts takes 0
    expected, weights = np.maximum(times, 1.0), np.ones_like(times)
    prices = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        w = weights / expected
        solution, _ = nnls(features / scale * w[:, None], times * w)
        prices = solution / scale
        expected = np.maximum(features @ prices, least)
        error = (times - features @ prices) / expected
        spread = 1.4826 * np.median(np.abs(error - np.median(error))) + 1e-9
        weights = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(error), 1e-12)))
    return prices


def _domain(steps: MeasuredSteps) -> dict[str, dict[str, tuple[float, float]]]:
    domain = {}
    for index, name in enumerate(REGIMES):
        mine = steps.step[steps.regime == index]
        if len(mine):
            low, high = mine.min(axis=0), mine.max(axis=0)
            domain[name] = {f: (float(low[i]), float(high[i])) for i, f in enumerate(steps.features)}
    return domain
