"""A workload as clients send it to a real engine, ours or vLLM: requests, times and tokens.

Token j of segment s is a fixed random function of (s, j), so equal segment prefixes give equal tokens, as the workload
requires. The prompt of a later turn has the earlier answer as the segment `out:<id>`. So the replay forces the output
of request <id> to that segment's tokens (sampling still runs and is timed). If outputs cannot be forced, the replay
notes the actual output, and later turns quote this output.

Nothing here needs torch, so that vLLM can be recorded where torch is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

import numpy as np

from tokentwin.serving.clients import Clients
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.recording_writer import RecordingWriter

_OUT = "out:"


def quotes(prompt: tuple[Segment, ...]) -> bool:
    """Return whether the prompt contains output of another request."""
    return any(name.startswith(_OUT) for name, _ in prompt)


def named_segments(request: WorkloadRequest) -> list[Segment]:
    """Return the segments of a prompt; private segments get names that no other segment has."""
    return [
        (name if name != PRIVATE else f"\0{request.id}.{number}", count)
        for number, (name, count) in enumerate(request.prompt)
    ]


def adapters_of(requests: Iterable[WorkloadRequest]) -> list[str]:
    """Return the names of the LoRA adapters that `requests` have."""
    return sorted({request.adapter for request in requests} - {""})


class SegmentTokens:
    """Tokens `first` to `vocab_size - 1` for segments; `first` skips the special tokens that often come first.

    With another `salt` the same segments get other tokens.
    """

    def __init__(self, vocab_size: int, first: int = 0, salt: str = "") -> None:
        self._vocab_size = vocab_size
        self._first = first
        self._salt = salt
        self._outputs: dict[str, list[int]] = {}

    def prompt(self, request: WorkloadRequest) -> list[int]:
        """Return the token ids of the whole prompt."""
        tokens: list[int] = []
        for name, count in named_segments(request):
            tokens += self.segment(name, count)
        return tokens

    def output(self, request: WorkloadRequest) -> list[int]:
        """Return the token ids that the request's output is forced to."""
        return self.segment(f"{_OUT}{request.id}", request.output_len)

    def note_output(self, id: int, tokens: list[int]) -> None:
        """Note the output `tokens` of request `id`, which was not forced."""
        self._outputs[f"{_OUT}{id}"] = tokens

    def quotable(self, prompt: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return `prompt`, where outputs that are not noted yet have other names."""
        return tuple(
            (f"unsaid:{name}" if name.startswith(_OUT) and name not in self._outputs else name, count)
            for name, count in prompt
        )

    def segment(self, name: str, count: int) -> list[int]:
        """Return the first `count` tokens of a segment."""
        seed = int.from_bytes(blake2b(f"{self._salt}{name}".encode(), digest_size=8).digest(), "little")
        drawn = np.random.default_rng(seed).integers(self._first, self._vocab_size, count)
        noted = self._outputs.get(name, [])[:count]
        return noted + list(map(int, drawn[len(noted) :]))


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    `status` is `complete` or `interrupted`. The canaries are median times of a reference step before and after the
    replay.
    """

    status: str
    requests: int
    finished: int
    duration_ns: int
    canary_before_ns: int
    canary_after_ns: int


def at_once(workload: Workload) -> Workload:
    """Return a workload with the same requests, all of which arrive at the start and so saturate the engine."""
    return replace(workload, requests=[replace(request, arrival_ns=0) for request in workload.requests])


def refuse_items(workload: Workload) -> None:
    """Raise UserError if a request has images, videos or audio."""
    for request in workload.requests:
        if request.items:
            remedy = "need the simulator; the real engine reads text"
            raise UserError(f"request {request.id}: items", len(request.items), remedy)


class ReplayTexts:
    """The token ids of a workload's prompts, and of the outputs that its requests are forced to.

    With speculative decoding no output is forced, because the model's own output decides whether a draft is accepted.
    Later turns quote earlier answers. If such an answer has not ended yet, it is unknown, and the prompt has a segment
    with another name and other tokens instead.
    """

    def __init__(self, workload: Workload, vocab_size: int, forces: bool) -> None:
        self._workload = workload
        refuse_items(workload)
        self._tokens = SegmentTokens(vocab_size)
        self._forces = forces
        self._made = {request.id: self._make(request) for request in workload.requests}
        # by id, requests as they were sent, if their prompts do not quote the real answers
        self._unlike: dict[int, WorkloadRequest] = {}

    def _make(self, request: WorkloadRequest) -> tuple[list[int], list[int] | None]:
        return self._tokens.prompt(request), self._tokens.output(request) if self._forces else None

    def sent(self, request: WorkloadRequest) -> WorkloadRequest:
        """Return `request` as it is sent now; quotes of unknown answers get other segment names."""
        prompt = request.prompt if self._forces else self._tokens.quotable(request.prompt)
        if prompt == request.prompt:
            return request
        self._unlike[request.id] = sent = replace(request, prompt=prompt)
        return sent

    def tokens(self, sent: WorkloadRequest) -> tuple[list[int], list[int] | None]:
        """Return the token ids of the prompt, and of the output if forced; call this once for each request."""
        made = self._made.pop(sent.id)
        return made if self._forces or not quotes(sent.prompt) else self._make(sent)

    def said(self, id: int, output: list[int]) -> None:
        """Note the output of request `id`, which was not forced."""
        self._tokens.note_output(id, output)

    def keep_sent(self, writer: RecordingWriter) -> None:
        """If the prompts that were sent differ from the workload's, write them into the recording's workload."""
        if self._unlike:
            requests = self._workload.requests
            sent = [replace(one, prompt=self._unlike.get(one.id, one).prompt) for one in requests]
            write_parquet(replace(self._workload, requests=sent), writer.workload_path)


class OfferedRequests:
    """The actions of a workload's clients and their times: those of `Clients`, and hang-ups."""

    def __init__(self, workload: Workload) -> None:
        self._clients = Clients(workload)
        self._hang_ups: list[tuple[int, int]] = []  # a heap of (time at which a client hangs up, request id)

    @property
    def exhausted(self) -> bool:
        """True if every request of the workload has been sent."""
        return self._clients.exhausted

    @property
    def next_ns(self) -> int | None:
        """The time of the next arrival or hang-up that does not depend on an answer; None without one."""
        hang_up_ns = self._hang_ups[0][0] if self._hang_ups else None
        return min((ns for ns in (self._clients.next_ns, hang_up_ns) if ns is not None), default=None)

    def hang_ups(self, now_ns: int) -> Iterator[int]:
        """Yield the ids of requests whose clients hang up by `now_ns`, even if the request has already ended."""
        while self._hang_ups and self._hang_ups[0][0] <= now_ns:
            yield heappop(self._hang_ups)[1]

    def arrivals(self, now_ns: int) -> Iterator[WorkloadRequest]:
        """Yield the requests that are due by `now_ns`."""
        while (next_ns := self._clients.next_ns) is not None and next_ns <= now_ns:
            arrived = self._clients.pop()
            if (leaves_ns := arrived.leaves_ns) is not None:
                heappush(self._hang_ups, (leaves_ns, arrived.id))
            yield arrived

    def ended(self, request: WorkloadRequest, now_ns: int) -> None:
        """Note that `request` has ended, with or without an answer."""
        self._clients.ended(request, now_ns)


def run_columns(
    run_id: str,
    workload: Workload,
    deployment: Deployment,
    hardware: Mapping[str, str | int],
    num_blocks: int,
    seed: int,
) -> dict[str, Any]:
    """Return the columns of the dataset `runs` that are known before a replay on one engine with `num_blocks`."""
    return {
        "run_id": run_id,
        "clock": "wall",
        "workload": workload.name,
        "deployment": deployment.model_dump_json(),
        "replicas": 1,
        "seed": seed,
        "hardware": json.dumps(hardware),
        "calibration": "",
        "num_blocks": num_blocks,
        "block_size": deployment.scheduler.block_size,
    }
