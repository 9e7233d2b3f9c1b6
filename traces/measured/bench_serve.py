"""Results of `vllm bench serve --save-result`, with or without `--save-detailed`.

Detailed results have each request's prompt and output length, TTFT and gaps between tokens in seconds. Newer versions
also have the send times. Without these, arrivals are drawn as by the client: gamma-distributed gaps with the given
burstiness at the request rate, or all at time 0 if the rate is infinite. Without details every request has the mean
lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest, prompt_of
from tokentwin.traces.measured.json_file import MANY, JsonFile
from tokentwin.traces.measured.run import MeasuredRun, Observed, figures_of_requests

_LATENCIES = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "e2el_ms": "e2e_ms"}
_STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}

_LONGEST_S = 1e6  # maximum gap between tokens


class BenchServe(Settings):
    """Files with one run each. `shared_prefix_tokens` is `--random-prefix-len`; `seed` is for unsaved arrivals."""

    format: Literal["bench-serve"] = "bench-serve"
    files: tuple[str, ...] = Field(min_length=1)
    shared_prefix_tokens: int = Field(0, ge=0)
    seed: int = 0

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. A run has the name of its file. TTFT and E2E are the client's and include HTTP."""
        return [self._run(name, JsonFile(data / name)) for name in self.files]

    def _run(self, name: str, file: JsonFile) -> MeasuredRun:
        lengths, starts = _lengths(file), _starts(file)
        served = [i for i, (prompt, outputs) in enumerate(lengths) if prompt >= 1 and outputs >= 1]
        if not served:
            raise file.error("output_lens", [], "must hold at least one answered request")
        rate = _rate(file)
        burstiness = 1.0 if file.get("burstiness") is None else file.number("burstiness", 1e-3)
        arrivals = starts or _drawn(len(lengths), rate, burstiness, self.seed)
        first = min(arrivals[i] for i in served)
        offered = sorted((round(1e9 * (arrivals[i] - first)), i) for i in served)
        limit = file.get("max_concurrency")
        # a closed loop, whose send times follow from the answers and are not replayed
        closed = limit is not None and math.isinf(rate)
        requests = [
            WorkloadRequest(i, 0 if closed else at, self._prompt(lengths[i][0]), lengths[i][1]) for at, i in offered
        ]
        workload = Workload(
            requests,
            name=Path(name).stem,
            concurrency=None if limit is None else int(file.number("max_concurrency", 1, MANY)),
            shares_prefixes=self.shared_prefix_tokens > 0,
        )
        cautions = []
        if len(served) < len(lengths):
            cautions.append(f"{len(lengths) - len(served)} requests failed and are left out")
        if not starts and math.isfinite(rate):
            cautions.append("arrivals were not saved and are drawn again")
        offered_per_s = rate if math.isfinite(rate) and limit is None else None
        figures = {**_observed_figures(file, offered, lengths), **_stated_figures(file)}
        caution = "; ".join(cautions)
        return MeasuredRun(name, workload, figures, caution=caution, by_client=True, offered_per_s=offered_per_s)

    def _prompt(self, tokens: int) -> tuple[Segment, ...]:
        shared = min(self.shared_prefix_tokens, tokens)
        return prompt_of(("prefix", shared), (PRIVATE, tokens - shared))


def _lengths(file: JsonFile) -> list[tuple[int, int]]:
    """Return the prompt and output tokens of each request; (0, 0) if it failed."""
    if file.get("input_lens") is None:
        count = int(file.number("completed", 1, MANY))
        totals = file.number("total_input_tokens", 1), file.number("total_output_tokens", 1)
        prompt, outputs = (min(max(round(total / count), 1), MANY) for total in totals)
        return [(prompt, outputs)] * count
    prompts, outputs_of = (file.numbers(name, 0, MANY) for name in ("input_lens", "output_lens"))
    if len(prompts) != len(outputs_of):
        raise file.error("output_lens", f"{len(outputs_of)} lengths", f"must be {len(prompts)}, as in input_lens")
    return [(int(prompt), int(outputs)) for prompt, outputs in zip(prompts, outputs_of, strict=True)]


def _starts(file: JsonFile) -> list[float]:
    """Return the send time of each request in seconds; empty if the times were not saved."""
    if file.get("start_times") is None:
        return []
    starts = file.numbers("start_times")
    if len(starts) != len(file.get("input_lens") or starts):
        raise file.error("start_times", f"{len(starts)} times", "must have as many entries as input_lens")
    return starts


def _rate(file: JsonFile) -> float:
    rate: Any = file.get("request_rate")
    return math.inf if rate in (None, "inf") else file.number("request_rate", 1e-6)


def _drawn(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Draw arrival times with gamma-distributed gaps of mean 1 / `rate` and shape `burstiness` (1: Poisson process)."""
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def _observed_figures(
    file: JsonFile, offered: Sequence[tuple[int, int]], lengths: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """Return latency figures computed from the requests; empty without details."""
    if file.get("ttfts") is None or file.get("itls") is None:
        return {}
    ttfts, itls = file.numbers("ttfts", 0, _LONGEST_S), file.get("itls")
    if not isinstance(itls, list) or not len(ttfts) == len(itls) == len(lengths):
        raise file.error("itls", "other counts", f"must hold {len(lengths)} lists, as many as ttfts and input_lens")
    observed = []
    for at_ns, i in offered:
        first_ns = at_ns + round(1e9 * ttfts[i])
        last_ns = first_ns + round(1e9 * math.fsum(file.numbers(f"itls.{i}", 0, _LONGEST_S)))
        observed.append(Observed(i, *lengths[i], at_ns, first_ns, last_ns))
    figures = figures_of_requests(observed)
    return {name: value for name, value in figures.items() if name.split(".")[0] in _LATENCIES.values()}


def _stated_figures(file: JsonFile) -> dict[str, float]:
    """Return the figures that the client computed itself."""
    stated = {
        f"{ours}.{statistic}": file.number(f"{theirs_of}_{theirs}")
        for theirs, ours in _LATENCIES.items()
        for theirs_of, statistic in _STATISTICS.items()
        if file.get(f"{theirs_of}_{theirs}") is not None
    }
    for name in ("request_throughput", "output_throughput"):
        if file.get(name) is not None:
            stated[name] = file.number(name)
    if file.get("duration") is not None:
        stated["makespan_s"] = file.number("duration")
    return stated
