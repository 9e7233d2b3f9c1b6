"""The arrivals: requests whose prompts are segments, not tokens.

A prompt is a sequence of `(segment, tokens)`: token j of segment s equals token j of segment s anywhere, and nothing
else. `("out:12", 80)` is the first 80 output tokens of request 12, so multi-turn reuse needs no token either. The empty
name `""` marks *private* tokens, which no other request can have; the simulator keeps counts instead of block
identities when nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

Segment = tuple[str, int]
Name = str | bytes | int
Span = tuple[Name, int, int]  # tokens of that name from one position in a sequence to another

PRIVATE = ""
STOPPED = "a stop string ended it"  # reason of a request that finished at its `stop_ns`


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request as it arrives. `arrival_ns` is the *intended* arrival, from the start of the workload.

    `output_len` is the number of tokens that it generates. A request that may generate `max_tokens` ends before them
    with a stop token; None is as many as `output_len`. A more urgent request has a smaller `priority`, as in vLLM.
    `prompt_len` is the sum of the segments' lengths.

    `session` names the conversation of which the request is turn `turn`, from 0; an empty name is none. A turn with a
    `think_ns` comes that long after the turn before it has ended, and its `arrival_ns` is the earliest that could be;
    without one it comes at its arrival, answered or not. At `cancel_ns` from the start its client hangs up, if it still
    waits; or a stop string ends the answer at `stop_ns`.

    The answer of a `structured` request keeps to a grammar, so that each of its tokens needs a mask. The grammar is
    compiled for `grammar_compile_ns` from when an engine has the request, which waits until then. With
    `skip_reading_prefix_cache` it computes all of its prompt, as when log-probabilities of the prompt are wanted.
    `drafted` holds the fate of drafts, if the text is known: by the output tokens so far, whether each token that was
    then proposed is accepted.
    """

    id: int
    arrival_ns: int
    prompt: tuple[Segment, ...]
    output_len: int
    priority: int = 0
    tenant: str = ""
    slo_class: str = ""
    session: str = ""
    turn: int = 0
    think_ns: int | None = None
    cancel_ns: int | None = None
    structured: bool = False
    stop_ns: int | None = None
    skip_reading_prefix_cache: bool = False
    grammar_compile_ns: int = 0
    max_tokens: int | None = None
    drafted: Mapping[int, tuple[bool, ...]] | None = field(default=None, compare=False, repr=False)
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_len", sum(tokens for _, tokens in self.prompt))

    @property
    def labels(self) -> dict[str, Any]:
        """The request's number and labels, as columns of a recording's `requests`."""
        known = {name: getattr(self, name) for name in ("tenant", "slo_class", "session", "turn", "priority")}
        return {"request_id": self.id, **known}

    @property
    def output_limit(self) -> int:
        """The most tokens that it may generate: all that a scheduler or a router knows of `output_len`."""
        return self.output_len if self.max_tokens is None else max(self.max_tokens, self.output_len)

    @property
    def leaves_ns(self) -> int | None:
        """The time when its client wants no more of it: its `stop_ns`, or else its `cancel_ns`."""
        return self.cancel_ns if self.stop_ns is None else self.stop_ns


REQUEST_FIELDS = tuple(one.name for one in fields(WorkloadRequest))
as_it_is = attrgetter(*REQUEST_FIELDS)
"""The REQUEST_FIELDS of a request now: a user's code may write to what is frozen."""


@dataclass(frozen=True)
class Workload:
    """The requests, ordered by `(arrival_ns, id)`, and how they are offered.

    `requests` can be iterated more than once; it need not be a list, so a million synthetic requests stream. With
    `concurrency` the loop is closed: at most that many are outstanding, each next one in order is released when one
    completes (its arrival is that moment), and `arrival_ns` is the earliest release. Requests of a closed loop that
    would be released at the same moment come `stagger_ns` apart, as a client's do. `shares_prefixes` promises, when
    False, that no request can reuse another's tokens. Requests that arrive before `warm_up_ns` are served, but not
    counted: a recording has no row for them.
    """

    requests: Iterable[WorkloadRequest]
    name: str = "workload"
    concurrency: int | None = None
    shares_prefixes: bool = True
    stagger_ns: int = 0
    warm_up_ns: int = 0


def what_changed(before: tuple[object, ...], now: WorkloadRequest) -> str:
    """Return the first field of `now` that has changed since `before`, in words; empty if none has."""
    for name, was, is_now in zip(REQUEST_FIELDS, before, as_it_is(now), strict=True):
        if was != is_now:
            return f"came with {name} {was}, which is {is_now} now"
    return ""


def shares_prefixes(requests: Iterable[WorkloadRequest]) -> bool:
    """Return whether any request could reuse the tokens of another: a segment named twice, or an output used."""
    seen: set[str] = set()
    for request in requests:
        names = {name for name, _ in request.prompt if name != PRIVATE}
        if any(name.startswith("out:") for name in names) or not seen.isdisjoint(names):
            return True
        seen |= names
    return False


def prompt_of(*parts: Segment) -> tuple[Segment, ...]:
    """Return the prompt of these segments, without segments of no tokens."""
    return tuple(part for part in parts if part[1])
