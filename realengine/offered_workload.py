"""A workload as clients offer it to a real engine, whichever engine that is: what is sent, when, and in which tokens.

Nothing here needs torch, so that vLLM's own process can use it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from realengine.segment_tokens import SegmentTokens, quotes
from serving.clients import Clients
from serving.workload import Workload, WorkloadRequest
from traces.parquet import write_parquet
from traces.recording import RecordingWriter


@dataclass(frozen=True)
class Replayed:
    """How a replay went: `status` is `complete` or `interrupted`; canaries are medians before and after."""

    status: str
    requests: int
    finished: int
    duration_ns: int
    canary_before_ns: int
    canary_after_ns: int


def at_once(workload: Workload) -> Workload:
    """The same requests, all offered at the start: saturation."""
    return replace(workload, requests=[replace(request, arrival_ns=0) for request in workload.requests])


class ReplayTexts:
    """Token ids of the requests of a workload: of their prompts, and those that their outputs are forced to.

    With drafts none are, because a draft is right or wrong by what the model says. Later turns quote what was
    said; of an answer that has not ended yet nobody knows that, so they quote other tokens, under a name of their own.
    """

    def __init__(self, workload: Workload, vocab_size: int, forces: bool) -> None:
        self._workload = workload
        self._tokens = SegmentTokens(vocab_size)
        self._forces = forces
        self._made = {request.id: self._make(request) for request in workload.requests}
        self._unlike: dict[int, WorkloadRequest] = {}  # as sent: they quote what was not said

    def _make(self, request: WorkloadRequest) -> tuple[list[int], list[int] | None]:
        return self._tokens.prompt(request), self._tokens.output(request) if self._forces else None

    def sent(self, request: WorkloadRequest) -> WorkloadRequest:
        """`request` as it is sent now: with its own names for what it quotes and nobody has said."""
        prompt = request.prompt if self._forces else self._tokens.quotable(request.prompt)
        if prompt == request.prompt:
            return request
        self._unlike[request.id] = sent = replace(request, prompt=prompt)
        return sent

    def of(self, sent: WorkloadRequest) -> tuple[list[int], list[int] | None]:
        """The ids of its prompt, and of its output, if that is forced; to be asked once."""
        made = self._made.pop(sent.id)
        return made if self._forces or not quotes(sent.prompt) else self._make(sent)

    def said(self, id: int, output: list[int]) -> None:
        """What the output of request `id` was, which was not forced."""
        self._tokens.note_output(id, output)

    def keep_sent(self, writer: RecordingWriter) -> None:
        """Where prompts were not those of the workload, the recording's workload has the ones that were sent."""
        if self._unlike:
            requests = self._workload.requests
            sent = [replace(one, prompt=self._unlike.get(one.id, one).prompt) for one in requests]
            write_parquet(replace(self._workload, requests=sent), writer.workload_path)


class OfferedRequests:
    """What the clients of a workload do, and when: `Clients` that also hang up."""

    def __init__(self, workload: Workload) -> None:
        self._clients = Clients(workload)
        self._hang_ups: list[tuple[int, int]] = []  # a heap: when clients hang up on their requests, and those's ids

    @property
    def exhausted(self) -> bool:
        """Whether every request of the workload has been sent."""
        return self._clients.exhausted

    @property
    def next_ns(self) -> int | None:
        """When something comes that no answer brings about."""
        hang_up_ns = self._hang_ups[0][0] if self._hang_ups else None
        return min((ns for ns in (self._clients.next_ns, hang_up_ns) if ns is not None), default=None)

    def hang_ups(self, now_ns: int) -> Iterator[int]:
        """The requests on which clients hang up by now, answered or not."""
        while self._hang_ups and self._hang_ups[0][0] <= now_ns:
            yield heappop(self._hang_ups)[1]

    def arrivals(self, now_ns: int) -> Iterator[WorkloadRequest]:
        """The requests that are due by now."""
        while (next_ns := self._clients.next_ns) is not None and next_ns <= now_ns:
            arrived = self._clients.pop()
            if (leaves_ns := arrived.leaves_ns) is not None:
                heappush(self._hang_ups, (leaves_ns, arrived.id))
            yield arrived

    def ended(self, request: WorkloadRequest, now_ns: int) -> None:
        """`request` has left, answered or not."""
        self._clients.ended(request, now_ns)
