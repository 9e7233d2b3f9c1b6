"""The API process's end of the connection to the engine process; an answer is an iterator over its outputs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from time import monotonic_ns

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from tokentwin.apiserver.exposition import Distribution
from tokentwin.apiserver.families import LATENESS_S
from tokentwin.apiserver.messages import (
    Abort,
    About,
    Add,
    Alive,
    Asked,
    Delivered,
    Drain,
    Follow,
    Hello,
    Late,
    Output,
    Outputs,
    Plant,
    Pulse,
    Reply,
    Rest,
    Scrape,
    Show,
    To,
    encode,
    read_answer,
)
from tokentwin.apiserver.openai_api.refusal import Refusal

_LAST_WORDS_S = 0.1
_ASK_S = 5.0
_LATE_S = 1.0  # interval at which this process reports `lateness` to the engine process, and asks whether it runs
_STOPPED_S = 6.0  # time without an answer after which the engine process is taken for stopped


class EngineClient:
    """A client of the engine process at `address`; `about` describes the served model, or is None without an engine.

    `lateness` is the distribution, since the last report, of the delays in seconds with which tokens were sent to
    clients. `asked` counts the HTTP requests since then, by method, path and kind of status. `parsed` counts how often
    text was read for tool calls, by mode, outcome and type of the request.
    """

    def __init__(self, address: str, identity: str) -> None:
        self.about: About | None = None
        self.drains = False
        self.served = asyncio.Event()  # set when the first `About` of an engine has come
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._answers: dict[int, Answer] = {}
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._next = 0
        self._well = True
        self._unanswered = 0  # pulses since the last answer
        self.lateness = Distribution(LATENESS_S)
        self.stalled_ns = 0  # time for which a twin's run has paused
        self.asked: Counter[tuple[str, str, str]] = Counter()
        self.parsed: Counter[tuple[str, str, str]] = Counter()

    def start(self) -> list[asyncio.Task[None]]:
        """Start the tasks that read and send messages; they end when they are cancelled."""
        return [asyncio.create_task(task) for task in (self._listen(), self._watch(), self._tell())]

    def open(self, asked: Add) -> Answer:
        """Set the id of a request and send it to the engine process. Raises Refusal while no engine takes requests."""
        self.replica(asked.place)
        if self.drains:
            raise Refusal(503, "the server takes no requests now; try again soon", retry_after_s=1)
        asked.id = self._id()
        answer = self._answers[asked.id] = Answer(self, asked.id)
        self._send(asked)
        return answer

    def replica(self, place: int | None) -> int | None:
        """Return the index of the replica at `place`, or None if `place` is None.

        Raises Refusal while the replica or the engine process is down or stopped.
        """
        if self.about is None:
            raise Refusal(503, "the engine is not there yet; try again soon", retry_after_s=1)
        if not self._well or self._unanswered * _LATE_S > _STOPPED_S:
            raise Refusal(503, "the engine does not answer; its process may be stopped", retry_after_s=1)
        if place is None:
            return None
        if (replica := self.about.places[place]) < 0:
            raise Refusal(503, "the replica of this port has crashed", retry_after_s=1)
        return replica

    async def metrics(self, replica: int | None) -> bytes:
        """Return the metrics of one replica, or of all replicas if `replica` is None, in Prometheus' format.

        Raises Refusal without an answer in 5 s.
        """
        self._report()
        return await self._ask(Scrape(self._id(), replica))

    async def journey(self, name: str) -> bytes:
        """Return, as JSON, the trace of the request whose answer is called `name`; empty if it was not traced.

        Raises Refusal without an answer in 5 s.
        """
        return await self._ask(Follow(self._id(), name))

    async def failures(self, new: str = "") -> bytes:
        """Replace the failures of a twin's requests by `new` (JSON), if it is not empty; return the present ones.

        Raises Refusal without an answer in 5 s.
        """
        return await self._ask(Plant(self._id(), new))

    async def show(self, new: str = "") -> bytes:
        """Show the numbers `new` (JSON) as metrics, if it is not empty; return the present ones, or why it cannot be.

        Raises Refusal without an answer in 5 s.
        """
        return await self._ask(Show(self._id(), new))

    async def rest(self, within_s: float, level: int | None = None, aborts: bool = True, asks: bool = False) -> bool:
        """Let the server sleep at `level`, or wake up without one; return whether it sleeps when that is done.

        With `asks`, only return whether it sleeps. Raises Refusal without an answer in `within_s` seconds.
        """
        return await self._ask(Rest(self._id(), level, aborts, asks), within_s) == b"true"

    async def _ask(self, question: Scrape | Follow | Plant | Rest | Show, within_s: float = _ASK_S) -> bytes:
        self.replica(None)
        reply = self._replies[question.id] = asyncio.get_running_loop().create_future()
        self._send(question)
        try:
            return await asyncio.wait_for(reply, within_s)
        except TimeoutError:
            raise Refusal(503, "the engine process is too busy to answer", retry_after_s=1) from None
        finally:
            del self._replies[question.id]

    def _id(self) -> int:
        self._next += 1
        return self._next

    def _send(self, message: To) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)

    async def _listen(self) -> None:
        while True:
            message = read_answer(await self._socket.recv())
            match message:
                case Outputs():
                    self.stalled_ns = max(self.stalled_ns, message.stalled_ns)
                    for output in message.outputs:
                        if (answer := self._answers.get(output.id)) is not None:
                            answer.take(output, message.due_ns)
                case Reply() if (reply := self._replies.get(message.id)) is not None and not reply.done():
                    reply.set_result(message.text)
                case Alive():
                    self._well, self._unanswered = message.well, 0
                case About():
                    self._well, self._unanswered = True, 0
                    self.about, self.drains = message, self.drains and self.about is not None
                    self.stalled_ns = 0
                    self.served.set()
                case Drain():
                    self.drains = True
            await asyncio.sleep(0)  # reading a message that is there already lets nothing else run

    async def _watch(self) -> None:
        """Watch the connection; when the engine process has ended, end every open answer with an error."""
        while True:
            event = parse_monitor_message(await self._events.recv_multipart())["event"]
            if event == zmq.EVENT_CONNECTED:
                self._send(Hello())
            else:
                self.about, open_answers = None, list(self._answers.values())
                await asyncio.sleep(_LAST_WORDS_S)  # time to read the last messages of the process
                for answer in open_answers:
                    answer.take(Output(answer.id, [], finish="crashed", reason="the engine process has ended"), 0)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_LATE_S)
            self._report()
            if self.about is not None:
                self._unanswered += 1
                self._send(Pulse())

    def _report(self) -> None:
        if self.about is not None and any(self.lateness.counts):
            self._send(Late(self.lateness.counts, self.lateness.sum))
            self.lateness = Distribution(LATENESS_S)
        if self.about is not None and self.asked:
            asked, parsed = ([(*labels, n) for labels, n in counts.items()] for counts in (self.asked, self.parsed))
            self._send(Asked(asked, parsed))
            self.asked.clear()
            self.parsed.clear()

    def forget(self, id: int) -> None:
        """Drop request `id`, whose outputs are no longer needed."""
        self._answers.pop(id, None)


class Answer:
    """The outputs of one request. As a context manager, it aborts the request if its block raises an error."""

    def __init__(self, client: EngineClient, id: int) -> None:
        self.id = id
        self.ended = False
        self._client = client
        self._stalled_ns = client.stalled_ns  # before this request
        self._new: list[Output] = []
        self._due: list[tuple[int, int]] = []  # time at which tokens should have been sent, and their number
        self._waiter: asyncio.Future[None] | None = None

    def take(self, output: Output, due_ns: int) -> None:
        """Take an output that should be sent to the client at `due_ns`."""
        self._new.append(output)
        if output.tokens:
            self._due.append((due_ns, len(output.tokens)))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def stalled_ms(self) -> int:
        """The time in ms for which a twin's run has paused since the request, because its machine stalled."""
        return max(self._client.stalled_ns - self._stalled_ns, 0) // 1_000_000

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs; all outputs that came since the last one was yielded are merged into one."""
        while not self.ended:
            if not self._new:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            new, self._new = self._new, []
            output = new[0]
            for more in new[1:]:
                output.add(more)
            self.ended = bool(output.finish)
            yield output

    def stop(self) -> None:
        """Abort the request because a stop string has ended it."""
        if not self.ended:
            self._client._send(Abort(self.id, "stop"))
        self.ended = True

    def left(self, whole: bool = False) -> None:
        """Record the delay with which tokens were sent; for a `whole` answer only the last output counts."""
        now_ns = monotonic_ns()
        for due_ns, tokens in self._due[-1:] if whole else self._due:
            self._client.lateness.observe((now_ns - due_ns) / 1e9, tokens)
        self._due.clear()

    def delivered(self, first_text_ns: int, first_sent_ns: int, last_text_ns: int) -> None:
        """Report to the engine process that the last byte of the answer has been written."""
        self._client._send(Delivered(self.id, first_text_ns, first_sent_ns, last_text_ns, monotonic_ns()))

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._client.forget(self.id)
        if error is not None:
            gone = isinstance(error, asyncio.CancelledError | ConnectionError)
            self._client._send(Abort(self.id, "its client went away" if gone else f"it failed: {error}"))
