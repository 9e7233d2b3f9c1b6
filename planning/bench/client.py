"""A client that sends each request of a workload when it is due, however slow the server is, and records the answers.

Both clocks use the same clients (`tokentwin.serving.clients`). Times count from the moment when a request is due, so
they include the delays of a slow server and of a late client (no coordinated omission). `send_ns` says how late the
client was.

A server does not know the segments of a workload's prompts, so equal segments become equal token ids, or equal words.
A prompt that quotes the answer to another request quotes the part of it that the server actually sent, so that the
server's prefix cache can hit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from uuid import uuid4

import aiohttp

from tokentwin.planning.bench.answer_stream import Answered, Events, refusal
from tokentwin.planning.bench.connections import Connections, Exchange
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.planning.bench.server import Server, meet
from tokentwin.realengine.offered_workload import SegmentTokens, named_segments, quotes
from tokentwin.realengine.undisturbed import ctrl_c_heard, no_cycle_search
from tokentwin.serving.clients import Clients
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, STOPPED, Workload, WorkloadRequest
from tokentwin.traces.live_recording import LiveRecording, Place

_OUT = "out:"
# Common words; each, with a space before it, is one token in most vocabularies.
_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through back years where much your way well down should because "
    "each just those people how too little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come since against go "
    "came right used take three"
)
_WORDS = _COMMON.split()


def quoted(requests: Iterable[WorkloadRequest]) -> set[int]:
    """Return the ids of the requests whose answers other prompts quote."""
    names = {name for request in requests for name, _ in request.prompt if name.startswith(_OUT)}
    return {int(name.removeprefix(_OUT)) for name in names if name.removeprefix(_OUT).isdigit()}


class TokenPrompts:
    """Prompts of token ids, with exactly the workload's lengths."""

    def __init__(self, tokens: SegmentTokens, quoted: set[int]) -> None:
        self._tokens = tokens
        self._quoted = quoted
        self._answers: dict[str, list[int]] = {}

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        """Return the field of a request's body that holds its prompt, `prompt`."""
        ids = []
        for name, count in named_segments(request):
            said = self._answers.get(name, [])[:count]
            ids += said + self._tokens.segment(name, count)[len(said) :]
        return {"prompt": ids}

    def answered(self, request: WorkloadRequest, text: str, tokens: list[int]) -> None:
        """Keep the answer to `request`; `tokens` is empty if the server does not give them."""
        if request.id in self._quoted:
            self._answers[f"{_OUT}{request.id}"] = tokens


class ChatPrompts:
    """Conversations with about the workload's lengths, one word for each token; the chat template adds some tokens."""

    def __init__(self, quoted: set[int], salt: str = "") -> None:
        self._tokens = SegmentTokens(len(_WORDS), salt=salt)
        self._quoted = quoted
        self._answers: dict[str, str] = {}

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        """Return the field `messages`: quoted answers are the assistant's, and all other text is the user's."""
        messages = []
        for is_answer, group in groupby(named_segments(request), key=lambda segment: segment[0].startswith(_OUT)):
            text = " ".join(self._text(*segment) for segment in group)
            messages.append({"role": "assistant" if is_answer else "user", "content": text})
        return {"messages": messages}

    def _text(self, name: str, count: int) -> str:
        said = self._answers.get(name)
        return said or " ".join(_WORDS[token] for token in self._tokens.segment(name, count))

    def answered(self, request: WorkloadRequest, text: str, tokens: list[int]) -> None:
        if request.id in self._quoted:
            self._answers[f"{_OUT}{request.id}"] = text


Prompts = TokenPrompts | ChatPrompts


_SPIN_NS = 1_500_000  # the event loop sleeps by the millisecond: closer than this it only polls
_AHEAD_NS = 1_000_000_000  # a connection is made at most this long before its request
_LONGEST_SLEEP_S = 0.1  # after that, look whether Ctrl-C was pressed


