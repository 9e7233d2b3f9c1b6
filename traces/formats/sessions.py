"""Sessions of agents and conversations, as files state them, made into a workload whose turns wait for answers.

A record of calls states when each call began and ended: the gap between an answer and the next call is think time, in
which tools run, perhaps in parallel. An input of a load generator states delays and lengths. A conversation may state
neither; `Assumed` then gives arrivals, think times and lengths.

The prompt of a turn begins with the conversation so far. Arrival times of later turns are as if answers took no time,
because a turn is sent when its think time after the answer has passed, which depends on the fleet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest
from tokentwin.traces.distributions import (
    LATEST_NS,
    LONGEST,
    Constant,
    Drawn,
    Exponential,
    Gamma,
    Poisson,
    Ramp,
    plain_number,
)
from tokentwin.traces.formats.rows import named_workload
from tokentwin.traces.shared_prefixes import SharedPrefixes

_LOG = logging.getLogger("tokentwin")
_CHUNK = 4096
_Lengths = Annotated[Annotated[Drawn, Field(discriminator="kind")], BeforeValidator(plain_number)]


class Assumed(Settings):
    """What a user states about a file of conversations that does not state it itself."""

    arrivals: Annotated[Poisson | Gamma | Constant | Ramp, Field(discriminator="kind")] | None = Field(
        None, description="arrival process of the conversations"
    )
    think_ms: _Lengths = Field(
        Exponential(kind="exponential", mean=20_000), description="time from an answer to the next turn, in ms"
    )
    output: _Lengths | None = Field(None, description="length of answers in tokens")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random numbers")
    tokenizer: Callable[[str], Sequence[Hashable]] | None = Field(
        None, description="function that returns the tokens of a text"
    )


NOTHING = Assumed()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session. Fields that a file does not state are None.

    Attributes:
        output: length of the answer in tokens; None if `Assumed.output` gives it
        prompt: length of the whole prompt in tokens
        added: tokens that the turn adds to the conversation so far, in place of `prompt`
        arrival_ns: time of the first turn; a later turn does not come before it
        think_ns: time from the end of the previous answer
        keys: a key for every whole block of the prompt, which stands for all tokens up to the block's end
        max_tokens: maximum length of the answer in tokens
    """

    output: int | None
    prompt: int | None = None
    added: int | None = None
    arrival_ns: int | None = None
    think_ns: int | None = None
    keys: tuple[Hashable, ...] | None = None
    max_tokens: int | None = None


class Session(NamedTuple):
    """The turns of a conversation in their order. A request without a session has an empty name, and is one turn."""

    name: str
    turns: list[Turn]


class Call(NamedTuple):
    """A recorded call of a model; times are nanoseconds of any clock."""

    begins_ns: int
    ends_ns: int
    session: str
    turn: Turn


def recorded_sessions(calls: Iterable[Call]) -> tuple[list[Session], list[str]]:
    """Return sessions of recorded calls, with think times from the end of an answer to the next call, and cautions.

    A call that begins before all earlier calls of its session have ended follows none of them. It opens a session of
    its own at its recorded time, which later calls continue; a caution states the number of such calls.
    """
    ordered = sorted(calls, key=lambda call: (call.begins_ns, call.ends_ns))
    sessions: list[Session] = []
    open_at: dict[str, list[tuple[int, Session]]] = {}  # by name: the parallel sessions, and the end of the last call
    for begins_ns, ends_ns, name, turn in ordered:
        parallel = open_at.setdefault(name, []) if name else []
        ended = [at for at, (end_ns, _) in enumerate(parallel) if end_ns <= begins_ns]
        if ended:
            at = max(ended, key=lambda at: parallel[at][0])
            end_ns, session = parallel[at]
            session.turns.append(replace(turn, think_ns=begins_ns - end_ns))
            parallel[at] = ends_ns, session
        else:
            called = f"{name}~{len(parallel) + 1}" if parallel else name
            session = Session(called, [replace(turn, arrival_ns=begins_ns - ordered[0].begins_ns)])
            sessions.append(session)
            parallel.append((ends_ns, session))
    apart = sum(len(parallel) - 1 for parallel in open_at.values())
    caution = f"{apart} calls overlap with others of their session (subagents, for example); each begins a session of "
    return sessions, [caution + "its own at its recorded time"] if apart else []


