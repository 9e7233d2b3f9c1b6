"""The real engine behind the exchange: one thread drives it, and sleeps while there is nothing to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Event, Thread
from time import perf_counter_ns
from typing import Any, NamedTuple

from apiserver.exchange import Exchange
from apiserver.kv_cache_events.feeds import EngineKvEvents
from apiserver.ledger import ForwardingLedger, Ledger
from apiserver.live_metrics import ReplicaNow, step_end
from apiserver.messages import About, Add
from apiserver.prompt_segments import Answer, PromptSegments
from realengine.engine import Engine
from realengine.logit_rules import Logprob
from realengine.loop import drive
from realengine.run_recorder import RunRecorder
from realengine.sampling import SamplingParams
from realengine.step import Step
from realengine.undisturbed import no_cycle_search
from serving.errors import UserError
from serving.request import Request, Status
from serving.step_plan import StepPlan
from serving.workload import STOPPED

_Call = Callable[[], None]


class RealEngine:
    """The backend of a real `Engine`, which runs on its own thread.

    That thread calls `wake` when `turn` has something to do. `turn` raises an error of the engine. The run began at
    `origin_ns` on the monotonic clock.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        about: Callable[[Engine], About],
        exchange: Exchange,
        wake: Callable[[], None],
        origin_ns: int,
        kv_events: EngineKvEvents | None = None,
    ) -> None:
        self.about: About
        self.engine: Engine
        self.ledger: Ledger | ForwardingLedger
        self._exchange = exchange
        self._wake = wake
        self._inbox: deque[_Call] = deque()
        self._outbox: deque[_Call] = deque()
        self._arrived = Condition()
        self._stopped = False
        self._failed: BaseException | None = None
        self._origin_ns = origin_ns
        self._kv_events = kv_events
        made = Event()
        self._thread = Thread(target=self._run, args=(load, about, made), name="engine")
        self._thread.start()
        made.wait()
        if self._failed is not None:
            raise self._failed

    def run_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns - self._origin_ns  # perf_counter_ns and monotonic_ns are one clock on Linux

    def monotonic_ns(self, run_ns: int) -> int:
        return run_ns + self._origin_ns

    def add(self, id: int, asked: Add) -> None:
        came_ns = self.run_ns(perf_counter_ns())  # the time until the loop takes the request is its queueing
        self._call(lambda: self._clients.add(id, asked, came_ns))

    def refusal(self, id: int, asked: Add) -> tuple[int, str] | None:
        return None

    def abort(self, id: int, why: str) -> None:
        self._call(lambda: self._clients.abort(id, why))

    def turn(self) -> float | None:
        if self._kv_events is not None:
            self._kv_events.replay()
        while self._outbox:
            self._outbox.popleft()()
        if self._failed is not None:
            raise self._failed
        return None

    def replicas(self) -> list[ReplicaNow]:
        engine = self.engine
        return [ReplicaNow(0, bool(engine.scheduler.requests), engine.scheduler.pool.total, engine.deployment)]

    def close(self) -> None:
        with self._arrived:
            self._stopped = True
            self._arrived.notify()
        self._thread.join()
        while self._outbox:
            self._outbox.popleft()()
        if self._kv_events is not None:
            self._kv_events.close()

    def _call(self, call: _Call) -> None:
        with self._arrived:
            self._inbox.append(call)
            self._arrived.notify()

    # Methods that run on the engine's thread

    def _run(self, load: Callable[[], Engine], about: Callable[[Engine], About], made: Event) -> None:
        try:
            engine = self.engine = load()
            self.about = about(engine)
            if self._kv_events is not None:
                self._kv_events.follow(engine)
                self.publish_kv()
            recorder = RunRecorder(self, self._origin_ns, tier=engine.tier_name)
            self._clients = _Clients(self, engine, recorder)
            engine.watch_speed()
            with suppress(UserError):
                engine.grammars  # noqa: B018 - made now: it takes a second, in which nothing else would run
            made.set()
            with no_cycle_search():
                drive(engine, self._clients, recorder, lambda: self._stopped)
            recorder.close()
            engine.close()
        except BaseException as error:
            self._failed = error
            made.set()
            self._wake()

    def publish_kv(self) -> None:
        """Publish the KV events since the last time."""
        kv_events = self._kv_events
        if kv_events is not None and (batch := kv_events.take()) is not None:
            self.post(lambda: kv_events.publish(batch))

    def post(self, call: _Call) -> None:
        """Let the exchange's thread call `call`."""
        self._outbox.append(call)

    def take(self) -> list[_Call]:
        calls = []
        while self._inbox:
            calls.append(self._inbox.popleft())
        return calls

    def await_(self) -> None:
        """Sleep until something comes."""
        with self._arrived:
            while not self._inbox and not self._stopped:
                self._arrived.wait()

    def publish(self, tokens: dict[int, _New], ends: dict[int, tuple[str, str]], due_ns: int) -> None:
        """Send new tokens, and for each request that ended how and why it ended."""

        def send() -> None:
            for id, new in tokens.items():
                self._exchange.give(id, new.tokens, new.logprobs or None)
            for id, end in ends.items():
                self._exchange.end(id, *end)
            self._exchange.flush(due_ns)

        self.post(send)
        self._wake()

    def add_request(self, **row: Any) -> None:
        self.post(lambda: self.ledger.add_request(**row))

    def add_step(self, **row: Any) -> None:
        self.post(lambda: self.ledger.add_step(**row))


