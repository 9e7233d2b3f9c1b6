"""What tokentwin predicts for a GPU from other engines' runs only.

    python -m lab.benchmarks.blind_gpu --gpu H200 --commit COMMIT --write lab/results/gpu-blind.md
    python -m lab.benchmarks.blind_gpu --gpu H200 --against lab/results/gpu/h200

It simulates every scenario of the GPU suite as `tokentwin simulate --gpu` does, with bands, at the pace that it
predicts, and writes a page and its data (`.json` beside it). Nothing that our engine measured on a GPU is used: the
cost model has the bundled kernel tables and the runs of other engines. With `--against`, the scenarios are those that a
GPU recorded, at the pace that it had, and the predictions are compared with the recordings. The H200's were recorded a
day before the predictions, and taught nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calibration.steps.external_calibration import identity
from calibration.steps.observed import JudgedCost
from calibration.steps.surface_fit import known_model
from calibration.validation.bands import bands, run_metrics
from calibration.validation.decision_replay import recorded_deployment
from lab.benchmarks.gpu_twin import pace, suite_deployment
from lab.gpu_suite.recorded_runs import scenarios, unpack
from lab.gpu_suite.results import load
from lab.gpu_suite.sizes import gpu_sizes
from planning.costs import priced
from serving.answers.markdown import markdown_table
from serving.deployments.config import Deployment
from serving.errors import UserError
from serving.workload import Workload
from traces.metrics.run_metrics import RunMetrics
from traces.recording import Recording

_FIGURES = tuple((metric, stat) for metric in ("ttft_ms", "tpot_ms", "e2e_ms") for stat in ("mean", "p99"))


def catalogued(deployment: Deployment) -> Deployment:
    """Return `deployment` of the catalogued model whose shape a `random:` model has."""
    return deployment.model_copy(update={"model": known_model(deployment.model).name})


def predicted(workload: Workload, deployment: Deployment, gpu: str) -> dict[str, Any]:
    """Return the figures of a simulated run with their 90 % bands, and the trust in its steps."""
    known = priced(None, gpu, catalogued(deployment))

    def run(cost: JudgedCost) -> RunMetrics:
        return run_metrics(workload, known.deployment, cost)

    central = run(known.cost)
    spread = bands(central, map(run, known.cost.ends()))
    trust = known.cost.trust()
    figures = {
        f"{metric} {stat}": [central.distributions()[metric].as_dict()[stat], *spread[metric][stat]]
        for metric, stat in _FIGURES
    }
    return {"figures": figures, "trust": trust.level, "because": trust.reason}


def predictions(gpu: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each scenario of the suite on `gpu`."""
    sizes, deployment = gpu_sizes(), suite_deployment(gpu)
    known = pace(priced(None, gpu, catalogued(deployment)).cost, deployment, sizes.run_longest)
    for workload, limits in scenarios(deployment.scheduler, known, sizes.run_seconds, sizes.run_longest):
        about = {"scenario": workload.name, "requests": sum(1 for _ in workload.requests), "pace_ns": list(known)}
        yield about | predicted(workload, deployment.rescheduled(**limits), gpu)


def comparisons(folder: Path, gpu: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each scenario that `gpu` recorded in `folder`, with the recorded figures of its first run."""
    with TemporaryDirectory() as scratch:
        for path in unpack(folder, Path(scratch)):
            name, _, repeat = path.name.rpartition("-")
            if repeat != "1":
                continue
            run = Recording.load(path)
            measured = RunMetrics(run.requests).distributions()
            real = {f"{metric} {stat}": measured[metric].as_dict()[stat] for metric, stat in _FIGURES}
            workload = run.workload()
            about = {"scenario": name, "requests": sum(1 for _ in workload.requests), "measured": real}
            yield about | predicted(workload, recorded_deployment(run), gpu)


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table: each figure with its band, and how far off it was."""
    names = [f"{metric} {stat}" for metric, stat in _FIGURES]
    cells = []
    for row in rows:
        shown = []
        for name in names:
            value, low, high = row["figures"][name]
            text = f"{value:,.4g} ({low:,.4g} to {high:,.4g})"
            if real := row.get("measured"):
                inside = "in" if low <= real[name] <= high else "**out of**"
                text += f"; measured {real[name]:,.4g}: {100 * (value / real[name] - 1):+.0f} %, {inside} band"
            shown.append(text)
        cells.append([row["scenario"], str(row["requests"]), *shown])
    return markdown_table(["scenario", "requests", *names], cells)


def page(rows: Sequence[dict[str, Any]], against: Sequence[dict[str, Any]], about: dict[str, str]) -> str:
    """Return the page lab/results/gpu-blind.md; `about` has the day of the recordings if there are any."""
    gpu = about["gpu"]
    command = f"python -m lab.benchmarks.blind_gpu --gpu {gpu} --commit COMMIT --write PAGE"
    text = [f"# Blind predictions for an {gpu}", "", "```", command, f"{command} --against DIR", "```"]
    text += [
        f"Predicted on {about['date']} at commit {about['commit']} (cost model {about['cost_model']}): Llama-3.1-8B's "
        f"shape in bf16 in the scenarios of the [GPU suite](gpu-suite.md), as `tokentwin simulate --gpu {gpu}` does. "
        "Nothing that our engine measured on a GPU was used. Times are in ms, with 90 % bands.",
        "",
        table_of(rows),
        "",
        f"Trust: {rows[0]['trust']}, because {rows[0]['because']}.",
    ]
    if against:
        figures = [(row, name) for row in against for name in row["figures"]]
        inside = sum(
            row["figures"][name][1] <= row["measured"][name] <= row["figures"][name][2] for row, name in figures
        )
        errors = sorted(abs(row["figures"][name][0] / row["measured"][name] - 1) for row, name in figures)
        text += [
            "",
            "## Against recordings",
            "",
            f"The same cost model on the traffic that {gpu} recorded in the suite. {inside} of {len(figures)} figures "
            f"lie in their wide 90 % bands; half are off by {100 * errors[len(errors) // 2]:.0f} % or more, the worst "
            f"by {100 * errors[-1]:.0f} %. The runs were recorded on {about['recorded']}, "
            "before the prediction, and taught nothing.",
            "",
            table_of(against),
        ]
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--against", type=Path, metavar="DIR", help="directory with the recordings of a suite's run")
    parser.add_argument("--commit", default="unknown", help="commit to state")
    parser.add_argument("--write", type=Path, help="page to write, with its data beside it; by default it is printed")
    given = parser.parse_args()
    about = {
        "gpu": given.gpu,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": given.commit,
        "cost_model": identity(given.gpu),
    }
    rows = list(predictions(given.gpu))
    against = list(comparisons(given.against, given.gpu)) if given.against else []
    if given.against:
        about["recorded"] = load(given.against)["environment"]["date"]
    written = page(rows, against, about)
    if given.write is None:
        print(written, end="")
        return 0
    given.write.write_text(written, encoding="utf-8")
    data = {"about": about, "predicted": rows, "against": against}
    given.write.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
