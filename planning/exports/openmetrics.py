"""The text of vLLM's `/metrics` at the end of a recorded run, in the OpenMetrics format.

The metric registry gives the Prometheus names. The buckets are vLLM's, so dashboards and alerts written for vLLM work
on a simulated fleet. The label `engine` is the replica; the label `job` is `sim` for a simulated run and `real` for a
real one. Data that the recording does not have are left out.

Format: https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.planning.exports.recorded_run import RecordedRun
from tokentwin.planning.exports.vllm_buckets import REQUEST_S, STEP_TOKENS, TOKEN_S, TTFT_S, one_two_five
from tokentwin.serving.metrics import metric
from tokentwin.traces.distributions import LONGEST
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

JOB = {"virtual": "sim", "wall": "real"}

_BUCKETS: Mapping[str, tuple[float, ...]] = {
    "ttft_ms": TTFT_S,
    "tpot_ms": TOKEN_S,
    "itl_ms": TOKEN_S,
    "e2e_ms": REQUEST_S,
    "queue_ms": REQUEST_S,
    "prefill_ms": REQUEST_S,
    "decode_ms": REQUEST_S,
    "batch_tokens": STEP_TOKENS,
}
_LENGTHS = {
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "output_tokens",
    "vllm:request_max_num_generation_tokens": "output_tokens",  # largest of a prompt's answers; there is one answer
}
# A trace gives the length of an answer, so a finished answer has the reason `length`. An unfinished request has no
# reason yet, and a rejected request never reached the engine.
_REASONS = {
    "stop": (),
    "length": ("finished",),
    "abort": ("timed_out", "cancelled", "aborted"),
    "error": (),
    "repetition": (),
}
_GAUGES = ("running", "waiting", "kv_usage")
_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "input_throughput": ("prompt_tokens",),
    "output_throughput": ("output_tokens",),
    "prefix_hit_rate": ("prefix_hit_tokens", "prompt_tokens"),
    "preemptions": ("preemptions",),
}
_DRAFTED: Mapping[str, tuple[str, ...]] = {
    "acceptance_length": ("drafts",),
    "draft_acceptance_rate": ("accepted_tokens",),
    "rejected_draft_tokens": ("draft_tokens",),
}
_TIERED: Mapping[str, tuple[str, ...]] = {"tier_hit_rate": ("tier_hit_tokens", "prompt_tokens")}
# fmt: off
_REQUEST_COLUMNS = [
    "replica", "status", "prompt_tokens", "output_tokens", "arrival_ns", "send_ns", "scheduled_ns", "first_token_ns",
    "finish_ns", "prefix_hit_tokens", "preemptions", "preempted_ns", "token_times_ns",
    "drafts", "draft_tokens", "accepted_tokens", "tier_hit_tokens",
]
_STEP_COLUMNS = [
    "replica", "step", "start_ns", "end_ns", "prefill_tokens", "decode_rows", "running", "waiting", "used_blocks",
]
# fmt: on


def write_openmetrics(source: RecordedRun, out: IO[bytes]) -> None:
    """Write the metrics of every replica, then `# EOF`."""
    recording = source.recording
    deployment = json.loads(recording.run["deployment"] or "{}")
    engines = _engines(recording, deployment.get("model") or "unknown")
    longest = (deployment.get("scheduler") or {}).get("max_model_len")
    for lines in _families(engines, longest if type(longest) is int and 0 < longest <= LONGEST else 131_072):
        out.write("".join(f"{line}\n" for line in lines).encode())
    out.write(b"# EOF\n")


class _Engine:
    """One replica: its labels, its requests, and its metrics."""

    def __init__(self, labels: str, requests: pa.Table, metrics: RunMetrics) -> None:
        self.labels, self.requests, self.metrics = labels, requests, metrics

    def sum(self, name: str) -> int:
        """Return the sum of a column over the requests that the replica began to serve; all values of a map count."""
        served = self.requests.filter(pc.is_valid(self.requests["scheduled_ns"]))[name]
        if pa.types.is_map(served.type):
            return sum(count for row in served.to_pylist() for _, count in row or ())
        return int(pc.sum(served).as_py() or 0)

    def keeps(self, name: str) -> bool:
        """Return True if the column has a value for any of its requests."""
        column = self.requests[name]
        return column.null_count < len(column)

    def values(self, name: str) -> NDArray[Any]:
        """Return the values of a distribution as vLLM observes them.

        The tokens that one step generates, such as accepted drafts, have one gap between them and the step before.
        """
        values = self.metrics.values(name)
        return values[values > 0] if name == "itl_ms" else values

    def inference_ms(self) -> NDArray[Any]:
        """Return the time of each finished request from its first step to its last token."""
        return self.metrics.values("prefill_ms") + self.metrics.values("decode_ms")

    def ended(self, reason: str) -> int:
        """Return the number of its requests that ended for `reason`, one of vLLM's finish reasons."""
        counts = self.metrics.statuses()
        return sum(counts.get(status, 0) for status in _REASONS[reason])

    def lengths(self, name: str) -> NDArray[Any]:
        """Return the values of a column for the requests that finished."""
        return self.requests[name].to_numpy()[self.metrics.finished]

    def last(self, name: str) -> float | None:
        """Return the value of a step metric in the last step."""
        values = self.metrics.values(name)
        return None if not len(values) or values[-1] != values[-1] else float(values[-1])


