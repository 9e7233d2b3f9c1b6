"""The page `lab/results/energy.md`: predicted power and energy against published measurements.

`python -m lab.energy.page > lab/results/energy.md` takes some minutes, because it simulates runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lab.energy.published import PublishedRun, fit, modelled, published_runs, shares
from lab.energy.simulated import limited_runs, predict, predict_limited
from tokentwin.planning.energy import energy_factors, power_factors
from tokentwin.serving.answers.figures import shown_number, shown_share
from tokentwin.serving.answers.markdown import markdown_table
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.traces.metrics.power import FITTED

_SIMULATED = (32, 128, 512)  # values of max_num_seqs of which a run is simulated
_PREFACE = """# Power and energy against published measurements

```
python -m lab.energy.page > lab/results/energy.md
```
The command compares [the power model](../../docs/energy.md) with published measurements, and writes this page.

Measured: GPU power and output tokens per second of the [ML.ENERGY Benchmark](https://ml.energy/leaderboard) (Chung et
al., NeurIPS Datasets and Benchmarks 2025): `v3` with vLLM 0.11.1 on H100 and B200, and `v2` with vLLM 0.5.4 on A100-40G
and H100.

Not published: lengths of prompts. We take 100 tokens for `v2`, as in its file of prompts, and for `v3` 200 for GPQA and
500 for chats, which fits the measured throughputs best.
"""


def main() -> None:
    print("\n".join(_lines()))


def _lines() -> Iterator[str]:
    runs = published_runs()
    used = np.array([run.used for run in runs])
    yield _PREFACE
    yield "## Power from measured utilisation"
    yield (
        "Utilisation comes from measured throughputs, so predicted step times play no part. Left out of the fit is "
        "nothing, the model (as for another model on such a GPU), or the GPU (as for another generation).\n"
    )
    yield markdown_table(*_power_table(runs, used))
    yield "\nCoefficients that fit best, rounded in [the code](../../traces/metrics/power.py):\n"
    yield markdown_table(*_coefficients(runs))
    yield "\n## Power and energy per token, predicted"
    yield (
        "Step times, throughput, power and energy of runs of `v3` at three batch sizes, from the catalogue and the "
        "kernel tables. Runs of `v2` are left out: their host was the bottleneck, and no run of vLLM 0.5.4 has taught "
        "the simulator.\n"
    )
    yield from _predictions([run for run in runs if run.source == "v3"])
    yield "\n## Power limits"
    source = "https://github.com/Light-Heart-Labs/MMBT-Messy-Model-Bench-Tests"
    yield f"vLLM on an RTX PRO 6000 with weights in int4 and answers of 200 tokens ([source]({source}), April 2026)."
    yield "Throughput is relative to that at 600 W.\n"
    yield markdown_table(*_limits_table())


def _errors(measured: NDArray[np.float64], predicted: NDArray[np.float64]) -> tuple[str, str, str]:
    """Return the median error without and with its sign, and the range of 90 % of the measured over the predicted."""
    ratio = measured / predicted
    low, high = np.quantile(ratio, (0.05, 0.95))
    bias = 100 * (np.median(1 / ratio) - 1)
    return f"{100 * np.median(np.abs(1 / ratio - 1)):.0f} %", f"{bias:+.0f} %", f"{low:.2f}–{high:.2f}"


def _power_table(runs: Sequence[PublishedRun], used: NDArray[np.float64]) -> tuple[list[str], list[list[str]]]:
    measured, models, gpus = shares(runs), _column(runs, "model"), _column(runs, "gpu")
    own, left_model, left_gpu = (np.empty(len(runs)) for _ in range(3))
    for gpu in dict.fromkeys(gpus.tolist()):
        chosen = gpus == gpu
        own[chosen] = modelled(used[chosen], FITTED[find_gpu(gpu).generation])
        left_gpu[chosen] = modelled(used[chosen], fit([run for run in runs if run.gpu != gpu]))
        for model in dict.fromkeys(models[chosen].tolist()):
            one = chosen & (models == model)
            left_model[one] = modelled(used[one], fit([run for run in runs if run.gpu == gpu and run.model != model]))
    rows = []
    for name in [*dict.fromkeys(gpus.tolist()), "all"]:
        chosen = (gpus == name) | (name == "all")
        errors = (_errors(measured[chosen], predicted[chosen]) for predicted in (own, left_model, left_gpu))
        rows.append([name, f"{chosen.sum()}", *(text for error, _, band in errors for text in (error, band))])
    parts = ("fitted", "model left out", "GPU left out")
    heads = (f"{part}: {what}" for part in parts for what in ("median error", "90 % of measured / predicted"))
    return ["GPU", "runs", *heads], rows


def _column(runs: Sequence[PublishedRun], name: str) -> NDArray[np.str_]:
    return np.array([getattr(run, name) for run in runs])


def _coefficients(runs: Sequence[PublishedRun]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for gpu in [*dict.fromkeys(run.gpu for run in runs), "all"]:
        own = fit([run for run in runs if gpu in (run.gpu, "all")])
        rows.append([gpu, *(f"{share:.2f}" for share in own)])
    return ["GPU", "while a step runs", "at full bandwidth", "at the 16-bit peak rate"], rows


def _predictions(runs: Sequence[PublishedRun]) -> Iterator[str]:
    chosen = [run for run in runs if run.max_num_seqs in _SIMULATED]
    rows, watts, joules = [], [], []
    within = [0, 0]
    for run in chosen:
        found = predict(run)
        watts.append(run.power_w / found.power_w)
        joules.append(run.joules_per_token / found.joules_per_token)
        for at, (ratio, (low, high)) in enumerate(
            ((watts[-1], power_factors(run.spec)), (joules[-1], energy_factors(run.spec)))
        ):
            within[at] += low <= ratio <= high
        rows.append(
            [
                f"{run.model} {run.task}",
                f"{run.gpus} x {run.gpu} {run.source}",
                f"{run.batch:.0f}",
                *(shown_number(value) for value in (run.power_w, found.power_w)),
                *(shown_number(value) for value in (run.tokens_per_s, found.tokens_per_s)),
                *(shown_number(value) for value in (run.joules_per_token, found.joules_per_token)),
            ]
        )
    for name, ratios, inside in zip(("power", "energy per token"), (watts, joules), within, strict=True):
        values = np.array(ratios)
        error, bias, band = _errors(values, np.ones(len(values)))
        yield (
            f"- **{name}**: median error {error}, bias {bias}; 90 % of measured / predicted lie in {band}. "
            f"{shown_share(inside / len(values))} of {len(values)} runs lie in the 90 % interval that answers state."
        )
    yield ""
    header = ["model", "GPUs", "batch", "W", "predicted", "tok/s", "predicted", "J/token", "predicted"]
    yield markdown_table(header, rows)


def _limits_table() -> tuple[list[str], list[list[str]]]:
    rows = []
    for (model, in_flight), group in groupby(limited_runs(), key=lambda run: (run.model, run.concurrency)):
        runs = list(group)
        found = [predict_limited(run) for run in runs]
        for run, one in zip(runs, found, strict=True):
            rows.append(
                [
                    model,
                    f"{in_flight}",
                    f"{run.limit_w:.0f}",
                    f"{run.tokens_per_s / runs[0].tokens_per_s:.2f}",
                    f"{one.tokens_per_s / found[0].tokens_per_s:.2f}",
                    f"{run.power_w:.0f}",
                    f"{one.power_w:.0f}",
                ]
            )
    return ["model", "in flight", "limit (W)", "throughput", "predicted", "W", "predicted"], rows


if __name__ == "__main__":
    main()
