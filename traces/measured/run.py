"""A measured run: the offered workload and the observed figures.

A figure is a number of the run, such as `ttft_ms.mean`, `tpot_ms.p90`, `request_throughput` or `makespan_s`. Measured
and simulated runs have the same names of figures. A run with measurements of each request becomes a table with the
schema of a recording, so its figures are computed by the same code as those of a simulated run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest, prompt_of
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.schema import arrow_schema

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = ("request_throughput", "output_throughput")
KEEPS_UP = 0.95  # a run is saturated if its throughput is below this fraction of the offered rate


@dataclass(frozen=True)
class MeasuredRun:
    """A workload, and the figures that were measured when an engine served it.

    Attributes:
        figures: measured figures, with the names from the function `figures`
        settings: fields of the deployment that the measurement states; they override those of the case
        gpu: GPU that the measurement states; it overrides that of the case
        group: names and values by which runs are grouped in a report, such as the model or the concurrency
        floor_pct: range of each figure over repeats of the run, in percent of its mean; empty without repeats
        caution: doubts about the measurement that explain a part of prediction errors; empty if there are none
        engine: name and version of the engine (vllm, sglang, trtllm), if the measurement states it
        client: program that sent the requests, if the measurement states it
        skipped: reason why the run cannot be simulated; empty if it can
        most_workers: maximum number of prefill and of decode workers to try, if they are separate and their numbers are
            not stated; else 0
        by_client: True if a client measured the latencies, which then include HTTP, tokenising and the client itself
        or_workload: another workload that the client may have sent, if the measurement does not state which; TTFT then
            depends more on the workload than on the engine
        or_settings: other deployments that it may have been, if the measurement does not state which; `settings` are
            the first hypothesis
        offered_per_s: offered requests per second, if the client had a rate
        lengths: nominal prompt and output tokens, if they are about equal for all requests
    """

    name: str
    workload: Workload
    figures: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    gpu: str = ""
    group: Mapping[str, str] = field(default_factory=dict)
    floor_pct: Mapping[str, float] = field(default_factory=dict)
    caution: str = ""
    by_client: bool = False
    or_workload: Workload | None = None
    or_settings: Sequence[Mapping[str, Any]] = ()
    offered_per_s: float | None = None
    lengths: tuple[int, int] | None = None
    engine: str = ""
    client: str = ""
    skipped: str = ""
    most_workers: int = 0


class MeasuredFormat(Protocol):
    """A format of measured runs: a pydantic model with the fields that a case file states about the files."""

    def read(self, data: Path) -> list[MeasuredRun]:
        """Return the runs in the files under `data`. Raises UserError with the file and the field if one is invalid."""


@dataclass(frozen=True)
class Observed:
    """The measurements of one request; times are nanoseconds from the start of the run."""

    id: int
    prompt_tokens: int
    output_tokens: int
    arrival_ns: int
    first_token_ns: int
    finish_ns: int


def run_of_requests(
    name: str, observed: Sequence[Observed], slots: int | None, shared_prefix_tokens: int = 0, **fields: Any
) -> MeasuredRun:
    """Return a run from measurements of its requests; the prompts share their first `shared_prefix_tokens` tokens.

    `slots` is the concurrency of a closed loop. Such a client sends a request when an answer is complete, so its send
        times are not replayed. `slots` is None for a client that sends at given times. `fields` are further fields of
        `MeasuredRun`.
    """

    def sent(request: Observed) -> WorkloadRequest:
        shared = min(shared_prefix_tokens, request.prompt_tokens)
        prompt = prompt_of((f"prefix of {name}", shared), (PRIVATE, request.prompt_tokens - shared))
        return WorkloadRequest(request.id, 0 if slots else request.arrival_ns, prompt, request.output_tokens)

    workload = Workload(
        [sent(request) for request in observed], name=name, concurrency=slots, shares_prefixes=shared_prefix_tokens > 0
    )
    return MeasuredRun(name, workload, figures_of_requests(observed, fields.get("offered_per_s")), **fields)


def figures_of_requests(requests: Sequence[Observed], offered_per_s: float | None = None) -> dict[str, float]:
    """Return the figures of a run from measurements of its requests."""
    rows = [{**vars(request), "request_id": request.id, "status": "finished"} for request in requests]
    table = pa.Table.from_pylist(rows, schema=arrow_schema("requests"))
    return figures(RunMetrics(table), offered_per_s)


def figures(metrics: RunMetrics, offered_per_s: float | None = None) -> dict[str, float]:
    """Return all figures of a run: latencies in ms, rates per second, `makespan_s`, and `saturated` (1 or 0)."""
    values = {
        f"{name}.{statistic}": float(getattr(metrics.distribution(name), statistic))
        for name in LATENCIES
        for statistic in STATISTICS
    }
    scalars = metrics.scalars()
    values |= {name: scalars[name] for name in RATES if scalars[name] is not None}
    if metrics.window_s is not None:
        values["makespan_s"] = metrics.window_s
    if offered_per_s is not None and "request_throughput" in values:
        values["saturated"] = saturated(values["request_throughput"], offered_per_s)
    return {name: value for name, value in values.items() if not math.isnan(value)}


def saturated(per_s: float, offered_per_s: float) -> float:
    """Return 1 if the throughput is below the share `KEEPS_UP` of the offered rate, else 0."""
    return float(per_s < KEEPS_UP * offered_per_s)
