"""Synthetic workloads from a seeded specification; equal specs give identical requests.

Every quantity (arrivals, prompt lengths, ...) has a separate random stream, spawned from the seed. If one quantity is
changed, the others stay the same, and a longer workload begins with the shorter one. Each of a number of users has a
separate stream, so more users include the fewer. Requests are generated in chunks when they are read, so memory does
not grow with their number.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import count, islice, repeat, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from tokentwin.serving.data_file import read_yaml
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings, TerseSettings
from tokentwin.serving.workload import PRIVATE, Item, Segment, Workload, WorkloadRequest
from tokentwin.traces.distributions import (
    LATEST_NS,
    Arrivals,
    Closed,
    Empirical,
    Lengths,
    NoTokens,
    OutputLengths,
    Users,
)

_CHUNK = 8192
_OF_A_USER = 16  # number of draws at a time for one user
_WARM_UP = 0.25  # default of the share of `duration_s` in which the requests of users do not count yet
_USERS = 9  # number of the random streams of users, after those of the quantities
_MOST_REQUESTS = 1_000_000_000  # maximum number of requests, because writing this many takes hours


class SystemPrompts(Settings, allow_inf_nan=False):
    """System prompts at the beginning of prompts; each request (or session) chooses one of them."""

    count: int = Field(ge=1, le=1_000_000, description="number of different system prompts")
    tokens: Lengths = Field(description="length of each system prompt in tokens")
    choice: Literal["uniform", "zipf"] = Field(
        "uniform", description="distribution by which a request chooses its system prompt"
    )
    exponent: float = Field(
        1.0, ge=0, le=20, description="zipf: system prompt k is chosen in proportion to k^-exponent"
    )
    share: float = Field(1.0, ge=0, le=1, description="share of requests that have a system prompt")


class Adapters(Settings, allow_inf_nan=False):
    """LoRA adapters. A request chooses one of them, but all turns of a session and all requests of a user have one."""

    count: int = Field(ge=1, le=1_000_000, description="number of adapters")
    exponent: float = Field(1.0, ge=0, le=20, description="adapter k is chosen in proportion to k^-exponent")
    share: float = Field(1.0, ge=0, le=1, description="share of requests that have an adapter")


class Images(Settings, allow_inf_nan=False):
    """Images or videos between a system prompt and the user's part of a prompt."""

    count: int = Field(1, ge=1, le=1000, description="number of images of a request that has some")
    tokens: Lengths = Field(description="placeholder tokens of an image")
    share: float = Field(1.0, ge=0, le=1, description="share of requests that have images")
    distinct: int | None = Field(
        None, ge=1, le=1_000_000_000, description="number of different images, equally frequent; null: no image repeats"
    )
    kind: Literal["image", "video"] = Field("image", description="image, or video")
    frames: int = Field(
        1, ge=1, le=100_000, description="frames of a video that are encoded apart; tokens become a multiple of it"
    )


class Tools(Settings):
    """Tools that an agent calls between two turns: the next turn waits for the slowest, and contains all results."""

    parallel: Lengths = Field(description="number of tools called at the same time")
    result: Lengths = Field(description="length of each tool's result in tokens")


class Sessions(Settings):
    """Conversations in which the prompt of a turn is the whole conversation so far plus a new user message.

    A turn arrives `think_ms` after the arrival or after the end of the previous turn. An open-loop trace does not know
    when a turn ends, so think times from the arrival should be longer than the time of an answer. With `tools`,
    `think_ms` is the time of one tool, and tools' results take the place of user messages after the first turn.
    """

    turns: Lengths = Field(description="number of turns of a session")
    think_ms: Lengths = Field(description="think time: milliseconds from one turn to the arrival of the next turn")
    think_from: Literal["arrival", "answer"] | None = Field(
        None,
        description="whether think time starts at the arrival or at the end (simulator only) of the turn before; by "
        "default at the arrival, and with users at the end",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="end a session before a prompt becomes longer than this"
    )
    tools: Tools | None = Field(None, description="tools that an agent calls between turns")


