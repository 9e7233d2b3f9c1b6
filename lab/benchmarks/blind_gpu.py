"""What tokentwin predicts for a GPU from other engines' runs only.

    python -m lab.benchmarks.blind_gpu --gpu H200 --commit COMMIT --write lab/results/gpu-blind.md
    python -m lab.benchmarks.blind_gpu --gpu H200 --against lab/results/gpu/h200

It simulates every scenario of the GPU suite as `tokentwin simulate --gpu` does, with bands, at the pace that it
predicts, and the decode steps, prompts and throughput that the suite measures of each engine. It writes a page and its
data (`.json` beside it). Nothing that our engine measured on a GPU is used: the cost model has the bundled kernel
tables and the runs of other engines. With `--against`, the scenarios are those that a GPU recorded, at the pace that it
had, and the predictions are compared with what the suite measured there. The H200's were recorded a day before the
predictions, and taught nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.benchmarks.gpu_twin import decode_plan, pace, suite_deployment
from lab.gpu_suite.engine_benchmark import usual_workload
from lab.gpu_suite.recorded_runs import scenarios, unpack
from lab.gpu_suite.results import load
from lab.gpu_suite.sizes import gpu_sizes
from tokentwin.calibration.steps.external_calibration import identity
from tokentwin.calibration.steps.observed import JudgedCost
from tokentwin.calibration.steps.surface_fit import known_model
from tokentwin.calibration.validation.bands import bands, run_metrics
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.planning.costs import priced
from tokentwin.serving.answers.markdown import markdown_table
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

ENGINES = ("large", "small", "mixture", "fp8", "int4")
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


def _at_once(lengths: Sequence[tuple[int, int]]) -> Workload:
    """Return requests of these prompt and output lengths that all arrive at 0 and share nothing."""
    return Workload([WorkloadRequest(n, 0, (("", prompt),), output) for n, (prompt, output) in enumerate(lengths)])


def engine_figures(gpu: str, which: str) -> Iterator[dict[str, Any]]:
    """Yield a row with its 90 % band for each figure that the suite measures of one of `ENGINES` on `gpu`.

    They are ms of a decode step, ms of a prompt alone, and output tokens/s of nano-vllm's workload, all at once.
    """
    sizes, deployment = gpu_sizes().benchmark, suite_deployment(gpu, which)
    known = priced(None, gpu, catalogued(deployment))
    usual = [(len(prompt), output) for prompt, output in usual_workload(sizes["requests"], sizes["longest"])]

    def decode_ms(rows: int, cost: JudgedCost) -> float:
        plan = decode_plan(rows, sizes["context"])
        return (cost.step_ns(plan) + cost.cpu_ns(plan)) / 1e6

    def prompt_ms(tokens: int, cost: JudgedCost) -> float:
        return float(run_metrics(_at_once([(tokens, 1)]), known.deployment, cost).distributions()["ttft_ms"].mean)

    def tokens_per_s(_: int, cost: JudgedCost) -> float:
        return float(run_metrics(_at_once(usual), known.deployment, cost).scalars()["output_throughput"])

    plans: list[tuple[str, Sequence[int], str, Callable[[int, JudgedCost], float]]] = [
        ("decode", sizes["decode_rows"], "ms", decode_ms),
        ("prefill", sorted(sizes["prefill_tokens"]), "ms", prompt_ms),
        ("throughput", [sizes["requests"]], "tokens/s", tokens_per_s),
    ]
    for kind, amounts, unit, figure in plans:
        for amount in amounts:
            cost = priced(None, gpu, catalogued(deployment)).cost  # its band is that of the steps that it has priced
            central = figure(amount, cost)
            ends = [figure(amount, end) for end in cost.ends()]
            trust = cost.trust()
            yield {
                "engine": which,
                "model": known.deployment.model,
                "weights": deployment.dtype if deployment.quantization == "none" else deployment.quantization,
                "kind": kind,
                "size": amount,
                "unit": unit,
                "figure": [central, min(central, *ends), max(central, *ends)],
                "trust": trust.level,
                "because": trust.reason,
            }


def measured_figure(results: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return what the suite measured of the figure in `row`, in its unit; None if it did not.

    Of several throughputs it is the first, at nano-vllm's temperature.
    """
    for one in results.get(f"engine_{row['engine']}", []):
        if one["kind"] == row["kind"] and "failed" not in one:
            if one["kind"] == "decode" and one["rows"] == row["size"]:
                return float(one["median_period_ns"]) / 1e6
            if one["kind"] == "prefill" and one["tokens"] == row["size"]:
                return float(one["median_ns"]) / 1e6
            if one["kind"] == "throughput":
                return float(one["output_tokens_per_s"])
    return None