def bench(
    workload: Workload,
    target: BenchTarget,
    out: str | Path,
    *,
    model: str | None = None,
    deployment: Deployment | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], None] = lambda ended: None,
) -> str:
    """Send `workload` to `target`, write the recording `out`, and return `complete`, or `interrupted` after Ctrl-C.

    `model` is the name to ask for, and `deployment` is the deployment that the server is assumed to have; both may be
    None. `progress` is called with the number of requests that have ended. Raises UserError if there is no such server.
    """
    offered = replace(workload, requests=list(workload.requests))
    run = {
        "run_id": Path(out).name,
        "clock": "wall",
        "workload": workload.name,
        "deployment": "" if deployment is None else deployment.model_dump_json(),
        "replicas": 1,
        "seed": 0,
        "calibration": "",
    }

    def recorded(about: Mapping[str, Any]) -> LiveRecording:
        recording = Place(str(out), overwrite).open({**run, "hardware": json.dumps(about)}, offered)
        assert recording is not None
        return recording

    with ctrl_c_heard() as stopped, asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(_send(offered, target, model, recorded, f"{uuid4().hex[:12]}-", stopped, say, progress))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _send(
    workload: Workload,
    target: BenchTarget,
    model: str | None,
    recorded: Callable[[Mapping[str, Any]], LiveRecording],
    prefix: str,
    stopped: Callable[[], bool],
    say: Callable[[str], None],
    progress: Callable[[int], None],
) -> str:
    # The prefix of a run's request ids also changes its tokens, so no run hits another run's prompts in the server's
    # prefix cache.
    answers = quoted(workload.requests)
    prompts: Prompts
    if target.endpoint == "chat":
        prompts = ChatPrompts(answers, salt=prefix)
    else:
        prompts = TokenPrompts(SegmentTokens(target.vocab_size, target.first_token, salt=prefix), answers)
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key.get_secret_value()}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        shortest = WorkloadRequest(-1, 0, ((PRIVATE, 1),), 1)
        server = await meet(session, target, model, prompts.body(shortest), say)
    with closing(Connections(server.url, headers)) as connections, no_cycle_search():
        sender = _Sender(connections, server, prompts, target, prefix, progress)
        sender.prepare(workload)
        sender.recording = recording = recorded(server.about)
        status = "interrupted"
        try:
            await sender.run(workload, stopped)
            if not (stopped() and sender.unsent):
                status = "complete"
            if not recording.goes_on:
                raise UserError("recording", workload.name, "could not be written to its end; see the line before")
        finally:
            recording.close(status=status, notes=sender.notes(sender.counted))
    return status