class SynthSpec(TerseSettings, allow_inf_nan=False):
    """The specification of a workload. Its size is given by exactly one of `requests` and `duration_s`.

    `prompt` is the length of the user's part, to which a system prompt and earlier turns are added. With `sessions`,
    `arrivals` is the arrival process of sessions, and `requests` is the number of turns. With `users`, `duration_s` is
    the time in which they send requests, whatever their number, and only requests after the warm-up count.
    """

    seldom_set = ("adapters", "images", "changes_logits", "scores_prompt")

    name: str = Field("synthetic", description="name of the workload")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random numbers")
    requests: int | None = Field(None, ge=1, le=_MOST_REQUESTS, description="number of requests")
    duration_s: float | None = Field(None, gt=0, le=1e9, description="seconds during which requests arrive")
    arrivals: Arrivals = Field(description="arrival process")
    prompt: Lengths = Field(description="length of the user's part of a prompt, in tokens")
    output: OutputLengths = Field(
        description="length of the output, in tokens; 0: pooling requests, for embeddings or scores"
    )
    system_prompts: SystemPrompts | None = Field(None, description="shared system prompts")
    sessions: Sessions | None = Field(None, description="multi-turn conversations")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="priority of every request")
    tenant: str = Field("", description="tenant of every request")
    slo_class: str = Field("", description="SLO class of every request")
    warm_up_s: float | None = Field(
        None,
        ge=0,
        le=1e9,
        description="requests of the first N seconds are served, but left out of all figures; by default a quarter of "
        "duration_s with users, otherwise 0",
    )
    structured: float = Field(
        0.0, ge=0, le=1, description="share of requests with structured output, whose answers follow a grammar"
    )
    grammar_compile_ms: float = Field(
        0.0, ge=0, le=1e9, description="time that a request with structured output waits until its grammar is compiled"
    )
    changes_logits: float = Field(
        0.0, ge=0, le=1, description="share of requests with penalties or a bias, which take time at each token"
    )
    scores_prompt: float = Field(
        0.0, ge=0, le=1, description="share of requests that want log-probabilities of their prompts (prompt_logprobs)"
    )

    adapters: Adapters | None = Field(None, description="LoRA adapters; a number is their count")
    images: Images | None = Field(None, description="images or videos; a number is the tokens of one image")

    warm_up_requests: int | None = Field(
        None, ge=0, le=_MOST_REQUESTS, description="the first N requests are served, but left out of all figures"
    )

    @property
    def counted_from_s(self) -> float:
        """The seconds of the warm-up."""
        if self.warm_up_s is None and isinstance(self.arrivals, Users):
            return _WARM_UP * (self.duration_s or 0.0)
        return self.warm_up_s or 0.0

    @property
    def expected_requests(self) -> float:
        """The number of requests: `requests`, or the mean number within the duration (for a ramp, an upper bound)."""
        if self.requests is not None:
            return self.requests
        if isinstance(self.arrivals, Users):
            return (self.duration_s or 0.0) * self.arrivals.users * _rate_of_a_user(self.arrivals, self.sessions)
        rates = (getattr(self.arrivals, name, 0.0) for name in ("rate", "start_rate", "end_rate"))
        return (self.duration_s or 0.0) * max(rates)

    @field_validator("adapters", mode="before")
    @classmethod
    def _a_count_alone(cls, adapters: Any) -> Any:
        return {"count": adapters} if isinstance(adapters, int) and not isinstance(adapters, bool) else adapters

    @field_validator("images", mode="before")
    @classmethod
    def _tokens_alone(cls, images: Any) -> Any:
        return {"tokens": images} if isinstance(images, int) and not isinstance(images, bool) else images

    @model_validator(mode="after")
    def _consistent(self) -> SynthSpec:
        if (self.requests is None) == (self.duration_s is None):
            raise ValueError("give exactly one of requests and duration_s")
        if self.expected_requests > _MOST_REQUESTS:
            most = f"{_MOST_REQUESTS:,}"
            raise ValueError(f"asks for more than {most} requests; lower duration_s or the rate")
        if self.warm_up_requests and self.requests is not None and self.warm_up_requests >= self.requests:
            raise ValueError(
                f"warm_up_requests {self.warm_up_requests:,} must be fewer than requests {self.requests:,}"
            )
        if isinstance(self.arrivals, Closed):
            if self.requests is None:
                raise ValueError("closed arrivals need requests, not duration_s")
            if self.sessions is not None:
                raise ValueError(
                    "closed arrivals cannot have sessions; use arrivals of users, who have one session after another"
                )
        if self.warm_up_s is not None and self.duration_s is not None and self.warm_up_s >= self.duration_s:
            raise ValueError(f"warm_up_s {self.warm_up_s:g} must be shorter than duration_s {self.duration_s:g}")
        if isinstance(self.arrivals, Users) and self.sessions and self.sessions.think_from == "arrival":
            raise ValueError("users wait for answers; leave sessions.think_from out")
        drawn = {"system_prompts.tokens": self.system_prompts and self.system_prompts.tokens}
        if self.sessions is not None:
            drawn |= {"sessions.turns": self.sessions.turns, "sessions.think_ms": self.sessions.think_ms}
            if (tools := self.sessions.tools) is not None:
                drawn |= {"sessions.tools.parallel": tools.parallel, "sessions.tools.result": tools.result}
        for field, lengths in drawn.items():
            if isinstance(lengths, Empirical):
                raise ValueError(f"{field} cannot be empirical; prompt and output can")
        if self.images is not None and self.sessions is not None:
            raise ValueError("images cannot be combined with sessions; write such a trace as JSON lines")
        if self.images is not None and isinstance(self.images.tokens, Empirical):
            raise ValueError("images.tokens cannot be empirical; prompt and output can")
        answered = self.structured or self.changes_logits or self.sessions is not None
        if isinstance(self.output, NoTokens) and answered:
            raise ValueError("sessions, structured and changes_logits need answers; leave them out with output 0")
        return self


