"""The simulator in the weather of a real run: as slow at each moment as the machine then was.

It is told how much time others took and how fast the machine was, and nothing else of the run: see
`calibration.steps.weather`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from calibration.steps.features import MeasuredSteps
from calibration.steps.step_cost import Calibration, StepCost
from calibration.steps.weather import Weather
from calibration.validation.bands import Band, bands, run_metrics
from calibration.validation.decision_replay import recorded_deployment
from serving.deployments.fleet import FailuresConfig, FleetConfig, Slowdown
from sim.priced_pool import plain_fleet
from traces.recording import Recording
from traces.run_metrics import RunMetrics

_COLUMNS = ("thread_ns", "speed")
_FOREVER_S = 1e9


class InWeather(NamedTuple):
    """A run simulated in a real one's weather, and the 90 % band of each of its statistics, by metric and name."""

    central: RunMetrics
    band: Mapping[str, Mapping[str, Band]]


def known_weather(runs: Sequence[Recording], calibration: Calibration) -> Weather | None:
    """The calibration's; None where it or a recording does not tell CPU time and speed."""
    told = all(name in run.steps.column_names and not run.steps[name].null_count for run in runs for name in _COLUMNS)
    return calibration.weather if told else None


def in_weather_of(run: Recording, calibration: Calibration, weather: Weather) -> InWeather:
    """The workload of `run` simulated in its weather."""
    fleet = slowed_fleet(run, weather)
    cost = StepCost(calibration)
    central, fast, slow = (
        run_metrics(run.workload(), recorded_deployment(run), cost.scaled(factor), fleet=fleet)
        for factor in (1.0, *weather.interval)
    )
    return InWeather(central, bands(central, fast, slow))


def slowed_fleet(run: Recording, weather: Weather) -> FleetConfig:
    """One engine, slowed down from the start of each step of `run` to that of the next as that step was."""
    factors = weather.slowdown(MeasuredSteps([run.steps])).tolist()
    starts = [ns / 1e9 for ns in run.steps["start_ns"].to_pylist()]
    starts[0] = 0.0
    slowdowns = tuple(
        Slowdown(at_s=at, for_s=until - at, factor=factor)
        for at, until, factor in zip(starts, [*starts[1:], _FOREVER_S], factors, strict=True)
        if until > at
    )
    return plain_fleet(1).model_copy(update={"failures": FailuresConfig(slowdowns=slowdowns)})
