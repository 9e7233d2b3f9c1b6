"""Rungs 1 to 3: one policy on two clocks, held against each other.

Rung 1, decisions: must be identical. Rung 2, steps: predicted against measured, by regime, on runs the calibration has
not seen. Rung 3, the run: latencies and throughputs of the simulated run against the real ones, beside the *floor*:
how far repeats of the real run are from each other. No simulator can be closer than that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import pyarrow.parquet as pq

from calibration.steps.features import MeasuredSteps
from calibration.steps.fit import predict, residuals, step_residuals_table
from calibration.steps.observed import ObservedPrices
from calibration.steps.step_cost import Calibration, StepCost
from calibration.validation.bands import Band, bands, run_metrics
from calibration.validation.decision_replay import DecisionReplay, recorded_deployment, replay_decisions
from calibration.validation.disturbance import calibrated_deployment, disturbance
from calibration.validation.report import (
    REPORT,
    RESIDUALS,
    Recordings,
    Regime,
    Replay,
    Rungs,
    RunRow,
    RunRung,
    StepRung,
    ValidationReport,
)
from serving.errors import UserError
from serving.whole_file import whole_file
from sim.simulate import simulate_to
from traces.recording import Recording
from traces.run_metrics import RunMetrics

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p99")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_throughput")


def covalidate(
    real: Sequence[str | Path], calibration: Calibration, out: str | Path, created: str, set_aside: str = ""
) -> ValidationReport:
    """Hold a simulation against recordings of the same workload on the real engine.

    `set_aside` says, in a clause, which recordings were made and are not used; empty when there are none.

    Writes `report.json`, `step_residuals.parquet` and the recording `simulated` into `out`. Raises UserError when
    the recordings are not of one workload and deployment, or not of the calibrated deployment.
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
    replay = _worst([replay_decisions(run) for run in runs])
    steps = MeasuredSteps([run.steps for run in runs])
    predicted = predict(calibration, steps)
    cost = ObservedPrices(StepCost(calibration))
    simulate_to(
        out / "simulated",
        runs[0].workload(),
        recorded_deployment(runs[0]),
        cost,
        calibration=calibration.id,
        tokens=True,
        overwrite=True,
    )
    simulated = RunMetrics.of(Recording.load(out / "simulated"))
    fast, slow = (run_metrics(runs[0].workload(), recorded_deployment(runs[0]), end) for end in cost.ends())
    rows = _run_errors([RunMetrics.of(run) for run in runs], simulated, bands(simulated, fast, slow))
    disturbed, evidence = disturbance([(runs, calibration)])
    regimes = residuals(steps.regime, steps.step_ns, predicted)
    inside = [row.low <= row.real <= row.high for row in rows]  # type: ignore[operator]
    report = ValidationReport(
        verdict=_verdict(rows, replay),
        created=created,
        disturbed=disturbed,
        disturbance=evidence,
        hardware=json.loads(runs[0].run["hardware"] or "{}"),
        workload=runs[0].run["workload"],
        calibration=calibration.id,
        extrapolated_share=cost.extrapolated_share,
        rungs=Rungs(
            replay=Replay.model_validate(replay, from_attributes=True),
            step=StepRung(
                regimes={name: Regime.model_validate(of, from_attributes=True) for name, of in regimes.items()}
            ),
            run=RunRung(rows=tuple(rows), covered=sum(inside) / len(rows)),
        ),
        recordings=Recordings(real=tuple(_relative(path, out) for path in real), simulated="simulated"),
        set_aside=set_aside,
    )
    pq.write_table(step_residuals_table(steps, predicted), out / RESIDUALS)
    with whole_file(out / REPORT) as file:
        file.write_text(report.dumps(indent=2) + "\n", encoding="utf-8")
    return report


def _relative(path: str | Path, out: Path) -> str:
    """`path` as seen from the report, so that the whole folder can be moved."""
    return os.path.relpath(Path(path), out)


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


def _worst(replays: Sequence[DecisionReplay]) -> DecisionReplay:
    """All replays as one: counts added up, the first difference kept."""
    return DecisionReplay(
        steps=sum(r.steps for r in replays),
        identical=sum(r.identical for r in replays),
        requests=sum(r.requests for r in replays),
        identical_requests=sum(r.identical_requests for r in replays),
        first_difference=next((r.first_difference for r in replays if r.first_difference), None),
    )


def _numbers(metrics: RunMetrics) -> dict[tuple[str, str], float]:
    numbers: dict[tuple[str, str], float] = {}
    for name in LATENCIES:
        summary = metrics.distribution(name).as_dict()
        numbers.update({(name, stat): float(summary[stat]) for stat in STATISTICS})
    scalars = metrics.scalars()
    numbers.update({(name, "value"): float(scalars[name]) for name in THROUGHPUTS})
    return numbers


def _run_errors(
    real: Sequence[RunMetrics], simulated: RunMetrics, band: Mapping[str, Mapping[str, Band]]
) -> list[RunRow]:
    repeats = [_numbers(metrics) for metrics in real]
    rows = []
    for key, value in _numbers(simulated).items():
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


def _verdict(rows: Sequence[RunRow], replay: DecisionReplay) -> str:
    """One sentence with the numbers a reader asks for first."""
    parts = []
    for metric, stat in (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("e2e_ms", "p99")):
        row = next(r for r in rows if (r.metric, r.stat) == (metric, stat))
        floor = "" if row.floor_pct is None else f" (floor {row.floor_pct:.1f} %)"
        parts.append(f"{metric.removesuffix('_ms').upper()} {stat} {row.error_pct:+.1f} %{floor}")
    decisions = (
        f"all {replay.steps} steps decided alike" if replay.exact else f"DECISIONS DIFFER at {replay.first_difference}"
    )
    return f"{', '.join(parts)}; {decisions}"