def workload_of_sessions(
    path: Path,
    sessions: Sequence[Session],
    assumed: Assumed = NOTHING,
    block_tokens: int = 1,
    cautions: Sequence[str] = (),
) -> Workload:
    """Return the workload of `sessions`, named after the file; `block_tokens` is the length of a block of `Turn.keys`.

    Logs `cautions`, and one if think times are drawn.

    Raises UserError if arrivals are missing or stated twice, and if a conversation becomes too long.
    """
    drawn = _Drawn(path, sessions, assumed)
    order = sorted(
        (arrival_ns, number, at, think_ns)
        for number, session in enumerate(sessions)
        for at, (arrival_ns, think_ns) in enumerate(drawn.times(session))
    )
    prompts, last = _Prompts(block_tokens), dict[int, tuple[WorkloadRequest, Turn]]()
    requests = []
    for id_, (arrival_ns, number, at, think_ns) in enumerate(order):
        session = sessions[number]
        turn, alone = session.turns[at], len(session.turns) == 1
        prompt = prompts.of_turn(id_, turn, last.get(number), alone)
        output = drawn.output(turn)
        limit = turn.max_tokens if turn.max_tokens is None else max(turn.max_tokens, output)
        request = WorkloadRequest(
            id_, arrival_ns, prompt, output, session=session.name, turn=at, think_ns=think_ns, max_tokens=limit
        )
        if request.prompt_len > LONGEST:
            raise UserError("trace", str(path), f"has a conversation of more than {LONGEST:,} tokens ({session.name})")
        requests.append(request)
        last[number] = request, turn
    workload = named_workload(path, requests)
    for caution in (*cautions, *drawn.cautions):  # at the end, so that an error is the only line
        _LOG.warning("%s: %s", path.name, caution)
    return workload


class _Drawn:
    """Arrivals, think times and lengths of answers: what the file states, and random draws for the rest."""

    def __init__(self, path: Path, sessions: Sequence[Session], assumed: Assumed) -> None:
        rngs = [np.random.Generator(np.random.PCG64(seed)) for seed in np.random.SeedSequence(assumed.seed).spawn(3)]
        self._path = path
        self._assumed = assumed
        self._think_ms = _stream(lambda: assumed.think_ms.draw(rngs[1], _CHUNK))
        answers = assumed.output
        self._output = _stream(lambda: answers.draw(rngs[2], _CHUNK)) if answers else None
        untimed = sum(session.turns[0].arrival_ns is None for session in sessions)
        later = [turn for session in sessions for turn in session.turns[1:]]
        thinking = sum(turn.arrival_ns is None and turn.think_ns is None for turn in later)
        if untimed not in (0, len(sessions)):
            raise UserError("trace", str(path), f"states no arrival for {untimed} of {len(sessions)} sessions")
        if untimed and assumed.arrivals is None:
            remedy = "states no arrival times; tokentwin trace convert --arrivals poisson:rate=2 adds them"
            raise UserError("trace", str(path), remedy)
        open_ended = any(turn.output is None for session in sessions for turn in session.turns)
        needed = {"arrivals": untimed, "think_ms": thinking, "output": open_ended}
        for name in sorted(assumed.model_fields_set & {*needed, "seed"}):
            if sessions and not needed.get(name, any(needed.values())):
                raise UserError(name, None, f"is not needed, because {path.name} states it all; leave it out")
        times = assumed.arrivals.times_ns(rngs[0], _CHUNK) if assumed.arrivals else iter(())
        self._arrivals = (at for chunk in times for at in chunk.tolist())
        mean = f"{thinking} think times are not stated; they are drawn with mean {assumed.think_ms.expected / 1e3:g} s"
        self.cautions = [mean] if thinking else []

    def times(self, session: Session) -> Iterator[tuple[int, int | None]]:
        """Yield the arrival of each turn if answers took no time, and its think time; None for the first turn."""
        arrival_ns = 0
        for at, turn in enumerate(session.turns):
            think_ns: int | None = None
            if at == 0:
                arrival_ns = next(self._arrivals) if turn.arrival_ns is None else turn.arrival_ns
            else:
                think_ns = turn.think_ns
                if think_ns is None:
                    think_ns = next(self._think_ms) * 1_000_000 if turn.arrival_ns is None else 0
                arrival_ns = max(arrival_ns + think_ns, turn.arrival_ns or 0)
            if arrival_ns > LATEST_NS:
                raise UserError("trace", str(self._path), "lasts longer than 146 years; lower its times")
            yield arrival_ns, think_ns

    def output(self, turn: Turn) -> int:
        if turn.output is not None:
            return turn.output
        if self._output is None:
            remedy = "states no length of an answer; tokentwin trace convert --output lognormal:mean=250,sigma=0.8 does"
            raise UserError("trace", str(self._path), remedy)
        return next(self._output)