class _Sender:
    """A sender of requests whose ids begin with `prefix`.

    Attributes:
        recording: the recording of what it sends
        counted: True if every chunk gave its number of tokens
        unsent: True if the sender was stopped before all requests were answered
    """

    def __init__(
        self,
        connections: Connections,
        server: Server,
        prompts: Prompts,
        target: BenchTarget,
        prefix: str,
        progress: Callable[[int], None],
    ) -> None:
        self.server = server
        self.recording: LiveRecording
        self.counted = True
        self.unsent = False
        self.origin_ns = 0
        self._connections = connections
        self._prompts = prompts
        self._target = target
        self._prefix = prefix
        self._progress = progress
        self._ended = 0
        self._requests: dict[int, bytes] = {}

    def _now(self) -> int:
        return perf_counter_ns() - self.origin_ns

    def prepare(self, workload: Workload) -> None:
        """Make the requests before the clock starts, so that none waits while another's prompt is made."""
        self._requests = {one.id: self._request(one) for one in workload.requests if not quotes(one.prompt)}

    def notes(self, counted: bool) -> str:
        """Return the notes of the recording; `counted` says whether every chunk gave its number of tokens."""
        seen = {"endpoint": self._target.endpoint, "origin_ns": self.origin_ns, "chunks_counted": counted}
        return json.dumps({"client": seen})

    async def run(self, workload: Workload, stopped: Callable[[], bool]) -> None:
        """Send all requests, and wait for all answers."""
        clients, under_way = Clients(workload), set[asyncio.Task[None]]()
        ended = asyncio.Event()

        def left(task: asyncio.Task[None]) -> None:
            under_way.discard(task)
            ended.set()

        self.origin_ns = perf_counter_ns()
        self.recording.add_run(notes=self.notes(counted=False))
        while (under_way or not clients.exhausted) and not stopped():
            while (next_ns := clients.next_ns) is not None and next_ns <= self._now():
                task = self._start(clients, clients.pop())
                task.add_done_callback(left)
                under_way.add(task)
            ended.clear()
            wait_ns = _LONGEST_SLEEP_S * 1e9 if next_ns is None else next_ns - self._now() - _SPIN_NS
            if wait_ns > 0:
                if next_ns is not None and wait_ns < _AHEAD_NS:
                    self._connections.prepare()
                await _wait(ended, min(wait_ns / 1e9, _LONGEST_SLEEP_S))
            else:
                await asyncio.sleep(0)
        self.unsent = bool(under_way) or not clients.exhausted
        for task in list(under_way):
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _request(self, request: WorkloadRequest) -> bytes:
        if request.items:
            remedy = "cannot be sent, because a trace has no pictures; leave them out of the trace"
            raise UserError(f"request {request.id}: items", len(request.items), remedy)
        wanted = {**self.server.fields, **self._prompts.body(request), "max_tokens": request.output_len}
        if request.priority:
            wanted["priority"] = request.priority
        if request.tenant:
            wanted["user"] = request.tenant
        if request.adapter:
            wanted["model"] = request.adapter  # vLLM serves each adapter as a model of its name
        body = json.dumps(wanted, separators=(",", ":")).encode()
        return self._connections.request(body, f"{self._prefix}{request.id}")

    def _start(self, clients: Clients, request: WorkloadRequest) -> asyncio.Task[None]:
        """Send one request, and return the task that waits for its answer."""
        data = self._requests.pop(request.id, None) or self._request(request)
        answer, events, send_ns = Answered(), Events(), self._now()

        def take(data: bytes, at_ns: int) -> None:
            for document in events.push(data):
                answer.take(document, at_ns - self.origin_ns)

        exchange = self._connections.send(data, take)
        self.recording.arrived(request)
        return asyncio.create_task(self._visit(clients, request, answer, send_ns, exchange))

    async def _visit(
        self, clients: Clients, request: WorkloadRequest, answer: Answered, send_ns: int, exchange: Exchange
    ) -> None:
        """Wait for the answer to a request, and add its row."""
        status, reason = "unfinished", ""
        patience_s = self._target.timeout_s
        if (leaves_ns := request.leaves_ns) is not None:
            patience_s = min(patience_s, max(leaves_ns - send_ns, 0) / 1e9)
        try:
            async with asyncio.timeout(patience_s):
                status, reason = await self._answered(exchange, answer)
        except TimeoutError:
            status, reason = "timed_out", f"no complete answer within {self._target.timeout_s:g} s"
            if patience_s < self._target.timeout_s:
                status, reason = "cancelled", "its client hung up"
                if request.stop_ns is not None and answer.times_ns:
                    status, reason = "finished", STOPPED
        finally:
            self._note(request, answer, send_ns, status, reason)
            clients.ended(request, self._now())
            self._ended += 1
            self._progress(self._ended)

    async def _answered(self, exchange: Exchange, answer: Answered) -> tuple[str, str]:
        """Return the status of the request, and the reason for any status other than `finished`."""
        try:
            with closing(exchange):
                response = await exchange.end()
        except OSError as error:
            if answer.times_ns:
                return "cancelled", f"the stream was cut: {error}"
            return "rejected", f"no connection: {error}"
        except ValueError as error:
            return "cancelled", f"the stream cannot be read: {error}"
        if not response.ok:
            return _refused(response.status), f"{response.status} {refusal(response.body)}"
        if answer.error:
            return "cancelled", f"the server ended the stream: {answer.error}"
        if not answer.ended:
            return "cancelled", "the stream was cut"
        if not answer.times_ns:
            return "cancelled", "the answer has no tokens"
        return "finished", ""

    def _note(self, request: WorkloadRequest, answer: Answered, send_ns: int, status: str, reason: str) -> None:
        times = list(answer.times_ns)
        done = status == "finished"
        self.counted = self.counted and answer.counted
        if done:
            self._prompts.answered(request, answer.text, answer.tokens)
        tokens = answer.output_tokens if done and answer.output_tokens is not None else len(times)
        self.recording.add_request(
            {
                **request.labels,
                "status": status,
                "reason": reason,
                "prompt_tokens": answer.prompt_tokens or request.prompt_len,
                "output_tokens": tokens,
                "arrival_ns": request.arrival_ns,
                "send_ns": send_ns,
                "first_token_ns": times[0] if times else None,
                "finish_ns": times[-1] if done else None,
                "prefix_hit_tokens": answer.cached_tokens,
                "token_times_ns": times,
                "end_ns": self._now(),
                "client_id": f"{self._prefix}{request.id}",
            }
        )


def _refused(status: int) -> str:
    """Return the recorded status of a request that got no answer, from the HTTP status of the response."""
    return "timed_out" if status in (408, 504) else "rejected"


async def _wait(event: asyncio.Event, most_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await event.wait()