def _engines(recording: Recording, model: str) -> list[_Engine]:
    """Return the replicas, sorted by number.

    Each table is sorted once and then cut by replica, so a thousand replicas take no longer than one.
    """
    run = recording.run
    requests = recording.table("requests", _REQUEST_COLUMNS).sort_by("replica")
    steps = recording.table("steps", _STEP_COLUMNS).sort_by([("replica", "ascending"), ("step", "ascending")])
    numbers = sorted({*requests["replica"].unique().to_pylist(), *steps["replica"].unique().to_pylist()} - {None})
    cuts = [np.searchsorted(t["replica"].drop_null().to_numpy(), [*numbers, np.inf]) for t in (requests, steps)]
    engines = []
    for at, number in enumerate(numbers):
        mine, done = (
            table.slice(cut[at], cut[at + 1] - cut[at]) for table, cut in zip((requests, steps), cuts, strict=True)
        )
        labels = {"job": JOB.get(run["clock"], "unknown"), "model_name": model, "engine": number}
        shown = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
        engines.append(_Engine(shown, mine, RunMetrics(mine, done, {**run, "replica_lives": None, "replicas": 1})))
    return engines


def _families(engines: list[_Engine], longest: int) -> Iterator[list[str]]:
    """Yield the lines of each metric family: its description, and its samples."""
    for name, bounds in _BUCKETS.items():
        known, per_unit = metric(name), 1e3 if metric(name).unit == "ms" else 1.0
        values = [e.values(name) / per_unit for e in engines]
        yield _histogram(known.prometheus[0], f"{known.label}: {known.definition}", bounds, engines, values)
    inference = [e.inference_ms() / 1e3 for e in engines]
    meaning = "prefill and decode of a finished request"
    yield _histogram("vllm:request_inference_time_seconds", meaning, REQUEST_S, engines, inference)
    for prometheus, column in _LENGTHS.items():
        meaning = f"{column.replace('_', ' ')} of a finished request"
        yield _histogram(prometheus, meaning, one_two_five(longest), engines, [e.lengths(column) for e in engines])
    for name in _GAUGES:
        known = metric(name)
        samples = [(e.labels, e.last(name)) for e in engines]
        yield _family(known.prometheus[0], "gauge", f"{known.label} in the last step: {known.definition}", samples)
    drafted, tiered = any(e.sum("drafts") for e in engines), any(e.keeps("tier_hit_tokens") for e in engines)
    counters = {**_COUNTERS, **(_TIERED if tiered else {}), **(_DRAFTED if drafted else {})}
    for name, columns in counters.items():
        known = metric(name)
        for prometheus, column in zip(known.prometheus, columns, strict=True):
            counts = [(e.labels, float(e.sum(column))) for e in engines]
            yield _family(prometheus.removesuffix("_total"), "counter", f"{column.replace('_', ' ')}, summed", counts)
    ended = [(f'{e.labels},finished_reason="{reason}"', float(e.ended(reason))) for e in engines for reason in _REASONS]
    yield _family("vllm:request_success", "counter", "requests by the reason for which they ended", ended)


def _family(name: str, kind: str, meaning: str, samples: Sequence[tuple[str, float | None]]) -> list[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    suffix = "_total" if kind == "counter" else ""
    lines = [f"{name}{suffix}{{{labels}}} {float(value)!r}" for labels, value in known]
    return [*_described(name, kind, meaning), *lines] if known else []


def _histogram(
    name: str,
    meaning: str,
    bounds: tuple[float, ...],
    engines: list[_Engine],
    values: list[NDArray[Any]],
) -> list[str]:
    """Return lines with the cumulative counts at or below each bound; empty if no engine has such values."""
    if not any(map(len, values)):
        return []
    lines = []
    for engine, raw in zip(engines, values, strict=True):
        known = np.sort(raw[~np.isnan(raw)])
        counts = [*np.searchsorted(known, bounds, side="right").tolist(), len(known)]
        edges = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        lines += [
            f'{name}_bucket{{{engine.labels},le="{le}"}} {count}' for le, count in zip(edges, counts, strict=True)
        ]
        lines.append(f"{name}_count{{{engine.labels}}} {len(known)}")
        lines.append(f"{name}_sum{{{engine.labels}}} {float(known.sum())!r}")
    return [*_described(name, "histogram", meaning), *lines]


def _described(name: str, kind: str, meaning: str) -> list[str]:
    unit = [f"# UNIT {name} seconds"] if name.endswith("_seconds") else []
    return [f"# TYPE {name} {kind}", *unit, f"# HELP {name} {_escaped(meaning)}."]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
