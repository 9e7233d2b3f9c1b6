"""The backend of a simulated fleet in real time; it schedules requests as engines do, but computes no model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from math import inf
from time import monotonic_ns
from typing import Any
from zlib import crc32

from tokentwin.apiserver.exchange import Exchange
from tokentwin.apiserver.failures import Accidents, RequestFailures
from tokentwin.apiserver.kv_cache_events.feeds import KvFeeds
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import ReplicaNow, step_end
from tokentwin.apiserver.messages import About, Add
from tokentwin.apiserver.prompt_segments import Answer, PromptSegments
from tokentwin.apiserver.run_clock import RunClock
from tokentwin.apiserver.served_fleet import class_of
from tokentwin.realengine.logit_rules import Logprob
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import STOPPED
from tokentwin.sim.fleet import Life
from tokentwin.sim.live_cluster import LiveCluster
from tokentwin.sim.remote_prefills import RemotePrefills
from tokentwin.sim.run_log import TokenObserver

_SECOND_NS = 1_000_000_000
_STALL_NS = 200_000_000  # lateness of the whole twin, in real time, from which on its run pauses


class AnswerLengths:
    """The lengths of answers: `max_tokens` with `ignore_eos` or without `drawn`, else drawn by seed or request id.

    At temperature 0 the prompt draws the length, whatever the seed is, as it selects the words.
    `usual` draws the lengths of answers to requests without `max_tokens`, if there is no `drawn`.
    """

    def __init__(self, drawn: Callable[[int], int] | None, usual: Callable[[int], int] | None = None) -> None:
        self._drawn = drawn
        self._usual = drawn or usual

    def length(self, id: int, asked: Add) -> int:
        """Return the number of tokens of the answer to request `id`; 0 for a pooling request."""
        if asked.answer:
            return min(len(asked.answer), asked.max_tokens)
        draw = self._usual if asked.open_ended else self._drawn
        if draw is None or not asked.stop_ids or not asked.max_tokens:
            return asked.max_tokens
        if asked.temperature == 0:
            number = crc32(array("q", asked.prompt).tobytes())  # equal requests get equal answers
        else:
            number = asked.seed if asked.seed is not None else id
        length = draw(number)
        return min(max(length, asked.min_tokens, 1), asked.max_tokens)


class Twin:
    """The backend of a simulated fleet; with `speed` 10, ten simulated seconds pass in a real second.

    `cluster` returns the `LiveCluster` for a sink of rows and an observer of tokens. Answers consist of tokens from
    `filler`. `on_stall` gets the real seconds of each stall of the machine, during which the run pauses.
    """

    def __init__(
        self,
        about: About,
        cluster: Callable[[Any, TokenObserver], LiveCluster],
        exchange: Exchange,
        lengths: AnswerLengths,
        filler: Sequence[int],
        block_size: int,
        speed: float = 1.0,
        now: Callable[[], int] = monotonic_ns,
        accidents: Accidents = Accidents(RequestFailures()),
    ) -> None:
        self.about = about
        self.ledger: Ledger
        self._exchange = exchange
        self._lengths = lengths
        self._filler = filler
        self._block_size = block_size
        self._speed = speed
        self.weights_s = 0.0  # simulated seconds in which a device's weights move to host memory or back
        self._segments = PromptSegments(block_size)
        self._accidents = accidents
        self._now = now
        self._open: dict[int, _Answer] = {}
        self._adds: list[Callable[[int], None]] = []  # functions to call with a time of the run
        self._aborts: dict[int, tuple[str, str]] = {}  # status and reason by request
        self._due_ns = 0  # time at which the outputs in the exchange should be sent
        self._next_ns = inf  # time of the run of the next event
        self.on_stall: Callable[[float], None] = lambda seconds: None
        self.cluster = cluster(self, self._step_ended)
        self.kv_feeds: KvFeeds | None = None
        self.prefills: RemotePrefills | None = None
        self._clock = RunClock(now(), speed)
        self.cluster.follow(self._ready, self._gone)

    def run_ns(self, monotonic_ns: int) -> int:
        return self._clock.run_ns(monotonic_ns)

    def monotonic_ns(self, run_ns: float) -> int:
        return self._clock.monotonic_ns(run_ns)

    def add(self, id: int, asked: Add) -> None:
        cut = self._accidents.cut(id, asked.place, self._run_s())

        def arrive(at_ns: int) -> None:
            to = "" if asked.place is None else class_of(asked.place)
            request = self._segments.request(id, at_ns, asked, self._lengths.length(id, asked), to)
            answer = self._open[id] = _Answer(asked, request)
            answer.seed = _words_of(id, asked)
            answer.cut_after = None if cut is None else cut.after_tokens
            self.ledger.arrived(request)
            if self.prefills is not None and asked.prefilled_at:
                self.prefills.expect(id, asked.prefilled_at)
            self.cluster.offer(request)

        self._adds.append(arrive)

    def refusal(self, id: int, asked: Add) -> tuple[int, str] | None:
        accident = self._accidents.refusal(id, asked.place, self._run_s())
        return None if accident is None else (accident.status, "the twin's failures have this request refused")

    def plant(self, failures: str) -> str:
        """Replace the failures of requests by `failures` (JSON; empty: keep them), and return the present ones."""
        if failures:
            self._accidents = Accidents(RequestFailures.model_validate_json(failures), self._run_s())
        return self._accidents.failures.model_dump_json(include=set(RequestFailures.model_fields))

    def abort(self, id: int, why: str) -> None:
        end = ("finished", STOPPED) if why == "stop" else ("cancelled", why)
        self._aborts.setdefault(id, end)

    def turn(self) -> float | None:
        if self.kv_feeds is not None:
            self.kv_feeds.replay()
        self._note_stall()
        self._advance()
        self._exchange.flush(self._due_ns)
        self._next_ns = self.cluster.next_ns
        if self._aborts:
            return 0.0
        if self._next_ns == inf:
            return None
        return max((self.monotonic_ns(self._next_ns) - self._now()) / _SECOND_NS, 0.0)

    def _run_s(self) -> float:
        """Return the present time of the run in seconds; messages may come before the turn that ends a stall."""
        self._note_stall()
        return self.run_ns(self._now()) / _SECOND_NS

    def _note_stall(self) -> None:
        """Let the run pause if the next event is long overdue, because this machine or this process had no time."""
        if self._next_ns == inf:
            return
        now_ns = self._now()
        late_ns = now_ns - self.monotonic_ns(self._next_ns)
        if late_ns > _STALL_NS:
            self._clock.pause(self._next_ns, now_ns)
            self._exchange.stalled_ns = self._clock.stalled_ns
            self.on_stall(late_ns / _SECOND_NS)

    def replicas(self) -> list[ReplicaNow]:
        now = []
        for life in self.cluster.living:
            replica = life.replica
            holds, blocks = replica.outstanding_requests > 0, replica.scheduler.pool.total
            now.append(ReplicaNow(replica.index, holds, blocks, self.cluster.deployment(life)))
        return now

    def rest(self, level: int) -> float:
        """Let later prompts find no prefix of earlier ones, if KV is lost; return the seconds of moving the weights.

        What the pools keep is never found again, and makes room as if it were free.
        """
        if level:
            self._segments = PromptSegments(self._block_size)
        return self.moves_s(level)

    def moves_s(self, level: int) -> float:
        return self.weights_s / self._speed if level else 0.0

    def well(self) -> bool:
        return True

    def close(self) -> None:
        self._advance()
        self._exchange.flush(self._due_ns)
        done = self.cluster.finish(self.run_ns(self._now()))
        self.ledger.over(duration_ns=done.duration_ns, replica_lives=self.cluster.replica_lives)
        self._exchange.flush(self._now())
        if self.kv_feeds is not None:
            self.kv_feeds.close()

    def tokens(self, request: Request, begin: int, end: int) -> list[int]:
        """Return the tokens of a request that has not ended (prompt and answer) between two positions."""
        answer = self._open[request.id]
        prompt = answer.asked.prompt
        begun, ended = max(begin - len(prompt), 0), max(end - len(prompt), 0)
        return [*prompt[begin:end], *(self._token(answer, at) for at in range(begun, ended))]

    def salt(self, request: Request) -> str:
        """Return the salt of a request that has not ended."""
        return self._open[request.id].asked.cache_salt

    def _token(self, answer: _Answer, at: int) -> int:
        if answer.asked.answer:
            return answer.asked.answer[at]
        return self._filler[(answer.seed + at * 7) % len(self._filler)]

    def _certain(self, token: int, alternatives: int) -> Logprob:
        """Return the logprob of a token that no model has chosen: it is certain, and the alternatives impossible."""
        others = [(other, -inf) for other in self._filler[:alternatives] if other != token]
        return Logprob(0.0, [(token, 0.0), *others][:alternatives])

    def _advance(self) -> None:
        """Advance the simulation to the current time.

        Arrivals come first, and aborts are in the order of request ids, as in a replay of the recording.
        """
        to_ns, adds, aborts = self.run_ns(self._now()), self._adds, sorted(self._aborts.items())
        self._adds, self._aborts = [], {}
        self.cluster.advance(to_ns, adds)
        self.cluster.advance(to_ns, [partial(self._give_up, id, end) for id, end in aborts])

    def _give_up(self, id: int, end: tuple[str, str], at_ns: int) -> None:
        self.cluster.give_up(id, *end)

    # Callbacks of the cluster

    def _step_ended(self, replica: int, plan: StepPlan, requests: list[Request], now_ns: int) -> None:
        due_ns = self.monotonic_ns(now_ns)
        if due_ns != self._due_ns:
            self._exchange.flush(self._due_ns)
            self._due_ns = due_ns
        if self.kv_feeds is not None:
            self.kv_feeds.step_ended(replica)
        sampled, generated = [], 0
        for request in requests:
            answer = self._open.get(request.id)
            if answer is not None and request.outputs > len(answer.tokens) and self.cluster.gives(request):
                if not (known := len(answer.tokens)):
                    self._exchange.give_prompt(request.id, min(request.cached, len(answer.asked.prompt)))
                new = [self._token(answer, at) for at in range(known, request.outputs)]
                answer.tokens += new
                sampled.append(request.id)
                generated += len(new)
                if not answer.cut:
                    wanted = answer.asked.logprobs
                    logprobs = None if wanted is None else [self._certain(token, wanted) for token in new]
                    self._exchange.give(request.id, new, logprobs)
                if answer.cut_after is not None and len(answer.tokens) >= answer.cut_after:
                    self._cut(request.id, answer, "the twin's failures had its connection break")
        scheduler = self.cluster.replicas[replica].scheduler
        lora = bool(self.about.adapters)
        self.ledger.step_ended(step_end(replica, scheduler, plan, now_ns, sampled, generated, lora))

    def _cut(self, id: int, answer: _Answer, why: str) -> None:
        """Break the connection to the client of request `id`; its answer is never reported as delivered."""
        if not answer.cut:
            answer.cut = True
            self._exchange.end(id, "cut", why)
            self.ledger.delivered(id, None)
            self.abort(id, why)

    def _ready(self, life: Life) -> None:
        """Note that a replica takes requests."""
        self._place(life, life.replica.index)

    def _gone(self, life: Life) -> None:
        """Note that a replica takes no more requests; if it has a port of its own, break the connections there."""
        self._place(life, -1)  # first, so that a client whose connection breaks does not find the replica again
        if self.about.places:
            for id, answer in self._open.items():
                if answer.asked.place == life.place:
                    self._cut(id, answer, "the replica has crashed")
            self._exchange.flush(self._due_ns)

    def _place(self, life: Life, replica: int) -> None:
        if self.about.places:
            self.about.places[life.place] = replica
            for peer in self._exchange.peers:
                self._exchange.send(peer, self.about)

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """End the requests for which the cluster gives rows of the dataset `requests`."""
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            if (times := row["token_times_ns"]) is not None:
                row["token_times_ns"] = times.as_py()
            id = row["request_id"]
            answer = self._open.pop(id)
            if self.prefills is not None:
                self.prefills.forget(id)
            self._segments.answered(answer)
            if answer.cut:
                pass  # the client was already informed
            elif row["status"] == "finished" and not answer.asked.max_tokens:
                self._exchange.give_pooled(id, _filler_state(answer.seed, self.about.embedding_size))
                self._exchange.end(id, "stop")
            elif row["status"] == "finished":
                self._exchange.end(id, "stop" if _is_complete(answer) else "length")
            elif row["status"] in ("rejected", "timed_out"):
                self._exchange.end(id, "refused", row["reason"])
            else:
                self._exchange.end(id, "abort", row["reason"])
            self.ledger.add_request(**row)

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        for values in zip(*columns.values(), strict=True):
            self.ledger.add_step(**dict(zip(columns, values, strict=True)))


def _is_complete(answer: _Answer) -> bool:
    asked = answer.asked
    return len(asked.answer) <= asked.max_tokens if asked.answer else len(answer.tokens) < asked.max_tokens


def _words_of(id: int, asked: Add) -> int:
    """Return a number from 0 to 255 that selects an answer's words.

    Requests with the same seed, or with the same prompt at temperature 0, get the same words.
    """
    if asked.temperature == 0 and asked.max_tokens:
        return blake2b(array("q", asked.prompt).tobytes()).digest()[0]
    drawn_by = f"seed {asked.seed}" if asked.seed is not None else f"request {id}"
    return blake2b(drawn_by.encode()).digest()[0]


def _filler_state(seed: int, size: int) -> list[float]:
    """Return a meaningless hidden state of `size` elements; requests with the same seed get the same."""
    return [float((seed + at * 7) % 256) - 127.5 for at in range(size)]


class _Answer(Answer):
    seed = 0
    cut_after: int | None = None  # number of tokens after which the connection breaks; None: it does not
    cut = False