def _rate_of_a_user(users: Users, sessions: Sessions | None) -> float:
    """Return the requests per second of a user who never waits for an answer."""
    if sessions is None:
        return 1e3 / users.think_ms.expected
    assert not isinstance(sessions.turns, Empirical) and not isinstance(sessions.think_ms, Empirical)
    turns = max(sessions.turns.expected, 1.0)
    return 1e3 * turns / ((turns - 1) * sessions.think_ms.expected + users.think_ms.expected)


def parse_spec(data: Any, where: str = "spec") -> SynthSpec:
    """Parse `data` as a spec. Raises UserError with the first invalid field."""
    return parse(SynthSpec, data, where, typed=True)


def read_spec(path: str | Path) -> SynthSpec:
    """Read the spec in a YAML file. Raises UserError with the file and the first invalid field."""
    return parse_spec(read_yaml(path, "trace"), where=str(path))


def synthesise(spec: SynthSpec) -> Workload:
    """Return the workload that `spec` describes; its requests are generated again on each iteration."""
    sizes = {
        lengths.path: _sizes(lengths.path) for lengths in (spec.prompt, spec.output) if isinstance(lengths, Empirical)
    }
    ends = isinstance(spec.arrivals, Users) and spec.duration_s is not None
    return Workload(
        requests=_Synthetic(spec, sizes),
        name=spec.name,
        concurrency=spec.arrivals.concurrency if isinstance(spec.arrivals, Closed) else None,
        shares_prefixes=spec.system_prompts is not None
        or spec.sessions is not None
        or (spec.images is not None and spec.images.distinct is not None),
        warm_up_ns=round(spec.counted_from_s * 1e9),
        warm_up_requests=spec.warm_up_requests or 0,
        until_ns=round((spec.duration_s or 0.0) * 1e9) if ends else None,
    )