def engines_table(rows: Sequence[dict[str, Any]], results: dict[str, Any]) -> str:
    """Return the figures of engines as a Markdown table, beside those that the suite measured."""
    of = {"decode": "decode step, batch {}, ms", "prefill": "prompt of {} tokens, ms"}
    cells = []
    for row in rows:
        value, low, high = row["figure"]
        real = measured_figure(results, row)
        off, inside = "-", "-"
        if real is not None:
            off, inside = f"{100 * (value / real - 1):+.0f} %", "yes" if low <= real <= high else "**no**"
        name = of.get(row["kind"], "output tokens/s of {} requests").format(f"{row['size']:,}")
        measured = "-" if real is None else f"{real:,.4g}"
        engine = f"{row['model']}, {row['weights']}"
        cells.append([engine, name, f"{value:,.4g}", f"{low:,.4g} to {high:,.4g}", measured, off, inside, row["trust"]])
    return markdown_table(["engine", "figure", "predicted", "band", "measured", "error", "in band", "trust"], cells)


def _verdict_on(engines: Sequence[dict[str, Any]], results: dict[str, Any]) -> str:
    pairs = [(row["figure"], real) for row in engines if (real := measured_figure(results, row)) is not None]
    if not pairs:
        return "None has been measured."
    errors = sorted(abs(value / real - 1) for (value, _, _), real in pairs)
    inside = sum(low <= real <= high for (_, low, high), real in pairs)
    return (
        f"Of {len(engines)} figures {len(pairs)} were measured, before the prediction. {inside} of them lie in their "
        f"band; half are off by {100 * errors[len(errors) // 2]:.0f} % or more, the worst by {100 * errors[-1]:.0f} %."
    )


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


def page(
    rows: Sequence[dict[str, Any]],
    engines: Sequence[dict[str, Any]],
    against: Sequence[dict[str, Any]],
    results: dict[str, Any],
    about: dict[str, str],
) -> str:
    """Return the page lab/results/gpu-blind.md; `about` has the day of the recordings if there are any.

    `rows` are the scenarios, `engines` the figures of engines, and `results` those of the suite, empty if not known.
    """
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
    text += [
        "",
        "## Engines of the suite",
        "",
        "What the suite measures of each engine: a decode step with 1,024 tokens of context for each request, a prompt "
        "alone, and the output tokens/s of nano-vllm's workload, all requests at once at temperature 0.6. "
        + _verdict_on(engines, results),
        "",
        engines_table(engines, results),
    ]
    untaught = dict.fromkeys(row["because"] for row in engines if row["trust"] == "extrapolated")
    text += ["", *(f"- Extrapolated: {why}" for why in untaught)]
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
    results = load(given.against) if given.against else {}
    rows = list(predictions(given.gpu))
    engines = [row for which in ENGINES for row in engine_figures(given.gpu, which)]
    against = list(comparisons(given.against, given.gpu)) if given.against else []
    if results:
        about["recorded"] = results["environment"]["date"]
    written = page(rows, engines, against, results, about)
    if given.write is None:
        print(written, end="")
        return 0
    given.write.write_text(written, encoding="utf-8")
    data = {"about": about, "predicted": rows, "engines": engines, "against": against}
    given.write.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
