"""Answers to questions: the times of all tokens as the client saw them, and the same question on a simulated server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.planning.learn.questions import Question
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.recording import Recording

Times = NDArray[np.int64]
_STREAM = 20  # minimum number of tokens of an answer that counts steps
_SAME_STEP = 0.4  # time between two tokens of a step, in parts of the usual time between two steps
_PREEMPTED = 3.0  # waits for a token, in median ones, from which a request is taken to be preempted


class Counted(NamedTuple):
    """What the server itself counted during a question: steps that made tokens, and preemptions."""

    steps: int
    preemptions: int


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        sent_ns: time at which each finished request was sent, by id
        tokens_ns: times of the tokens of each finished request, by id
        unanswered: number of requests that did not finish
        counted: what the server's metrics counted; None if it has none
    """

    question: Question
    sent_ns: dict[int, int]
    tokens_ns: dict[int, Times]
    unanswered: int = 0
    counted: Counted | None = None

    @classmethod
    def from_requests(cls, question: Question, requests: pa.Table) -> Answer:
        """Return the answer in the dataset `requests` of a recording. Requests that did not finish are left out."""
        names = ["request_id", "status", "arrival_ns", "send_ns", "token_times_ns"]
        rows = requests.select(names).to_pylist()
        done = [row for row in rows if row["status"] == "finished" and row["token_times_ns"]]
        return cls(
            question,
            {row["request_id"]: row["arrival_ns"] if row["send_ns"] is None else row["send_ns"] for row in done},
            {row["request_id"]: np.array(row["token_times_ns"], dtype=np.int64) for row in done},
            len(rows) - len(done),
        )

    @classmethod
    def load(cls, question: Question, folder: Path) -> Answer:
        """Read the recording of the answer in `folder`. Raises UserError if there is none."""
        return cls.from_requests(question, Recording.load(folder).table("requests"))

    def only(self, ids: Collection[int]) -> Answer:
        """Return the answers to the requests `ids`."""
        wanted = [id for id in ids if id in self.tokens_ns]
        sent, tokens = {id: self.sent_ns[id] for id in wanted}, {id: self.tokens_ns[id] for id in wanted}
        return replace(self, sent_ns=sent, tokens_ns=tokens, counted=None)

    @cached_property
    def as_sent(self) -> Workload:
        """The answered requests; in an open loop they arrive when they were sent."""
        workload = self.question.workload
        requests = [request for request in workload.requests if request.id in self.tokens_ns]
        if workload.concurrency is None and all(request.think_ns is None for request in requests):
            requests = sorted((self._sent(request) for request in requests), key=lambda r: (r.arrival_ns, r.id))
        return replace(workload, requests=requests)

    def _sent(self, request: WorkloadRequest) -> WorkloadRequest:
        answered = len(self.tokens_ns[request.id])  # a server may end an answer early
        return replace(request, arrival_ns=self.sent_ns[request.id], output_len=answered)

    @cached_property
    def most_decoding(self) -> int:
        """The maximum number of requests that were between their first and their last token at the same time."""
        first = np.sort([times[0] for times in self.tokens_ns.values()])
        last = np.sort([times[-1] for times in self.tokens_ns.values()])
        events = np.concatenate([first, last])
        change = np.concatenate([np.ones(len(first)), -np.ones(len(last))])
        order = np.lexsort((change, events))  # at the same time, requests leave first
        return int(np.cumsum(change[order]).max()) if len(events) else 0

    @cached_property
    def most_tokens(self) -> int:
        """The maximum number of prompt and output tokens of requests that decoded at the same time.

        It is counted whenever a request is about to end. A request whose wait for its next token is much longer than
        that of the others was preempted, and does not count.
        """
        prompts = {request.id: request.prompt_len for request in self.question.workload.requests}
        most = 0
        for now in sorted(int(times[-2]) for times in self.tokens_ns.values() if len(times) > 1):
            waits, sizes = [], []
            for id, times in self.tokens_ns.items():
                made = int(np.searchsorted(times, now, "right"))
                if 0 < made < len(times):
                    waits.append(int(times[made] - times[made - 1]))
                    sizes.append(prompts[id] + made)
            if waits:
                usual = _PREEMPTED * float(np.median(waits))
                most = max(most, sum(size for wait, size in zip(waits, sizes, strict=True) if wait <= usual))
        return most

    @property
    def waited(self) -> bool:
        """True if a request got its first token only after another had ended."""
        first = max(int(times[0]) for times in self.tokens_ns.values())
        return first > min(int(times[-1]) for times in self.tokens_ns.values())


