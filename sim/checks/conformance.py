"""The conformance check: does our scheduler decide exactly as vLLM's or SGLang's did?

An oracle recording holds a workload, a linear cost, and the decisions of an engine's scheduler on a virtual clock. Our
simulator must reproduce the rows of every step in their order, with tokens, drafts and encoded items, every preemption,
every end with its reason, and every time to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokentwin.serving.policies.drafts import Drafts
from tokentwin.serving.request import Request
from tokentwin.serving.speculative import Acceptance
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.checks.oracle_recording import OracleRecording, RecordedConnector, read_oracle_recording
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink


@dataclass(frozen=True)
class Conformance:
    """How much of a recording was reproduced.

    Attributes:
        difference: the first difference, with both sides; empty if there is none
        not_compared: names of columns that are not known here
    """

    name: str
    feature: str
    identical_steps: int
    steps: int
    identical_requests: int
    requests: int
    difference: str
    not_compared: Collection[str] = ()

    @property
    def identical(self) -> bool:
        return not self.difference


@dataclass(frozen=True)
class FeatureResult:
    """The results of the recordings of one feature.

    Attributes:
        decided: comparison of each recording
        remarks: what else there is to say
    """

    feature: str
    decided: Sequence[Conformance]
    remarks: Sequence[str] = ()

    @property
    def identical(self) -> int:
        return sum(result.identical for result in self.decided)

    def _sum(self, count: str) -> int:
        return sum(getattr(result, count) for result in self.decided)

    def __str__(self) -> str:
        """Return a line."""
        counts = [
            f"recordings {self.identical}/{len(self.decided)} identical",
            *(f"{what} {self._sum(f'identical_{what}')}/{self._sum(what)}" for what in ("steps", "requests")),
        ]
        unknown = sorted({name for result in self.decided for name in result.not_compared})
        remarks = [*self.remarks, *([f"not compared: {', '.join(unknown)}"] if unknown else [])]
        return "; ".join([f"{self.feature}: {', '.join(counts)}", *remarks])

    def differences(self) -> Iterator[str]:
        for result in self.decided:
            if not result.identical:
                yield f"{result.name} DIFFERS\n{result.difference}"


def by_feature(results: Iterable[Conformance]) -> list[FeatureResult]:
    """Return the results by feature, in the order in which features first appear."""
    features: dict[str, list[Conformance]] = {}
    for result in results:
        features.setdefault(result.feature, []).append(result)
    return [FeatureResult(feature, decided) for feature, decided in features.items()]


def lines(features: Sequence[FeatureResult]) -> Iterator[str]:
    """Yield a line for each feature, a total, and each difference with both sides; nothing if there is no feature."""
    if not features:
        return
    yield from map(str, features)
    yield str(FeatureResult("total", [result for feature in features for result in feature.decided]))
    for feature in features:
        yield from feature.differences()


def conform(path: str | Path, policy: str | None = None) -> Conformance:
    """Replay the recording at `path` with `policy`, or with that of the recorded engine.

    Raises UserError if it is not an oracle recording, or has fields of unknown effect.
    """
    recording = read_oracle_recording(Path(path), policy)
    steps, results = _simulate(recording)
    engine = recording.engine
    same_steps, difference = _compare(engine, steps, recording.steps)
    wanted = recording.results
    differing = [id for id in sorted(wanted.keys() | results.keys()) if wanted.get(id) != results.get(id)]
    if differing and not difference:
        difference = _difference(engine, f"request {differing[0]}", results.get(differing[0]), wanted.get(differing[0]))
    return Conformance(
        recording.name,
        recording.feature,
        same_steps,
        len(recording.steps),
        len(wanted.keys() - set(differing)),
        len(wanted),
        difference,
        recording.not_compared,
    )


class _Verdicts:
    """An `Acceptance` that notes what each step sampled for requests with accepted drafts, by its number and their ids.

    Tokens beyond the end of an answer count if `beyond`.
    """

    def __init__(self, acceptance: Acceptance, beyond: bool) -> None:
        self._acceptance = acceptance
        self._beyond = beyond
        self.tokens: dict[int, dict[str, int]] = {}

    def proposed(self, request: Request, step: int) -> int:
        return self._acceptance.proposed(request, step)

    def accepted(self, request: Request, step: int, drafts: int) -> int:
        accepted = self._acceptance.accepted(request, step, drafts)
        tokens = 1 + accepted if self._beyond else min(1 + accepted, request.true_len - request.known)
        if tokens > 1:
            self.tokens.setdefault(step, {})[str(request.id)] = tokens
        return accepted


def _simulate(recording: OracleRecording) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Simulate the recording's workload; return steps and results in the format of the recording."""
    workload, sink = recording.workload, TableSink()
    cluster = Cluster(recording.deployment, recording.cost, sink, shares_prefixes=workload.shares_prefixes, tokens=True)
    hits: dict[int, int] = {}
    if (outside := recording.outside) is not None:
        cluster.connect(lambda clock, replica: RecordedConnector(clock, replica, outside, hits))
    plans: dict[int, dict[str, Any]] = {}
    replica = cluster.replicas[0]
    replica.on_planned = lambda plan, _: plans.update({plan.seq: _columns(plan)})
    verdicts = None
    if isinstance(drafts := getattr(replica.scheduler, "drafts", None), Drafts):
        beyond = all("tokens" in result for result in recording.results.values())  # older ones lack both
        drafts.acceptance = verdicts = _Verdicts(drafts.acceptance, beyond)
    cluster.run(workload)
    rows = {row["request_id"]: row for row in sink.requests.to_pylist()}
    steps = []
    for row in sink.steps.to_pylist():
        ids = [str(id) for id in row["row_ids"]]
        step = {
            "t": row["plan_ns"],
            "dt": row["end_ns"] - row["start_ns"],
            "n": dict(zip(ids, row["row_tokens"], strict=True)),
            "pre": sorted(str(id) for id in row["preempted_ids"]),
            "s": row["start_ns"],
            **plans[row["step"]],
            "got": verdicts.tokens.get(row["step"], {}) if verdicts else {},
            "waste": [str(id) for id in row["row_ids"] if rows[id]["end_ns"] < row["end_ns"]],
        }
        if row["end_ns"] <= recording.ends_ns:
            steps.append({name: value for name, value in step.items() if name in recording.columns})
    results = {}
    for request in workload.requests:
        row = rows[request.id]
        result = {
            "id": request.id,
            "first_token_ns": row["first_token_ns"],
            "finish_ns": row["end_ns"],  # vLLM also ends requests whose clients hang up
            "prefix_hit_tokens": row["prefix_hit_tokens"] if outside is None else hits.get(request.id, 0),
            "tokens": row["output_tokens"],
            "finish": _finish(recording.engine, request, row),
        }
        results[request.id] = {name: result[name] for name in recording.results.get(request.id, result)}
    return steps, results


