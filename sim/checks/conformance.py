"""The conformance check: does our scheduler decide exactly as vLLM's or SGLang's did?

An oracle recording holds a workload, a linear cost, and the decisions of an engine's scheduler on a virtual clock. Our
simulator must reproduce the tokens of each request in every step, every preemption, and every time to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokentwin.sim.checks.oracle_recording import OracleRecording, RecordedConnector, read_oracle_recording
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink


@dataclass(frozen=True)
class Conformance:
    """How much of a recording was reproduced. `difference` describes the first difference, empty if there is none."""

    name: str
    identical_steps: int
    steps: int
    identical_requests: int
    requests: int
    difference: str

    @property
    def identical(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        head = (
            f"{self.name}: steps {self.identical_steps}/{self.steps} requests {self.identical_requests}/{self.requests}"
        )
        return f"{head} identical" if self.identical else f"{head} DIFFERENT\n{self.difference}"


def conform(path: str | Path, policy: str | None = None) -> Conformance:
    """Replay the recording at `path` with `policy`, or with that of the recorded engine.

    Raises UserError if it is not an oracle recording or has unknown fields.
    """
    recording = read_oracle_recording(Path(path), policy)
    steps, results = _simulate(recording)
    engine = recording.engine
    same_steps, difference = _compare(engine, steps, recording.steps)
    wanted = recording.results
    differing = [id for id in sorted(wanted.keys() | results.keys()) if wanted.get(id) != results.get(id)]
    if differing and not difference:
        difference = _difference(engine, f"request {differing[0]}", results.get(differing[0]), wanted.get(differing[0]))
    same_requests = len(wanted.keys() - set(differing))
    return Conformance(recording.name, same_steps, len(recording.steps), same_requests, len(wanted), difference)


def _simulate(recording: OracleRecording) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Simulate the recording's workload; return steps and results in the format of the recording."""
    workload, sink = recording.workload, TableSink()
    cluster = Cluster(recording.deployment, recording.cost, sink, shares_prefixes=workload.shares_prefixes, tokens=True)
    hits: dict[int, int] = {}
    if (outside := recording.outside) is not None:
        cluster.connect(lambda clock, replica: RecordedConnector(clock, replica, outside, hits))
    encodes = recording.deployment.scheduler.max_num_encoder_input_tokens is not None
    encoded: list[dict[str, list[int]]] = []
    if encodes:
        cluster.replicas[0].on_planned = lambda plan, _: encoded.append(
            {str(id): items for id, items in plan.encoded.items()}
        )
    cluster.run(workload)
    steps = []
    for number, row in enumerate(sink.steps.to_pylist()):
        step = {
            "t": row["plan_ns"],
            "dt": row["end_ns"] - row["start_ns"],
            "n": {str(id): n for id, n in zip(row["row_ids"], row["row_tokens"], strict=True)},
            "pre": sorted(str(id) for id in row["preempted_ids"]),
        }
        if recording.deployment.scheduler.async_scheduling or recording.deployment.pipeline_parallel_size > 1:
            step["s"] = row["start_ns"]
        if encodes:
            step["enc"] = encoded[number]
        if row["end_ns"] <= recording.ends_ns:
            steps.append(step)
    results = {}
    for row in sink.requests.to_pylist():
        id = row["request_id"]
        result = {
            "id": id,
            "first_token_ns": row["first_token_ns"],
            "finish_ns": row["end_ns"],  # vLLM also ends requests whose clients hang up
            "prefix_hit_tokens": row["prefix_hit_tokens"] if outside is None else hits.get(id, 0),
            "tokens": row["output_tokens"],
        }
        results[id] = {name: result[name] for name in recording.results.get(id, result)}
    return steps, results


def _compare(engine: str, ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, str]:
    """Return the number of equal leading steps, and a description of the first difference; empty if there is none."""
    same = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return same, _difference(engine, f"step {same}", mine, other)
        same += 1
    if len(ours) != len(theirs):
        mine = ours[same] if same < len(ours) else None
        other = theirs[same] if same < len(theirs) else None
        return same, _difference(engine, f"step {same}", mine, other)
    return same, ""


def _difference(engine: str, what: str, ours: Any, theirs: Any) -> str:
    return f"  first difference at {what}\n    ours: {_line(ours)}\n    {engine}: {_line(theirs)}"


def _line(side: Any) -> str:
    return "nothing" if side is None else json.dumps(side)