class _Prompts:
    """The prompts of turns in order of arrival: what a turn shares with the turn before, and with other sessions."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._paths = SharedPrefixes(block_tokens)
        self._whole: dict[tuple[Hashable, int], tuple[Segment, ...]] = {}  # prompts by their last key and length

    def of_turn(
        self, id_: int, turn: Turn, before: tuple[WorkloadRequest, Turn] | None, alone: bool
    ) -> tuple[Segment, ...]:
        """Return the segments of the prompt of a request with this id.

        Without keys, a prompt as long as the previous prompt with its answer extends both. A shorter one extends the
        previous prompt only (the answer's reasoning was removed), and one shorter than that shares nothing (the
        context was compacted).
        """
        if turn.keys is not None:
            return self._keyed(id_, turn, before)
        name = PRIVATE if alone else f"p{id_}"
        if before is None:
            return ((name, turn.prompt or turn.added or 1),)
        request = before[0]
        history: tuple[Segment, ...] = (*request.prompt, (f"out:{request.id}", request.output_len))
        ends = request.prompt_len + request.output_len
        if turn.prompt is None:
            return (*history, (name, turn.added)) if turn.added else history
        if turn.prompt < ends:
            ends = request.prompt_len if turn.prompt >= request.prompt_len else 0
            history = request.prompt if ends else ()
        return (*history, (name, turn.prompt - ends)) if turn.prompt > ends else history

    def _keyed(self, id_: int, turn: Turn, before: tuple[WorkloadRequest, Turn] | None) -> tuple[Segment, ...]:
        assert turn.keys is not None and turn.prompt is not None
        keys = turn.keys[: turn.prompt // self._block_tokens]
        if before is not None:
            request, earlier = before
            ends = request.prompt_len + request.output_len
            whole = (earlier.keys or ())[: request.prompt_len // self._block_tokens]
            if ends <= turn.prompt and whole == keys[: len(whole)]:
                self._paths.answered(request.id, request.prompt, keys[: ends // self._block_tokens], ends)
                history = (*request.prompt, (f"out:{request.id}", request.output_len))
                return self._paths.extended(id_, history, keys, turn.prompt)
        prompt = self._paths.prompt(id_, keys, turn.prompt)
        if len(turn.keys) > len(keys):  # the key of a last, partial block, which an equal prompt has, too
            return self._whole.setdefault((turn.keys[-1], turn.prompt), prompt)
        return prompt


def _stream(draw: Callable[[], np.ndarray]) -> Iterator[int]:
    while True:
        yield from draw().tolist()
