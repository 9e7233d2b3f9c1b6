"""Rungs 1 to 3 of the validation ladder: comparisons of the simulated with the real engine.

Rung 1 compares decisions, which must be identical. Rung 2 compares predicted step times with measured ones by regime,
on runs that were not used for the calibration. Rung 3 compares latencies and throughputs of the simulated run with the
real ones. It also states the *floor*, which is the difference between repeats of the real run. No simulator can be
closer than the floor.

Rungs 2 and 3 are computed twice. The blind comparison has the errors that a planner would get. In the comparison with
the machine's speed known, the simulator knows how slow the machine was at each moment of the real run, so the remaining
error is that of the simulator itself. The simulator always knows the output lengths and the proposed and accepted
drafts, because they depend on texts, which it does not have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import pyarrow.parquet as pq

from tokentwin.calibration.acceptance import as_accepted, with_drafts
from tokentwin.calibration.kv_link import as_linked
from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.fit import predict, residuals, step_residuals_table
from tokentwin.calibration.steps.observed import ObservedPrices
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.validation.bands import Band, bands, run_metrics
from tokentwin.calibration.validation.decision_replay import (
    DecisionReplay,
    recorded_deployment,
    replay_decisions,
    worst,
)
from tokentwin.calibration.validation.disturbance import calibrated_deployment, disturbance
from tokentwin.calibration.validation.expert_balance import expert_balance
from tokentwin.calibration.validation.known_speed import KnownSpeedRun, at_known_speed, machine_slowdown
from tokentwin.calibration.validation.report import (
    REPORT,
    RESIDUALS,
    Recordings,
    Replay,
    Rungs,
    RunRow,
    RunRung,
    StepRung,
    ValidationReport,
)
from tokentwin.serving.answers.figures import shown_change, shown_percent
from tokentwin.serving.errors import UserError
from tokentwin.serving.whole_file import whole_file
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p99")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_throughput")


def covalidate(real: Sequence[str | Path], calibration: Calibration, out: str | Path, created: str) -> ValidationReport:
    """Compare a simulation with recordings of its workload on the real engine, and return the report.

    Writes `report.json`, `step_residuals.parquet` and the recording `simulated` into `out`. Raises UserError if the
    recordings have different workloads or deployments, or another deployment than the calibration.
    """
    if not real:
        raise UserError("real", None, "give at least one recording of the real engine")
    out = Path(out)
    if len({Path(path).resolve() for path in real}) < len(real):
        remedy = "holds the same recording twice; give other runs as repeats"
        raise UserError("real", [str(path) for path in real], remedy)
    if (out / "runs.parquet").exists():
        raise UserError("out", str(out), "is a recording; choose a directory for the report")
    runs = [Recording.load(path) for path in real]
    _check_same(runs, calibration)
    replay = worst([replay_decisions(run) for run in runs])
    steps = MeasuredSteps([run.steps for run in runs], knees=calibration.knees)
    predicted = predict(calibration, steps)
    cost = ObservedPrices(StepCost(calibration))
    deployment = as_linked(as_accepted(recorded_deployment(runs[0]), runs), runs)
    workload = with_drafts(runs[0].workload(), runs[0])
    simulate_to(
        out / "simulated",
        workload,
        deployment,
        cost,
        calibration=calibration.id,
        tokens=True,
        overwrite=True,
    )
    simulated = RunMetrics.from_recording(Recording.load(out / "simulated"))
    fast, slow = (run_metrics(workload, deployment, end) for end in cost.ends())
    real_metrics = [RunMetrics.from_recording(run) for run in runs]
    rows = _run_errors(real_metrics, simulated, bands(simulated, (fast, slow)))
    regimes = {"regimes": residuals(steps.regime, steps.step_ns, predicted)}
    if (machine := machine_slowdown(runs, calibration)) is not None:
        rows = _with_known_speed(rows, real_metrics, [at_known_speed(run, calibration, machine) for run in runs])
        regimes["same_weather"] = residuals(steps.regime, steps.own_ns, machine.own_ns(predicted, steps))
    judged = disturbance([(runs, calibration)])
    report = ValidationReport(
        verdict=_verdict(rows, replay),
        created=created,
        disturbed=judged.disturbed,
        disturbance=judged.evidence,
        hardware=json.loads(runs[0].run["hardware"] or "{}"),
        workload=runs[0].run["workload"],
        calibration=calibration.id,
        extrapolated_share=cost.extrapolated_share,
        rungs=Rungs(
            replay=Replay.model_validate(replay, from_attributes=True),
            step=StepRung.model_validate(regimes, from_attributes=True),
            run=RunRung(
                rows=tuple(rows),
                covered=_covered((row.low, row.real, row.high) for row in rows),
                weather_covered=_covered((row.weather_low, row.real, row.weather_high) for row in rows),
            ),
            experts=expert_balance(runs),
        ),
        recordings=Recordings(real=tuple(os.path.relpath(path, out) for path in real), simulated="simulated"),
    )
    pq.write_table(step_residuals_table(steps, predicted), out / RESIDUALS)
    with whole_file(out / REPORT) as file:
        file.write_text(report.dumps(indent=2) + "\n", encoding="utf-8")
    return report


def _check_same(runs: Sequence[Recording], calibration: Calibration) -> None:
    first = runs[0].run
    for run in runs:
        if run.run["clock"] != "wall":
            raise UserError("real", run.run["run_id"], "was simulated; give recordings of the real engine")
        if run.run["status"] != "complete":
            raise UserError("real", run.run["run_id"], f"is {run.run['status']}; give a recording that ran to its end")
        for name in ("workload", "deployment"):
            if run.run[name] != first[name]:
                remedy = f"has another {name} than {first['run_id']}; give recordings of the same one"
                raise UserError("real", run.run["run_id"], remedy)
    if calibrated_deployment(calibration).timing() != recorded_deployment(runs[0]).timing():
        remedy = "was measured on another engine than the recordings; calibrate that engine"
        raise UserError("calibration", calibration.id, remedy)


def _numbers(metrics: RunMetrics) -> dict[tuple[str, str], float]:
    """Return the figures of a run by metric and statistic, without those that pooling requests do not have."""
    numbers: dict[tuple[str, str], float] = {}
    for name in LATENCIES:
        if not (distribution := metrics.distribution(name)).count:
            continue
        summary = distribution.as_dict()
        numbers.update({(name, stat): float(summary[stat]) for stat in STATISTICS})
    scalars = metrics.scalars()
    numbers.update({(name, "value"): float(scalars[name]) for name in THROUGHPUTS if scalars[name]})
    return numbers


def _run_errors(
    real: Sequence[RunMetrics], simulated: RunMetrics, band: Mapping[str, Mapping[str, Band]]
) -> list[RunRow]:
    repeats = [_numbers(metrics) for metrics in real]
    rows = []
    for key, value in _numbers(simulated).items():
        if not all(key in repeat for repeat in repeats):
            continue
        measured = [repeat[key] for repeat in repeats]
        centre = mean(measured)
        floor = 100 * (max(measured) - min(measured)) / centre if len(measured) > 1 else None
        low, high = band[key[0]][key[1]]
        rows.append(
            RunRow(
                metric=key[0],
                stat=key[1],
                real=centre,
                simulated=value,
                error_pct=100 * (value - centre) / centre,
                floor_pct=floor,
                low=low,
                high=high,
            )
        )
    return rows


def _with_known_speed(
    rows: Sequence[RunRow], real: Sequence[RunMetrics], same: Sequence[KnownSpeedRun]
) -> list[RunRow]:
    """Return the rows, with the results of the simulations that knew the machine's speed added.

    The floor of these results is the difference between the errors of the runs.
    """
    measured = [_numbers(metrics) for metrics in real]
    simulated = [_numbers(run.central) for run in same]
    compared = []
    for row in rows:
        key = row.metric, row.stat
        values = [numbers[key] for numbers in simulated]
        ratios = [run[key] / value for run, value in zip(measured, values, strict=True) if value]
        ends = [run.band[row.metric][row.stat] for run in same]
        known_speed_figures = {
            "weather_simulated": mean(values),
            "weather_error_pct": 100 * (mean(values) / row.real - 1) if row.real else None,
            "weather_floor_pct": 100 * (max(ratios) - min(ratios)) / mean(ratios) if len(ratios) > 1 else None,
            "weather_low": mean(low for low, _ in ends),
            "weather_high": mean(high for _, high in ends),
        }
        compared.append(RunRow.model_validate({**dict(row), **known_speed_figures}))
    return compared


def _covered(numbers: Iterable[tuple[float | None, float | None, float | None]]) -> float | None:
    """Return the share of rows whose middle number lies between the outer two; None if no row has three numbers."""
    known = [[number for number in row if number is not None] for row in numbers]
    inside = [row[0] <= row[1] <= row[2] for row in known if len(row) == 3]
    return sum(inside) / len(inside) if inside else None


def _verdict(rows: Sequence[RunRow], replay: DecisionReplay) -> str:
    """Return the verdict: one sentence with the main errors."""
    chosen = [row for metric in LATENCIES for row in rows if (row.metric, row.stat) == (metric, "p50")]
    verdict = _clause([(row, row.error_pct, row.floor_pct) for row in chosen])
    if chosen[0].weather_error_pct is not None:
        same = _clause([(row, row.weather_error_pct, row.weather_floor_pct) for row in chosen])
        verdict = f"blind {verdict}; with the machine's speed known {same}"
    decisions = (
        f"all {replay.steps} steps decided alike" if replay.exact else f"DECISIONS DIFFER at {replay.first_difference}"
    )
    return f"{verdict}; {decisions}"


def _clause(errors: Sequence[tuple[RunRow, float | None, float | None]]) -> str:
    """Return a clause with the errors of statistics and their noise.

    An error below the noise means nothing, so its value is left out.
    """
    parts, within = [], []
    for row, error_pct, floor_pct in errors:
        name = f"{row.metric.removesuffix('_ms').upper()} {row.stat}"
        if error_pct is None:
            parts.append(f"{name} not known")
        elif floor_pct is None:
            parts.append(f"{name} {shown_change(error_pct)}")
        elif abs(error_pct) > floor_pct:
            parts.append(f"{name} {shown_change(error_pct)} (noise {shown_percent(floor_pct)})")
        else:
            within.append((name, shown_percent(floor_pct)))
    if within:
        names, noise = (
            " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1]))) for texts in zip(*within, strict=True)
        )
        parts.append(f"{names} within the noise of this machine ({noise})")
    return ", ".join(parts)