@dataclass(frozen=True)
class Simulated:
    """The same requests on a simulated server.

    Attributes:
        engine, clients: dataset `requests` as the engine and as clients see it
        steps: dataset `steps`
        delay_ns: time by which clients see all tokens later than `clients` states
    """

    engine: pa.Table
    clients: pa.Table
    steps: pa.Table
    delay_ns: int = 0

    @cached_property
    def of_each_engine(self) -> list[Simulated]:
        """This simulation, cut into its engines."""
        engines = sorted(set(self.engine["replica"].drop_null().to_pylist()))
        return [self] if len(engines) < 2 else [self._of(engine) for engine in engines]

    def _of(self, engine: int) -> Simulated:
        rows = self.engine.filter(pc.equal(self.engine["replica"], engine))
        clients = self.clients.filter(pc.is_in(self.clients["request_id"], rows["request_id"]))
        return Simulated(rows, clients, self.steps.filter(pc.equal(self.steps["replica"], engine)), self.delay_ns)

    @cached_property
    def counted(self) -> Counted:
        """The steps that make tokens, and the preemptions."""
        made = pc.sum(pc.greater(self.steps["sampled_rows"], 0)).as_py()
        return Counted(made or 0, pc.sum(self.engine["preemptions"]).as_py() or 0)

    @cached_property
    def sampled_ns(self) -> dict[int, Times]:
        """The times at which the engine had the tokens of each request, by id."""
        return _tokens(self.engine)

    @cached_property
    def tokens_ns(self) -> dict[int, Times]:
        """The times at which clients had the tokens of each request, by id."""
        return {id: times + self.delay_ns for id, times in _tokens(self.clients).items()}

    @cached_property
    def sent_ns(self) -> dict[int, int]:
        """The times at which clients sent each request, by id."""
        ids, arrivals = (self.clients[name].to_pylist() for name in ("request_id", "arrival_ns"))
        return dict(zip(ids, arrivals, strict=True))


def steps_until_first(sent_ns: dict[int, int], tokens_ns: dict[int, Times]) -> dict[int, int]:
    """Return how many steps end from when each request is sent until its first token, by id.

    They are counted by the tokens of the requests that decode all the while: fewest on the same engine, which is
    slowed. Requests that are sent while none decodes are left out.
    """
    streams = [times for times in tokens_ns.values() if len(times) > _STREAM]
    counts: dict[int, int] = {}
    for id, times in tokens_ns.items():
        sent, first = sent_ns[id], int(times[0])
        beside = []
        for stream in streams:
            if stream[0] < sent and first < stream[-1]:
                until = first + _SAME_STEP * float(np.median(np.diff(stream)))
                beside.append(int(np.searchsorted(stream, until, "right") - np.searchsorted(stream, sent, "right")))
        if beside:
            counts[id] = min(beside)
    return counts


def simulated(workload: Workload, deployment: Deployment, cost: CostModel, front_door: FrontDoor) -> Simulated:
    """Simulate the engines of `deployment` behind `front_door` that serves `workload`.

    A front door that only delays requests of an open loop is not simulated: the delay is the same for all of them.
    """
    front_door = front_door.model_copy(update={"learnt": False, "source": ""})  # rows of the engine are needed, too
    engine, clients = TableSink(), TableSink()
    through: dict[str, Any] = {"front_door": front_door, "clients": clients}
    delayed = front_door == FrontDoor(client_ns=front_door.client_ns, own_processes=front_door.own_processes)
    if delayed and workload.concurrency is None and all(one.think_ns is None for one in workload.requests):
        through = {}
    cluster = Cluster(deployment, cost, engine, shares_prefixes=workload.shares_prefixes, tokens=True, **through)
    cluster.run(workload)
    if not through:
        return Simulated(engine.requests, engine.requests, engine.steps, round(front_door.client_ns))
    return Simulated(engine.requests, clients.requests, engine.steps)


def _tokens(requests: pa.Table) -> dict[int, Times]:
    ids, tokens = (requests[name].to_pylist() for name in ("request_id", "token_times_ns"))
    return {id: np.array(times, dtype=np.int64) for id, times in zip(ids, tokens, strict=True) if times}