def _columns(plan: StepPlan) -> dict[str, Any]:
    """Return the columns of a step that our own recordings lack."""
    return {
        "enc": {str(id): items for id, items in plan.encoded.items()},
        "drafts": {str(row.request.id): row.drafts for row in plan.listed if row.drafts},
    }


def _finish(engine: str, request: WorkloadRequest, row: Mapping[str, Any]) -> str:
    """Return the reason why a request ended, in the words of `engine`.

    An answer with stated `max_tokens` ends with a stop token. If it is also the last that is allowed, SGLang reports
    the length.
    """
    if row["status"] != "finished":
        return "abort" if row["status"] == "cancelled" else str(row["status"])
    tokens, most = row["output_tokens"], request.max_tokens
    stops = most is not None and tokens == request.output_len and (engine == "vLLM" or tokens < most)
    return "stop" if stops else "length"


def _compare(engine: str, ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, str]:
    """Return the number of equal leading steps, and a description of the first difference; empty if there is none."""
    for number, (mine, other) in enumerate(zip_longest(ours, theirs)):
        if mine != other or list(mine["n"]) != list(other["n"]):  # the order of rows, too
            return number, _difference(engine, f"step {number}", mine, other)
    return len(theirs), ""


def _difference(engine: str, what: str, ours: Any, theirs: Any) -> str:
    return f"  first difference at {what}\n    ours: {_line(ours)}\n    {engine}: {_line(theirs)}"


def _line(side: Any) -> str:
    return "nothing" if side is None else json.dumps(side)
