"""Simulations that know the machine's speed: at each moment they are as slow as the machine was in a real run.

The simulator gets the share of time that other processes took and the speed of the machine, but no step times of the
run. See `tokentwin.calibration.steps.machine_slowdown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tokentwin.calibration.acceptance import as_accepted, with_drafts
from tokentwin.calibration.kv_link import as_linked
from tokentwin.calibration.steps.features import Floats, MeasuredSteps, by_replica
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.validation.bands import Band, drawn_bands, run_metrics
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.serving.deployments.fleet import FailuresConfig, FleetConfig, Slowdown, plain_fleet
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

_DRAWS = 39  # number of random simulations; in order, the second and the second last are the ends of a 90 % band
_FACTORS = 0.001, 1000.0  # limits of a slowdown, even for a machine that slept for an hour
_FOREVER_S = 1e9


class KnownSpeedRun(NamedTuple):
    """A run simulated with the machine's speed known, and the 90 % band of each statistic, by metric and name."""

    central: RunMetrics
    band: Mapping[str, Mapping[str, Band]]


def machine_slowdown(runs: Sequence[Recording], calibration: Calibration) -> MachineSlowdown | None:
    """Return the slowdown of the calibration; None if the calibration or a recording lacks the machine's speed."""
    has_speeds = all("speed" in run.steps.column_names and not run.steps["speed"].null_count for run in runs)
    return calibration.weather if has_speeds else None


def at_known_speed(run: Recording, calibration: Calibration, machine: MachineSlowdown) -> KnownSpeedRun:
    """Simulate the workload of `run` with the speed of its machine known."""
    cost, workload = StepCost(calibration), with_drafts(run.workload(), run)
    deployment = as_linked(as_accepted(recorded_deployment(run), [run]), [run])
    slowdown, rng = machine.slowdown(MeasuredSteps([run.steps])), np.random.Generator(np.random.PCG64(0))

    def simulated(slowdown: Floats) -> RunMetrics:
        return run_metrics(workload, deployment, cost, fleet=_slowed(run, slowdown))

    draws = [simulated(machine.drawn(slowdown, rng)) for _ in range(_DRAWS)]
    return KnownSpeedRun(simulated(slowdown), drawn_bands(draws))


def slowed_fleet(run: Recording, machine: MachineSlowdown, begin_s: float = 0.0) -> FleetConfig:
    """Return a fleet with the slowdowns of `run`, each from the start of a step to the start of the next one.

    Time 0 of the fleet is `begin_s` seconds after the start of the run.
    """
    return _slowed(run, machine.slowdown(MeasuredSteps([run.steps])), begin_s)


def _slowed(run: Recording, slowdown: Floats, begin_s: float = 0.0) -> FleetConfig:
    factors = iter(np.clip(slowdown, *_FACTORS).tolist())
    slowdowns: list[Slowdown] = []
    for steps in by_replica(run.steps):
        replica = steps["replica"][0].as_py()
        starts = [max(ns / 1e9 - begin_s, 0.0) for ns in steps["start_ns"].to_pylist()]
        starts[0] = 0.0
        slowdowns += (
            Slowdown(at_s=at, for_s=until - at, factor=factor, replica=replica)
            for at, until, factor in zip(starts, [*starts[1:], _FOREVER_S], factors, strict=False)
            if until > at
        )
    fleet = recorded_deployment(run).fleet or plain_fleet(1)
    return fleet.model_copy(update={"failures": FailuresConfig(slowdowns=tuple(slowdowns))})
