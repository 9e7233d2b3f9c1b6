"""Rung 0: does our scheduler decide exactly as vLLM's did?

An oracle recording holds a workload, a linear cost, and what vLLM's own scheduler decided on a virtual clock. The
same workload through our simulator must give every step's tokens per request, every preemption, and every
time, identical to the nanosecond.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.cost_model import TokenCost
from serving.deployments.config import Deployment, SchedulerConfig, parse
from serving.errors import UserError, reason
from serving.workload import Workload, WorkloadRequest, shares_prefixes
from sim.cluster import Cluster
from sim.run_log import TableSink


@dataclass(frozen=True)
class Conformance:
    """How much of a recording was reproduced; `difference` is the first that was not, or empty."""

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


def conform(path: str | Path, policy: str = "vllm") -> Conformance:
    """Replay the recording at `path`. Raises UserError if it is not an oracle recording."""
    recording = _read(Path(path))
    try:
        config = recording["config"]
        if drafts := config.get("speculative"):  # what drafting takes is of no concern here
            drafting: dict[str, Any] = {"model": "any"} if drafts.get("method") == "draft_model" else {"draft_us": 0}
            config = {**config, "speculative": {"method": "ngram", **drafting, **drafts}}
        scheduler = parse(SchedulerConfig, config, where="config")
        cost = TokenCost(**recording["cost"])
        workload = _workload(recording["requests"])
        wanted = {result["id"]: result for result in recording["results"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("recording", str(path), f"is not an oracle recording: {error!r}") from None
    empty = [key for key in ("requests", "steps", "results") if not recording[key] or type(recording[key]) is not list]
    if empty:
        raise UserError("recording", str(path), f"is not an oracle recording: it has no {', '.join(empty)}")
    steps, results = _simulate(Deployment(policy=policy, scheduler=scheduler), cost, workload)
    told = _told(recording)
    same_steps, difference = _compare("step", steps, told)
    differing = [id for id in sorted(wanted.keys() | results.keys()) if wanted.get(id) != results.get(id)]
    if differing and not difference:
        difference = _difference(f"request {differing[0]}", results.get(differing[0]), wanted.get(differing[0]))
    name = recording.get("name") or Path(path).name.split(".")[0]
    same_requests = len(wanted.keys() - set(differing))
    return Conformance(name, same_steps, len(told), same_requests, len(wanted), difference)


def _simulate(deployment: Deployment, cost: TokenCost, workload: Workload) -> tuple[list[Any], dict[int, Any]]:
    """Steps and results in the words of the recording."""
    overlapped = deployment.scheduler.async_scheduling
    sink = TableSink()
    cluster = Cluster(deployment, cost, sink, shares_prefixes=workload.shares_prefixes, tokens=True)
    cluster.run(workload)
    steps = []
    for row in sink.steps.to_pylist():
        step = {
            "t": row["plan_ns"],
            "dt": row["end_ns"] - row["start_ns"],
            "n": {str(id): n for id, n in zip(row["row_ids"], row["row_tokens"], strict=True)},
            "pre": sorted(str(id) for id in row["preempted_ids"]),
        }
        steps.append({**step, "s": row["start_ns"]} if overlapped else step)
    results = {
        row["request_id"]: {
            "id": row["request_id"],
            "first_token_ns": row["first_token_ns"],
            "finish_ns": row["finish_ns"],
            "prefix_hit_tokens": row["prefix_hit_tokens"],
        }
        for row in sink.requests.to_pylist()
    }
    return steps, results


def _told(recording: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a recording, without the drafts in their rows and how many were accepted: `n` and the steps that
    follow depend on both. Of those preempted only the set counts. A plan that preempts and schedules nothing is no
    step of ours. In the overlapped loop the last step may be for nobody, since the one before it accepted more drafts
    than it had to; nothing of ours goes on then.
    """
    end_ns = max(result["finish_ns"] for result in recording["results"])
    return [
        {**{name: value for name, value in step.items() if name not in ("drafts", "got")}, "pre": sorted(step["pre"])}
        for step in recording["steps"]
        if step["n"] and step.get("s", step["t"]) < end_ns
    ]


def _workload(rows: Sequence[Mapping[str, Any]]) -> Workload:
    requests = [
        WorkloadRequest(
            id=row["id"],
            arrival_ns=row["arrival_ns"],
            prompt=tuple((segment, tokens) for segment, tokens in row["prompt"]),
            output_len=row["output_len"],
            priority=row.get("priority", 0),
        )
        for row in rows
    ]
    requests.sort(key=lambda request: (request.arrival_ns, request.id))
    return Workload(requests, shares_prefixes=shares_prefixes(requests))


def _compare(what: str, ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, str]:
    """How many leading items are the same, and the first that differs, with both sides."""
    same = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return same, _difference(f"{what} {same}", mine, other)
        same += 1
    if len(ours) != len(theirs):
        mine = ours[same] if same < len(ours) else None
        other = theirs[same] if same < len(theirs) else None
        return same, _difference(f"{what} {same}", mine, other)
    return same, ""


def _difference(what: str, ours: Any, theirs: Any) -> str:
    return f"  first difference at {what}\n    ours: {_line(ours)}\n    vLLM: {_line(theirs)}"


def _line(side: Any) -> str:
    return "nothing" if side is None else json.dumps(side)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError("recording", str(path), f"cannot be read: {reason(error)}") from None
    try:
        recording = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise UserError("recording", str(path), f"must be JSON, plain or gzipped: {error}") from None
    missing = [
        key
        for key in ("config", "cost", "requests", "steps", "results")
        if not isinstance(recording, dict) or key not in recording
    ]
    if missing:
        raise UserError("recording", str(path), f"is not an oracle recording: it has no {', '.join(missing)}")
    return dict(recording)
