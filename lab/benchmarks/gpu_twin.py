"""The twin of an H200 without an H200: how far off linear prices and corrected kernel times are without any noise.

    python -m lab.benchmarks.gpu_twin [--commit COMMIT --write lab/results/gpu-twin.md]

The truth is an engine with the kernel times that the GPU suite measured on an H200 (`lab/results/gpu/h200`). In its
steps each part takes longer or less long than alone, by factors like those of real runs. There are times per step, row
and prompt, and eager steps beyond 2,048 tokens take 8 % longer. It runs the scenarios of the suite. In turn, each is
left out and predicted by calibrations from the other four. They have linear prices, NVIDIA's kernel times, or our own
measured kernel times, as in the suite. Kernel times are corrected by the steps, which must teach the factors. The four
have as many seconds of arrivals as in the suite, where each ran twice. The traffic that is predicted goes on for
longer: its length is doubled until the 90 % interval of the truth's own p99 (of order statistics, for independent
requests) reaches at most 5 % to either side, the target, or it is 32 times as long. The p99 of fewer requests is that
of one or two of them. Errors of steps are medians of absolute errors. The targets are 2 % of
the mean and 5 % of the p99 of TTFT and TPOT. The truth has the form of the model and the same kernel table, and its CPU
time is given, so this is a lower bound of the error on a real GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lab.gpu_suite.recorded_runs import Pace, scenarios, usual_lengths
from lab.gpu_suite.sizes import gpu_sizes
from tokentwin.calibration.kernels.own_kernels import kernel_ratios
from tokentwin.calibration.steps.correction import Correction
from tokentwin.calibration.steps.features import CPU_FEATURES, REGIMES, STEP_FEATURES, MeasuredSteps
from tokentwin.calibration.steps.fit import fit, predict
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.steps.surface_fit import known_model, surfaces_for
from tokentwin.calibration.steps.surfaces import Surfaces, kernels_of
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.serving.answers.markdown import markdown_table
from tokentwin.serving.cost_model import TOKEN_BUCKETS, CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics

GPU = "H200"
KERNELS = Path(__file__).parents[1] / "results" / "gpu" / "h200" / "kernels.parquet"
MEANS_PCT, P99_PCT = 2.0, 5.0
_ADDED_NS = {"step": 4e5, "decode row": 5e3, "prompt": 5e4, "prompts only": 0.0, "prompts only, token": 0.0}
_EAGER = 0.08  # share of its time that a step beyond the CUDA graphs takes longer
_FACTORS = {
    "weights": 1.03,
    "compute@256": 1.04,
    "compute@1024": 1.07,
    "compute@3072": 1.1,
    "compute@8192": 1.12,
    "decode attention": 0.95,
    "prompt attention": 1.1,
    "past attention": 1.2,
    "elementwise": 1.2,
}
_CPU_PS = {"plan": 1_084_000_000, "rows": 12_600_000, "prefill_tokens": 1_200_000}  # as measured on the H200
_MOST_DOUBLED = 5
_METRICS = tuple((metric, stat) for metric in ("ttft_ms", "tpot_ms") for stat in ("mean", "p99"))


class Scenario(NamedTuple):
    """A scenario of the suite with its deployment."""

    name: str
    workload: Workload
    deployment: Deployment


def suite_deployment(gpu: str = GPU, which: str = "large") -> Deployment:
    """Return an engine of the GPU suite with the KV blocks that fit on `gpu`."""
    engine = gpu_sizes().deployments[which].model_copy(update={"dtype": "bfloat16"})
    capacity = kv_capacity(known_model(engine.model), find_gpu(gpu), engine)
    return engine.rescheduled(num_blocks=capacity.num_blocks).model_copy(update={"gpu_memory_utilization": None})


def true_cost(deployment: Deployment) -> StepCost:
    """Return the cost model of the truth: all measured kernels, and the times of host and launches around them."""
    ratios = tuple(kernel_ratios(kernels_of(GPU, 0.0), KERNELS, "triton"))
    model = known_model(deployment.model).model_dump_json()
    correction = Correction({**Correction().factors, **_FACTORS}, _ADDED_NS)
    surfaces = Surfaces(model, GPU, correction, own=ratios, eager=_EAGER, captures=True)
    cpu, none = {name: _CPU_PS[name] for name in CPU_FEATURES}, dict.fromkeys(STEP_FEATURES, 0)
    stated = deployment.model_dump_json()
    return StepCost(Calibration("truth", stated, {}, "", "", none, cpu, {}, {}, {}, 0, surfaces=surfaces), deployment)


def decode_plan(rows: int, context: int) -> StepPlan:
    """Return a decode step of requests with `context` tokens each."""
    return StepPlan.from_amounts(
        decode_rows=rows, decode_context=rows * context, decode_squares=rows * context**2, sampled_rows=rows
    )


def pace(cost: CostModel, deployment: Deployment, longest: int) -> Pace:
    """Return the pace that the suite would measure on an engine with this `cost`."""
    prompt, output = usual_lengths(longest)
    rows = deployment.scheduler.max_num_seqs // 2
    decode = decode_plan(rows, prompt + output // 2)
    whole = StepPlan.from_amounts(
        prefill_rows=1, prefill_tokens=prompt, prefill_pairs=prompt * (prompt + 1) // 2, sampled_rows=1
    )
    return Pace(cost.step_ns(decode) + cost.cpu_ns(decode), cost.step_ns(whole) // prompt)


def suite_scenarios(cost: StepCost, seconds: float) -> list[Scenario]:
    """Return the scenarios of the suite at the pace of `cost`."""
    longest, deployment = gpu_sizes().run_longest, cost.deployment
    return [
        Scenario(workload.name, workload, deployment.rescheduled(**limits))
        for workload, limits in scenarios(deployment.scheduler, pace(cost, deployment, longest), seconds, longest)
    ]


def steps_of(scenario: Scenario, cost: StepCost) -> pa.Table:
    """Return the steps of a simulated run; those with prompts are marked as CUDA graphs as our engine runs them."""
    sink = TableSink()
    shares = scenario.workload.shares_prefixes
    Cluster(scenario.deployment, cost, sink, shares_prefixes=shares, steps=True).run(scenario.workload)
    steps = sink.steps
    tokens = steps["prefill_tokens"].to_numpy() + steps["decode_rows"].to_numpy()
    graph = (tokens <= TOKEN_BUCKETS[-1]).astype(np.int64)
    if "graph" in steps.column_names:
        steps = steps.drop_columns(["graph"])
    return steps.append_column("graph", pa.array(graph))


def calibrated(tables: Sequence[pa.Table], deployment: Deployment, own: Path | None, linear: bool) -> Calibration:
    """Return a calibration from the steps of some scenarios."""
    steps = MeasuredSteps(list(tables), knees=True)
    stated = deployment.model_dump_json()
    made = fit(steps, deployment=stated, hardware={}, version="", created="", noise={})
    if not linear:
        (surfaces,) = surfaces_for(steps, deployment, GPU, own)
        made = replace(made, surfaces=surfaces.surfaces(surfaces.learnt(np.ones(len(steps), dtype=np.bool_))))
    # the truth has no noise, so the CPU time is the truth's as well; only steps are compared
    return replace(made, cpu_prices_ps={name: _CPU_PS[name] for name in CPU_FEATURES})


def p99_reach(values: NDArray[np.float64]) -> float:
    """Return how far the 90 % interval of the p99 reaches to one side, as a fraction of the p99.

    Its ends are the values at the ranks between which a binomial count of values above the true p99 lies. It is
    infinite if the larger of these ranks is beyond the largest value.
    """
    ordered, count = np.sort(values), len(values)
    aside = 1.645 * np.sqrt(count * 0.99 * 0.01)
    if count * 0.99 + aside > count - 1:
        return float("inf")
    low, p99, high = (ordered[int(count * 0.99 + way * aside)] for way in (-1, 0, 1))
    return float(max(high - p99, p99 - low) / p99)


def long_enough(truth: StepCost, number: int, seconds: float) -> tuple[Scenario, RunMetrics]:
    """Return scenario `number` with so many requests that its p99 is a statistic, and the run of the truth."""
    for doubled in range(_MOST_DOUBLED + 1):
        one = suite_scenarios(truth, seconds * 2**doubled)[number]
        run = run_metrics(one.workload, one.deployment, truth)
        if max(p99_reach(run.values(metric)) for metric in ("ttft_ms", "tpot_ms")) <= P99_PCT / 100:
            break
    return one, run


def compare(seconds: float) -> Iterator[dict[str, object]]:
    """Yield a row for each scenario left out and each way to price it; calibrations have `seconds` of arrivals."""
    deployment = suite_deployment()
    truth = true_cost(deployment)
    steps = {one.name: steps_of(one, truth) for one in suite_scenarios(truth, seconds)}
    for number, left_out in enumerate(steps):
        others = [table for name, table in steps.items() if name != left_out]
        one, run = long_enough(truth, number, seconds)
        real = run.distributions()
        reach = max(p99_reach(run.values(metric)) for metric in ("ttft_ms", "tpot_ms"))
        for label, own, is_linear in (
            ("linear prices", None, True),
            ("NVIDIA's kernels, corrected", None, False),
            ("our kernels, corrected", KERNELS, False),
        ):
            made = calibrated(others, deployment, own, is_linear)
            mine = MeasuredSteps([steps[one.name]], knees=True)
            missed = np.abs(predict(made, mine) / mine.step_ns - 1)
            row: dict[str, object] = {"scenario": one.name, "prices": label, "requests": len(run.values("ttft_ms"))}
            row["interval of p99, ±"] = 100 * reach
            for kind, regime in enumerate(REGIMES):
                here = mine.regime == kind
                row[regime] = 100 * float(np.median(missed[here])) if here.any() else None
            ours = run_metrics(one.workload, one.deployment, StepCost(made, one.deployment)).distributions()
            for metric, stat in _METRICS:
                known = real[metric].as_dict()[stat]
                row[f"{metric} {stat}"] = 100 * (ours[metric].as_dict()[stat] / known - 1)
            yield row


def worst(rows: Sequence[dict[str, object]], label: str, stat: str) -> float:
    """Return the largest absolute error in percent of `stat` (mean or p99) of TTFT and TPOT."""
    names = [f"{metric} {one}" for metric, one in _METRICS if one == stat]
    return max(abs(float(str(row[name]))) for row in rows if row["prices"] == label for name in names)


def table_of(rows: Sequence[dict[str, object]]) -> str:
    """Return the rows as a Markdown table."""
    names = list(rows[0])
    cells = ([f"{row[n]:.1f}" if isinstance(row[n], float) else str(row[n] or "-") for n in names] for row in rows)
    return markdown_table(names, cells)


def verdicts(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return a line for each way to price steps: its worst errors beside the targets."""
    said = []
    for label in dict.fromkeys(str(row["prices"]) for row in rows):
        mean, p99 = (worst(rows, label, stat) for stat in ("mean", "p99"))
        met = "met" if mean <= MEANS_PCT and p99 <= P99_PCT else "**missed**"
        said.append(
            f"{label}: means at worst {mean:.1f} % off (target {MEANS_PCT:g} %), p99 {p99:.1f} % "
            f"(target {P99_PCT:g} %): {met}"
        )
    return said


def page(rows: Sequence[dict[str, object]], commit: str, date: str) -> str:
    """Return the page lab/results/gpu-twin.md."""
    command = "python -m lab.benchmarks.gpu_twin --commit COMMIT --write PAGE"
    lines = ["# The twin of an H200, without noise", "", "```", command, "```"]
    lines += [" ".join((__doc__ or "").split("\n\n")[2].split()), ""]
    lines += [f"Measured on {date} at commit {commit}.", ""]
    lines += [f"- {line}" for line in verdicts(rows)]
    lines += ["", "Errors in percent of the scenario left out (steps: median absolute error):", "", table_of(rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page to write; by default figures are only printed")
    parser.add_argument("--commit", default="unknown", help="commit to state")
    parser.add_argument(
        "--seconds", type=float, default=2 * gpu_sizes().run_seconds, help="seconds of arrivals that teach"
    )
    given = parser.parse_args()
    rows = []
    for row in compare(given.seconds):
        print(json.dumps(row), flush=True)
        rows.append(row)
    print("\n".join(verdicts(rows)))
    if given.write:
        given.write.write_text(page(rows, given.commit, date.today().isoformat()), encoding="utf-8")


if __name__ == "__main__":
    main()