def _sizes(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompt and output lengths of a trace."""
    from tokentwin.traces.formats.trace_file import read_workload

    pairs = [(request.prompt_len, request.output_len) for request in read_workload(path).requests]
    prompts, outputs = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    if not len(prompts):
        raise UserError("empirical.path", str(path), "holds no requests")
    return prompts, outputs


class _Turn(NamedTuple):
    arrival_ns: int
    user: int
    output: int


class _Said(NamedTuple):
    """A turn of one of many users. If it opens a session or a part of one, its prompt begins with `opening`."""

    arrival_ns: int
    speaker: int
    number: int
    think_ns: int | None
    user: int
    output: int
    opening: tuple[Segment, ...] | None


class _Synthetic:
    """The requests of a spec; every iteration gives the same requests."""

    def __init__(self, spec: SynthSpec, sizes: dict[Path, tuple[np.ndarray, np.ndarray]]) -> None:
        self._spec = spec
        self._sizes = sizes

    def __iter__(self) -> Iterator[WorkloadRequest]:
        spec = self._spec
        # A new stream must be added at the end; at any other place it would change all existing workloads.
        seeds = np.random.SeedSequence(spec.seed).spawn(9)
        rngs = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]
        openings = self._openings(rngs[3])
        if isinstance(spec.arrivals, Users):
            requests = self._users(spec.arrivals, openings)
        else:
            arrivals = (t for chunk in spec.arrivals.times_ns(rngs[0], _CHUNK) for t in chunk.tolist())
            sizes = self._request_sizes(rngs[1], rngs[2])
            if spec.sessions is None:
                requests = self._single_turns(arrivals, sizes, openings(rngs[4]))
            else:
                plans = _plans(spec.sessions, arrivals, sizes, (rngs[5], rngs[6], rngs[8]))
                requests = self._conversations(plans, openings(rngs[4]))
        if spec.structured:
            draws = (share for _ in repeat(None) for share in rngs[7].random(_CHUNK).tolist())
            drawn = zip(requests, draws, strict=False)
            compile_ns = round(spec.grammar_compile_ms * 1_000_000)
            requests = (
                replace(request, structured=True, grammar_compile_ns=compile_ns) if draw < spec.structured else request
                for request, draw in drawn
            )
        if spec.changes_logits or spec.scores_prompt:
            requests = _with_logits(requests, spec.changes_logits, spec.scores_prompt, spec.seed)
        if spec.adapters is not None:
            requests = _adapted(requests, spec.adapters, spec.seed)
        if spec.images is not None:
            requests = _illustrated(requests, spec.images, spec.seed)
        if spec.duration_s is None:
            return islice(requests, spec.requests)
        end_ns = round(spec.duration_s * 1_000_000_000)
        return takewhile(lambda request: request.arrival_ns < end_ns, requests)

    def _request_sizes(
        self, prompt_rng: np.random.Generator, output_rng: np.random.Generator, chunk: int = _CHUNK
    ) -> Iterator[tuple[int, int]]:
        """Yield (user tokens, output tokens) of endlessly many turns."""
        prompt, output = self._spec.prompt, self._spec.output
        if isinstance(prompt, Empirical) and isinstance(output, Empirical) and prompt.path == output.path:
            prompts, outputs = self._sizes[prompt.path]
            while True:
                rows = prompt_rng.integers(len(prompts), size=chunk)
                users = np.clip(prompts[rows], prompt.min, prompt.max).tolist()
                yield from zip(users, _clipped_outputs(outputs[rows], output).tolist(), strict=True)
        while True:
            users = self._draw(prompt, 0, prompt_rng, chunk)
            yield from zip(users.tolist(), self._draw(output, 1, output_rng, chunk).tolist(), strict=True)

    def _draw(self, lengths: Any, column: int, rng: np.random.Generator, chunk: int) -> np.ndarray:
        if isinstance(lengths, Empirical):
            values = self._sizes[lengths.path][column]
            drawn = values[rng.integers(len(values), size=chunk)]
            return _clipped_outputs(drawn, lengths) if column else np.clip(drawn, lengths.min, lengths.max)
        return lengths.draw(rng, chunk)

    def _openings(self, length_rng: np.random.Generator) -> Callable[..., Iterator[tuple[Segment, ...]]]:
        """Return a function that yields the openings of endlessly many requests or sessions from a random stream.

        An opening is a system prompt or nothing.
        """
        system = self._spec.system_prompts
        if system is None:
            return lambda rng, chunk=0: repeat(())
        tokens = system.tokens.draw(length_rng, system.count).tolist()
        prompts = [((f"sys{k}", n),) for k, n in enumerate(tokens)]
        exponent = system.exponent if system.choice == "zipf" else 0.0
        weights = np.cumsum(np.arange(1, system.count + 1) ** -exponent)

        def drawn(rng: np.random.Generator, chunk: int = _CHUNK) -> Iterator[tuple[Segment, ...]]:
            while True:
                chosen = np.searchsorted(weights, rng.random(chunk) * weights[-1], side="right")
                begins = rng.random(chunk) < system.share
                for k, has_one in zip(chosen.tolist(), begins.tolist(), strict=True):
                    yield prompts[min(k, system.count - 1)] if has_one else ()

        return drawn

    def _users(self, users: Users, openings: Callable[..., Iterator[tuple[Segment, ...]]]) -> Iterator[WorkloadRequest]:
        """Yield the requests of all users in the order in which they would arrive if answers took no time.

        Real arrivals are later, so all requests that can arrive before some time are among those up to it.
        """
        spec = self._spec
        labels = spec.priority, spec.tenant, spec.slo_class
        histories: list[tuple[Segment, ...]] = [()] * users.users
        speakers = [self._user(users, speaker, openings) for speaker in range(users.users)]
        for id_, said in enumerate(heapq.merge(*speakers)):
            arrival, speaker, number, think_ns, user, output, opening = said
            history = histories[speaker] if opening is None else opening
            prompt = (*history, (PRIVATE if spec.sessions is None else f"u{speaker}.{number}", user))
            yield WorkloadRequest(id_, arrival, prompt, output, *labels, f"u{speaker}", number, think_ns)
            histories[speaker] = (*prompt, (f"out:{id_}", output)) if output else prompt

    def _user(
        self, users: Users, speaker: int, openings: Callable[..., Iterator[tuple[Segment, ...]]]
    ) -> Iterator[_Said]:
        """Yield the turns of one user, who is at a random place of the first session or think time at the start."""
        seed = np.random.SeedSequence(self._spec.seed, spawn_key=(_USERS, speaker))
        rng = np.random.Generator(np.random.PCG64(seed))
        sizes = self._request_sizes(rng, rng, _OF_A_USER)
        begins = openings(rng, _OF_A_USER)
        idle_ms = _stream(lambda: users.think_ms.draw(rng, _OF_A_USER))
        sessions = self._spec.sessions
        plans = _plans(sessions, repeat(0), sizes, (rng, rng, rng), _OF_A_USER) if sessions else None
        entered = rng.random()  # the share of the first session that lies before the start
        now_ns, number, think_ns = 0, 0, 0
        for session in count():
            opening = next(begins)
            plan = self._fitting(opening, next(plans) if plans else [_Turn(0, *next(sizes))])
            after_ns = next(idle_ms) * 1_000_000
            first = 0
            if session == 0:
                began_ns = round(entered * (plan[-1].arrival_ns + after_ns))
                first = sum(turn.arrival_ns < began_ns for turn in plan)
                now_ns = -began_ns
                if past := sum(turn.user + turn.output for turn in plan[:first]):
                    opening = (*opening, (f"u{speaker}.past", past))
            for at, turn in enumerate(plan[first:], first):
                waits_ns = think_ns if at == 0 else turn.arrival_ns - plan[at - 1].arrival_ns
                begun = opening if at == first else None
                arrival_ns = now_ns + turn.arrival_ns
                yield _Said(arrival_ns, speaker, number, waits_ns if number else None, turn.user, turn.output, begun)
                number += 1
            now_ns += plan[-1].arrival_ns + after_ns
            think_ns = after_ns
            if now_ns > LATEST_NS:
                return

    def _fitting(self, opening: tuple[Segment, ...], plan: list[_Turn]) -> list[_Turn]:
        """Return the first turns of a session, up to the longest prompt that is allowed."""
        most = self._spec.sessions.max_prompt_tokens if self._spec.sessions else None
        tokens = sum(n for _, n in opening)
        for at, turn in enumerate(plan):
            if at and most is not None and tokens + turn.user > most:
                return plan[:at]
            tokens += turn.user + turn.output
        return plan

    def _single_turns(
        self, arrivals: Iterator[int], sizes: Iterator[tuple[int, int]], openings: Iterator[tuple[Segment, ...]]
    ) -> Iterator[WorkloadRequest]:
        priority, tenant, slo_class = self._spec.priority, self._spec.tenant, self._spec.slo_class
        # The streams never end; the caller limits the number of requests.
        for id_, arrival, (user, output), opening in zip(count(), arrivals, sizes, openings, strict=False):
            prompt = (*opening, (PRIVATE, user))
            yield WorkloadRequest(id_, arrival, prompt, output, priority, tenant, slo_class)

    def _conversations(
        self, plans: Iterator[list[_Turn]], openings: Iterator[tuple[Segment, ...]]
    ) -> Iterator[WorkloadRequest]:
        """Yield the turns of all sessions in order of arrival. Only sessions between two turns are in memory."""
        spec = self._spec
        answers = spec.sessions is not None and spec.sessions.think_from == "answer"
        ids = count()
        # The heap is ordered by (arrival, session); a session has one entry, so the other fields are never compared.
        pending: list[tuple[int, int, int, tuple[Segment, ...], list[_Turn]]] = []
        for session, (plan, opening) in enumerate(zip(plans, openings, strict=False)):
            while pending and pending[0][0] < plan[0].arrival_ns:
                arrival, speaker, number, history, turns = heapq.heappop(pending)
                id_ = next(ids)
                _, user, output = turns[number]
                prompt = (*history, (f"u{speaker}.{number}", user))
                think_ns = arrival - turns[number - 1].arrival_ns if number and answers else None
                labels = spec.priority, spec.tenant, spec.slo_class
                yield WorkloadRequest(id_, arrival, prompt, output, *labels, f"s{speaker}", number, think_ns)
                if number + 1 < len(turns) and self._fits(prompt, output, turns[number + 1]):
                    history = (*prompt, (f"out:{id_}", output)) if output else prompt
                    next_arrival = turns[number + 1].arrival_ns
                    heapq.heappush(pending, (next_arrival, speaker, number + 1, history, turns))
            heapq.heappush(pending, (plan[0].arrival_ns, session, 0, opening, plan))

    def _fits(self, prompt: tuple[Segment, ...], output: int, turn: _Turn) -> bool:
        """Return True if the next turn's prompt is not longer than allowed."""
        assert self._spec.sessions is not None
        most = self._spec.sessions.max_prompt_tokens
        return most is None or sum(n for _, n in prompt) + output + turn.user <= most


def _adapted(requests: Iterator[WorkloadRequest], adapters: Adapters, seed: int) -> Iterator[WorkloadRequest]:
    """Yield `requests` with adapters, drawn by a hash of the session, or else of the request's id."""
    weights = np.cumsum(np.arange(1, adapters.count + 1) ** -adapters.exponent)
    shares = (weights / weights[-1]).tolist()
    for request in requests:
        key = f"{seed}:{request.session or request.id}".encode()
        coins = blake2b(key, digest_size=16).digest()
        has_one, chosen = (int.from_bytes(coin, "big") / 2**64 for coin in (coins[:8], coins[8:]))
        k = min(bisect_right(shares, chosen), adapters.count - 1)
        yield replace(request, adapter=f"adapter{k}") if has_one < adapters.share else request


def _with_logits(
    requests: Iterator[WorkloadRequest], changes: float, scores: float, seed: int
) -> Iterator[WorkloadRequest]:
    """Yield `requests` of which these shares change logits or score their prompts, drawn by a hash of the id."""
    for request in requests:
        coins = blake2b(f"{seed}:logits:{request.id}".encode(), digest_size=16).digest()
        changed, scored = (int.from_bytes(coin, "big") / 2**64 for coin in (coins[:8], coins[8:]))
        of_prompt = scored < scores
        yield replace(
            request, changes_logits=changed < changes, scores_prompt=of_prompt, skip_reading_prefix_cache=of_prompt
        )


def _illustrated(requests: Iterator[WorkloadRequest], images: Images, seed: int) -> Iterator[WorkloadRequest]:
    """Yield `requests` with images before the user's part, drawn by a hash of the request's id."""
    for request in requests:
        coins = np.random.Generator(np.random.PCG64([seed, request.id]))
        if coins.random() >= images.share:
            yield request
            continue
        opening, own = request.prompt[:-1], request.prompt[-1:]
        offset = sum(tokens for _, tokens in opening)
        items = []
        for _ in range(images.count):
            number = None if images.distinct is None else int(coins.integers(images.distinct))
            sizes = coins if number is None else np.random.Generator(np.random.PCG64([seed, number, 1]))
            tokens = -(-int(images.tokens.draw(sizes, 1)[0]) // images.frames) * images.frames
            name = "" if number is None else f"{images.kind} {number}"
            items.append(Item(offset, tokens, name, images.kind, images.frames))
            offset += tokens
        placed = tuple((item.content or PRIVATE, item.tokens) for item in items)
        yield replace(request, prompt=(*opening, *placed, *own), items=tuple(items))


def _clipped_outputs(outputs: np.ndarray, lengths: Empirical) -> np.ndarray:
    """Return the outputs of a trace's requests, clipped to the bounds that are stated; pooling requests keep 0."""
    return np.clip(outputs, lengths.min if lengths.min > 1 else 0, lengths.max)


def _plans(
    sessions: Sessions,
    arrivals: Iterator[int],
    sizes: Iterator[tuple[int, int]],
    rngs: Sequence[np.random.Generator],
    chunk: int = _CHUNK,
) -> Iterator[list[_Turn]]:
    """Yield the turns of endlessly many sessions; `rngs` draw turns, think times, and tools."""
    turns = _stream(lambda: sessions.turns.draw(rngs[0], chunk))
    think_ms = _stream(lambda: sessions.think_ms.draw(rngs[1], chunk))
    tools = sessions.tools
    calls = repeat(1) if tools is None else _stream(lambda: tools.parallel.draw(rngs[2], chunk))
    results = None if tools is None else _stream(lambda: tools.result.draw(rngs[2], chunk))
    for start, length in zip(arrivals, turns, strict=False):
        arrival = start
        plan: list[_Turn] = []
        called = 1
        for user, output in islice(sizes, length):
            plan.append(_Turn(arrival, sum(islice(results, called)) if plan and results else user, output))
            called = next(calls)
            arrival += max(islice(think_ms, called)) * 1_000_000
        if arrival > LATEST_NS:
            remedy = "the sessions would last longer than 146 years; lower think_ms"
            raise UserError("sessions", f"{length} turns", remedy)
        yield plan


def _stream(draw: Callable[[], np.ndarray]) -> Iterator[int]:
    while True:
        yield from draw().tolist()