class _Clients:
    """The requests of the exchange as the engine's loop sees them: see `realengine.loop.Clientele`."""

    busy = True

    def __init__(self, home: RealEngine, engine: Engine, recorder: RunRecorder) -> None:
        self._home = home
        self._engine = engine
        self._recorder = recorder
        self._segments = PromptSegments(engine.deployment.scheduler.block_size)
        self._open: dict[int, tuple[Request, Answer]] = {}
        self._new: dict[int, _New] = {}  # tokens since they were last published, by request

    def _now(self) -> int:
        return perf_counter_ns() - self._recorder.started_ns

    def add(self, id: int, asked: Add, came_ns: int) -> None:
        home = self._home
        arrived = self._segments.request(id, came_ns, asked)
        home.post(lambda: home.ledger.arrived(arrived))
        answer, stop_ids = Answer(asked, arrived), {*asked.stop_ids, *asked.also_stop_ids}

        def take(token: int, logprob: Logprob | None) -> bool:
            answer.tokens.append(token)
            new = self._new.setdefault(id, _New([], []))
            new.tokens.append(token)
            if logprob is not None:
                new.logprobs.append(logprob)
            return len(answer.tokens) >= asked.min_tokens and token in stop_ids

        sampling = SamplingParams(asked.temperature, asked.top_k, asked.top_p, asked.seed)
        request = self._engine.add(
            arrived,
            asked.prompt,
            grammar=asked.grammar,
            sampling=sampling,
            on_token=take,
            logprobs=asked.logprobs,
            rules=asked.rules,
        )
        self._recorder.arrived(request, came_ns, came_ns, self._now())
        if request.status is Status.REJECTED:
            self._recorder.left(request, "rejected", end_ns=self._now())
            home.publish({}, {id: ("refused", request.reason)}, perf_counter_ns())
        else:
            self._open[id] = request, answer

    def abort(self, id: int, why: str) -> None:
        if (known := self._open.pop(id, None)) is None:
            return
        request, answer = known
        self._engine.abort(id)
        self._new.pop(id, None)
        now_ns = self._now()
        if why == "stop":
            self._recorder.left(request, "finished", now_ns, STOPPED, now_ns)
        else:
            self._recorder.left(request, "cancelled", None, why, now_ns)
        self._segments.answered(answer)
        self._tell(StepPlan.from_amounts(), now_ns, [], 0)
        self._home.publish({}, {id: ("stop" if why == "stop" else "abort", "")}, perf_counter_ns())

    def _tell(self, plan: StepPlan, now_ns: int, sampled: list[int], generated: int) -> None:
        """Report the end of a step to the metrics; an empty plan reports the state after an abort."""
        end = step_end(0, self._engine.scheduler, plan, now_ns, sampled, generated)
        self._home.post(lambda: self._home.ledger.step_ended(end))

    def take(self) -> None:
        for call in self._home.take():
            call()

    def ran(self, step: Step) -> None:
        ends = {request.id: ("stop" if request.id in step.stopped else "length", "") for request in step.finished}
        for id in ends:
            self._segments.answered(self._open.pop(id)[1])
        new, self._new = self._new, {}
        now_ns, generated = step.end_ns - self._recorder.started_ns, sum(len(one.tokens) for one in new.values())
        self._home.publish_kv()
        self._tell(step.plan, now_ns, list(new), generated)
        self._recorder.flush_steps()
        self._home.publish(new, ends, step.end_ns)

    def await_(self, stopped: Callable[[], bool]) -> None:
        self._home.await_()


class _New(NamedTuple):
    """Tokens of one request, and their log-probabilities, if they are wanted."""

    tokens: list[int]
    logprobs: list[Logprob]
