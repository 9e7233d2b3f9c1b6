"""A simulated run, recorded with the source of its step times, the trust in it, its bands and its prices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokentwin.calibration.steps.observed import pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import StepCost
from tokentwin.calibration.steps.step_trust import recorded_beyond
from tokentwin.calibration.trust import EXTRAPOLATED, Trust
from tokentwin.calibration.validation.bands import Band, bands
from tokentwin.planning.adapters_and_encoders import adapters_said, encoder_said
from tokentwin.planning.capacity import Capacity, capacity
from tokentwin.planning.energy import energy_bands, energy_note
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.progress import Tell, quiet
from tokentwin.planning.run_report import run_report
from tokentwin.serving.answers.document import Answer
from tokentwin.serving.answers.report import Line, Table
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.sim.cluster import Simulated, simulate_to
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.saturation import Saturation
from tokentwin.traces.recording import Recording, notes_of

_MANY_STEPS = 100_000


@dataclass(frozen=True)
class SimulatedRun(Answer):
    """A recording and its metrics.

    Attributes:
        bands: ends of the 90 % bands by metric and statistic; None if they were not requested
        trust: trust in its step times
        capacity: the rate beyond which requests pile up; None if they do not pile up, or bands were not requested
        defaults: a line for each set of settings that pools left to their engine, with their values
        seen_by: a sentence that says that latencies are those that clients see; empty if they are not
        assumed: a sentence about traffic that was made up; empty if none was
        adapters: a sentence about the loads of LoRA adapters; empty if the engines serve none
        encoder: a sentence about the encoding of images, videos and audio; empty if the engines have no encoder
    """

    recording: Recording
    metrics: RunMetrics
    bands: dict[str, dict[str, tuple[float, float]]] | None
    trust: Trust
    defaults: tuple[str, ...] = ()
    capacity: Capacity | None = None
    seen_by: str = ""
    assumed: str = ""
    adapters: str = ""
    encoder: str = ""
    logits: str = ""

    @property
    def power_note(self) -> str:
        """A sentence about the trust in figures of power and energy; empty if there are none."""
        gpu = gpus().get(notes_of(self.recording.run).get("gpu", ""))
        return energy_note(gpu) if gpu and self.metrics.scalars()["power_w"] is not None else ""

    @property
    def tables(self) -> tuple[str, ...]:
        return ("requests", "steps")

    def table(self, name: str) -> pa.Table:
        """Return `requests` or `steps` of the recording; `tokentwin columns` explains their columns."""
        return self.recording.table(name)

    def report(self) -> Iterator[Line | Table]:
        yield from run_report(self.metrics, self.bands, self.capacity)
        if self.assumed:
            yield Line(self.assumed)
        if self.adapters:
            yield Line(self.adapters)
        if self.encoder:
            yield Line(self.encoder)
        if self.logits:
            yield Line(self.logits)
        yield Line(f"{self.trust.level}: {self.trust.reason}")
        if self.power_note:
            yield Line(self.power_note)
        if self.seen_by:
            yield Line(self.seen_by)
        yield from map(Line, self.defaults)


def recorded(
    scenario: PricedScenario,
    out: str | Path,
    *,
    band: bool = True,
    details: bool = True,
    overwrite: bool = False,
    tell: Tell = quiet,
) -> SimulatedRun:
    """Simulate `scenario` and record it in the directory `out`.

    If `band` is set, both ends of the 90 % interval of step times are simulated, too. If `details` is set, steps and
    token times are kept. Raises UserError if `out` exists and `overwrite` is not set.
    """
    tell("simulating", 0.0)
    scenario.check_site(steps=details)
    judge = _Judge(scenario, band, tell)
    simulate_to(
        out,
        scenario.workload,
        scenario.deployment,
        scenario.cost,
        fleet=scenario.fleet,
        pools=scenario.pools,
        calibration=scenario.calibration,
        usd_per_gpu_hour=scenario.usd_per_gpu_hour,
        steps=details,
        tokens=details,
        leaps=True,
        front_door=scenario.front_door,
        note=judge.notes,
        overwrite=overwrite,
    )
    run, metrics, intervals, gpu = Recording.load(out), judge.metrics, judge.bands, gpus().get(scenario.gpu or "")
    if intervals is not None and gpu is not None:
        intervals = {**intervals, **energy_bands(metrics, gpu)}
    return SimulatedRun(
        run,
        metrics,
        intervals,
        judge.trust,
        scenario.defaults,
        judge.capacity,
        seen_by=scenario.seen_by,
        adapters=judge.adapters,
        encoder=judge.encoder,
        logits=_of_logits(run, scenario),
    )


class _Judge:
    """The metrics of a simulated run, its bands if they are requested, and the trust in it."""

    metrics: RunMetrics
    trust: Trust
    bands: dict[str, dict[str, Band]] | None = None
    capacity: Capacity | None = None
    adapters: str = ""
    encoder: str = ""

    def __init__(self, scenario: PricedScenario, band: bool, tell: Tell) -> None:
        self._scenario, self._band, self._tell = scenario, band, tell

    def notes(self, done: Simulated, recording: Recording) -> dict[str, Any]:
        """Compute the attributes from the finished run, and return the notes of its recording."""
        scenario = self._scenario
        _give_back(done.steps)
        notes: dict[str, Any] = {"site": dict(scenario.site)} if scenario.site else {}
        gpu = gpus().get(scenario.gpu or "")
        self.metrics = RunMetrics.from_recording(recording, peak=gpu, notes=notes)
        if self._band and scenario.has_bands:
            runs = [(scenario, self.metrics.saturation)]
            self.bands = bands(self.metrics, _at_both_ends(scenario, done.steps, self._tell, runs))
            self.capacity = capacity(runs)
        self.trust = _trust(recording, scenario)
        if self._band and not scenario.has_bands:
            reason = f"{self.trust.reason}; without bands, because fleet.processes run once, in the run itself"
            self.trust = self.trust._replace(reason=reason)
        notes["trust"] = self.trust._asdict()
        if done.adapters is not None:
            notes["adapters"] = done.adapters._asdict()
            self.adapters = adapters_said(done.adapters)
        if done.encoder is not None:
            notes["encoder"] = done.encoder._asdict()
            self.encoder = encoder_said(done.encoder, done.encoders_apart)
        if done.encoders_apart is not None:
            notes["encoders_apart"] = done.encoders_apart._asdict()
        if scenario.front_door is not None:
            notes["front_door"] = scenario.front_door.model_dump(exclude_defaults=True)
        if scenario.gpu:
            notes["gpu"] = scenario.gpu
        if scenario.defaults:
            notes["defaults"] = list(scenario.defaults)
        if self.bands:
            notes["bands"] = self.bands
        if self.capacity:
            notes["capacity"] = self.capacity.model_dump()
        return notes


def _at_both_ends(
    scenario: PricedScenario, steps: int, tell: Tell, runs: list[tuple[PricedScenario, Saturation | None]]
) -> Iterator[RunMetrics]:
    """Yield the metrics at both ends of the interval, and add the ends with their verdicts to `runs`."""
    for at, end in enumerate(scenario.ends()):
        tell("simulating the ends of the 90 % interval", 0.4 + 0.3 * at)
        _give_back(steps)
        metrics = RunMetrics(end.requests())
        runs.append((end, metrics.saturation))
        yield metrics


def _of_logits(recording: Recording, scenario: PricedScenario) -> str:
    """Return a sentence about the prices of penalties and scored prompts; empty if no request has any."""
    if not recording.workload_uses("changes_logits", "scores_prompt"):
        return ""
    costs = map(pure, scenario.judged)
    said = dict.fromkeys(cost.logits_said for cost in costs if isinstance(cost, OperationCost | StepCost))
    return "; ".join(said) or "penalties and log-probabilities of prompts have no price here, and take no time"


def _give_back(steps: int) -> None:
    """Free the memory of a simulation of `steps` steps. Its objects refer to each other, so this needs a collection."""
    if steps > _MANY_STEPS:  # the garbage collection takes 0.03 s
        gc.collect()
        pa.default_memory_pool().release_unused()


def _trust(recording: Recording, scenario: PricedScenario) -> Trust:
    """Return the trust in the least certain pool.

    If steps were kept and some lie beyond the measured range, the reason states their number.
    """
    trust = scenario.trust()
    costs = [pure(cost) for cost in scenario.judged]
    one = costs[0] if len(costs) == 1 else None
    if trust.level == EXTRAPOLATED and isinstance(one, OperationCost) and one.adapters is one.encoder is None:
        beyond = recorded_beyond(one, recording)
        if beyond is not None:
            return trust._replace(reason=f"{trust.reason}, in {beyond}")
    return trust
