"""One measured run: the workload that was offered, and the figures that were observed.

A figure is a number of the run under one name on both clocks: `ttft_ms.mean`, `tpot_ms.p90`, `request_throughput`,
`makespan_s`. Runs measured request by request become a table with the schema of a recording, so that the same lines
compute the figures of the measured run and of the simulated one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from serving.workload import PRIVATE, Workload, WorkloadRequest, prompt_of
from traces.metrics.run_metrics import RunMetrics
from traces.schema import arrow_schema

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = ("request_throughput", "output_throughput")
KEEPS_UP = 0.95  # share of the offered rate below which a run is saturated


@dataclass(frozen=True)
class MeasuredRun:
    """A workload and what an engine made of it.

    Attributes:
        figures: what was observed, by the names that `figures` gives a simulated run
        settings: fields of the deployment that the measurement itself states; they override the case's
        gpu: the GPU that the measurement itself states, likewise
        group: what to report it under, when a file holds many runs: the model, the concurrency, ...
        floor_pct: how far repeats of the very same run are apart, in percent, by figure; where there are repeats
        caution: what a reader should know before blaming the prediction; empty when nothing
        engine: what served it, and its version, where the measurement says so: vllm, sglang, trtllm
        client: what sent the requests, where the measurement says so
        skipped: why it cannot be simulated; empty when it can
        most_workers: where prefill and decode are apart on workers that nobody counts: how many of a kind to try; else
            0
        by_client: the latencies are a client's: HTTP, tokenising and the client itself are in them
        or_workload: what the client may have sent instead, where nobody says: its TTFT then says little of the engine
        offered_per_s: requests per second the client meant to send, where it had a rate
        lengths: nominal prompt and output tokens, where all requests have about the same
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
    offered_per_s: float | None = None
    lengths: tuple[int, int] | None = None
    engine: str = ""
    client: str = ""
    skipped: str = ""
    most_workers: int = 0


class MeasuredFormat(Protocol):
    """A format of measured runs; its fields, a pydantic model's, are what a case file says about the files."""

    def read(self, data: Path) -> list[MeasuredRun]:
        """Return the runs in the files, which lie under `data`. Raises UserError that names the file and the field."""


@dataclass(frozen=True)
class Observed:
    """One request as it was measured; times in nanoseconds from the start of the run."""

    id: int
    prompt_tokens: int
    output_tokens: int
    arrival_ns: int
    first_token_ns: int
    finish_ns: int


def run_of_requests(
    name: str, observed: Sequence[Observed], slots: int | None, shared_prefix_tokens: int = 0, **fields: Any
) -> MeasuredRun:
    """Return a run measured request by request, whose prompts begin with as many tokens that they share.

    `slots` is the size of a closed loop: it sends when an answer is there, so that its times are not replayed. None is
    a client that sends by the clock. `fields` are further fields of `MeasuredRun`.
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
    """Return the figures of a run measured request by request."""
    rows = [{**vars(request), "request_id": request.id, "status": "finished"} for request in requests]
    table = pa.Table.from_pylist(rows, schema=arrow_schema("requests"))
    return figures(RunMetrics(table), offered_per_s)


def figures(metrics: RunMetrics, offered_per_s: float | None = None) -> dict[str, float]:
    """Every figure the run has: latencies in ms, rates per second, `makespan_s`, and `saturated` (1 or 0)."""
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
    """1 when fewer requests were completed per second than `KEEPS_UP` of the offered ones, else 0."""
    return float(per_s < KEEPS_UP * offered_per_s)
