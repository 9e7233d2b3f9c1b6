"""The fit of a calibration to measured steps.

Prices (times per unit of a feature) are fitted by non-negative least squares on relative errors: the weight of a step
is 1 / its predicted time, so a decode step counts as much as a long prefill. Weights by measured time would favour fast
steps and make total times too short. Outliers have smaller weights (Huber). If the CPU time of the engine's thread and
the speed of the machine are recorded, prices are fitted to CPU time at the median speed, and then raised by the share
of time that other processes took. Prices are thus for the machine's usual slowdown, which is stored as
`MachineSlowdown`. Errors are stated for every fifth stretch of steps, predicted by a fit without these stretches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from calibration.steps.features import (
    CPU_FEATURES,
    DRAFTING,
    REGIMES,
    SAMPLING,
    TOKEN_FEATURES,
    Floats,
    MeasuredSteps,
)
from calibration.steps.launches import UNKNOWN, LaunchCost
from calibration.steps.machine_slowdown import MachineSlowdown
from calibration.steps.step_cost import Calibration, Residuals
from serving.errors import UserError
from traces.tables import percentiles

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


def fit(
    steps: MeasuredSteps,
    *,
    deployment: str,
    hardware: Mapping[str, Any],
    version: str,
    created: str,
    noise: Mapping[str, Any],
    launches: LaunchCost = UNKNOWN,
) -> Calibration:
    """Fit a calibration to `steps`; raise UserError if there are too few."""
    if len(steps) < _LEAST_STEPS:
        remedy = f"measured steps are too few; calibration needs at least {_LEAST_STEPS}, so measure longer"
        raise UserError("steps", len(steps), remedy)
    held_out = (np.arange(len(steps)) // _STRETCH) % _HELD_OUT == _HELD_OUT - 1
    step_prices, machine = _model(steps, np.ones_like(held_out))
    timed = ~np.isnan(steps.cpu_ns)
    cpu_prices = _prices(steps.cpu[timed], steps.cpu_ns[timed])
    step_ps = {name: round(price * 1000) for name, price in zip(steps.features, step_prices, strict=True)}
    cpu_ps = {name: round(price * 1000) for name, price in zip(CPU_FEATURES, cpu_prices, strict=True)}
    of_adapters = {"adapter_loads": steps.load_ns, "adapter_copies": steps.copy_ns}
    cpu_ps |= {name: round(ns * 1000) for name, ns in of_adapters.items() if ns is not None}
    predicted = steps.step @ step_prices
    prices_without, machine_without = _model(steps, ~held_out)
    blind_own_ns = machine_without.own_ns(steps.step @ prices_without, steps)
    identity = blake2b(repr((step_ps, cpu_ps, launches, deployment, created)).encode(), digest_size=6).hexdigest()
    return Calibration(
        id=identity,
        deployment=deployment,
        hardware=dict(hardware),
        version=version,
        created=created,
        step_prices_ps=step_ps,
        cpu_prices_ps=cpu_ps,
        domain=_domain(steps),
        residuals=residuals(steps.regime[held_out], steps.own_ns[held_out], blind_own_ns[held_out]),
        interval=interval(steps),
        weather=replace(machine, interval=interval(steps, speed_known=True), misses=_misses(steps, predicted, machine)),
        noise=dict(noise),
        launches=launches,
        fitted_steps=len(steps),
        mask_ps=None if steps.mask_ns is None else round(steps.mask_ns * 1000),
    )


def predict(calibration: Calibration, steps: MeasuredSteps) -> Floats:
    """Return the predicted time of each step in ns."""
    prices = np.array([calibration.step_prices_ps.get(name, 0) / 1000 for name in steps.features])
    return steps.step @ prices


def interval(steps: MeasuredSteps, speed_known: bool = False) -> tuple[float, float]:
    """Return the factors of the predicted time between which 90 % of whole runs lie.

    With `speed_known`, the prediction uses the machine's slowdown that was measured in the run. Each recording in turn
    is predicted by a fit to the others, which gives the error of its total time. The interval is that of the error of
    one more run (Student's t, because there are few recordings). Errors of single steps average out over a run, but
    this error does not.
    """
    part = steps.recording
    if part[-1] + 1 < _LEAST_PARTS:
        part = np.arange(len(steps)) * _LEAST_PARTS // len(steps)
    logs = []
    for index in range(part[-1] + 1):
        mine = part == index
        prices, machine = _model(steps, ~mine)
        predicted = steps.step[mine] @ prices
        if speed_known:
            predicted = predicted * machine.slowdown(steps)[mine]
        logs.append(np.log(steps.step_ns[mine].sum() / predicted.sum()))
    count = len(logs)
    from scipy.stats import t as student

    reach = student.ppf((1 + _COVERAGE) / 2, count - 1) * np.std(logs, ddof=1) * np.sqrt(1 + 1 / count)
    return float(np.exp(-reach)), float(np.exp(reach))


def residuals(regime: NDArray[np.int64], measured: Floats, predicted: Floats) -> dict[str, Residuals]:
    """Return the relative errors of each regime that has steps."""
    of_regime = {}
    for index, name in enumerate(REGIMES):
        mine = regime == index
        if not mine.any():
            continue
        error = 100 * (predicted[mine] - measured[mine]) / measured[mine]
        median, p95 = percentiles(np.abs(error), (50, 95))
        of_regime[name] = Residuals(
            steps=int(mine.sum()),
            median_error_pct=median,
            p95_error_pct=p95,
            bias_pct=float(100 * (predicted[mine].sum() - measured[mine].sum()) / measured[mine].sum()),
            quantiles_pct=tuple(percentiles(error, (5, 25, 50, 75, 95))),
        )
    return of_regime


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


def _model(steps: MeasuredSteps, used: NDArray[np.bool_]) -> tuple[Floats, MachineSlowdown]:
    """Return the prices of the features, fitted to the `used` steps, and the slowdown of the machine in these steps."""
    taken = float(steps.step_ns[used].sum() / steps.own_ns[used].sum())
    speed = float(np.median(steps.speed[used]))
    best: tuple[float, Floats, MachineSlowdown] | None = None
    for exponent in _EXPONENTS if np.ptp(steps.speed[used]) else (0.0,):
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
