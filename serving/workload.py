"""Workloads: requests with prompts that are made of segments, not of tokens.

A prompt is a sequence of `(segment name, number of tokens)`. Two tokens are equal if and only if they have the same
position in segments of the same name. `("out:12", 80)` is the first 80 output tokens of request 12, so that a later
turn of a conversation can reuse them. The empty name `""` marks *private* tokens, which no other request can have. If
no request shares tokens, the simulator counts blocks instead of identifying them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from tokentwin.serving.errors import UserError

Segment = tuple[str, int]
Name = str | bytes | int
Span = tuple[Name, int, int]  # (name, first position, end position) in a sequence

PRIVATE = ""


class Item(NamedTuple):
    """An image, a video or a clip of audio in a prompt.

    It takes the `tokens` placeholder tokens from token `offset` of the prompt on, as many as an encoder makes
    embeddings of it. Items with one `content` and one number of tokens are equal; an empty `content` equals no other.
    An encoder reads a video's `frames` apart from one another, for Qwen's models a frame being two pictures.
    """

    offset: int
    tokens: int
    content: str = ""
    kind: str = "image"
    frames: int = 1

    @property
    def end(self) -> int:
        return self.offset + self.tokens


STOPPED = "a stop string ended it"  # reason of a request that finished at its `stop_ns`


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request as it arrives. `arrival_ns` is the *intended* arrival time since the start of the workload.

    `output_len` is the number of tokens that it generates; 0 for a *pooling request*, which wants an embedding or a
    score of its prompt and ends with the step that computes the prompt's last token. `max_tokens` is the number that it
    may generate; a stop token ends it earlier if `output_len` is smaller. None means that it may generate `output_len`
    tokens. A smaller `priority` is more urgent, as in vLLM. `prompt_len` is the sum of the segments' lengths.

    `session` names the conversation, empty if there is none, and `turn` is the request's turn in it, from 0. A turn
    with a `think_ns` comes this time after the end of the previous turn, but not before its `arrival_ns`. A turn
    without one comes at `arrival_ns`, even if the previous turn is not answered. With `ends_session` the client says
    that no turn follows (`with_session_ends`). At `cancel_ns` since the start of the
    workload the client hangs up, if the request has not ended. At `stop_ns` a stop string ends the answer.

    The answer of a `structured` request follows a grammar, so each of its tokens needs a mask. Compiling the grammar
    takes `grammar_compile_ns` from the time when an engine gets the request; the request waits for it. With
    `skip_reading_prefix_cache` the engine computes the whole prompt, as it must if log-probabilities of the prompt are
    wanted. `drafted` holds the recorded drafts, if they are known: it maps the number of output tokens so far to the
    draft proposed there, with True for each of its tokens that is accepted. `adapter` names the LoRA adapter that
    answers the request, empty for the base model. Requests with different adapters share no KV. `items` are the images,
    videos and audio in the prompt, in order and apart from one another. A request that `changes_logits` has penalties,
    a bias or other rules for its tokens; each of its tokens takes more time. If a request `scores_prompt`,
    log-probabilities of its prompt are wanted, so logits are computed for each token of the prompt. `predicted_len` is
    the number of output tokens that a predictor expects; None if there is none.
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
    adapter: str = ""
    items: tuple[Item, ...] = ()
    changes_logits: bool = False
    scores_prompt: bool = False
    ends_session: bool = False
    predicted_len: int | None = None
    drafted: Mapping[int, tuple[bool, ...]] | None = field(default=None, compare=False, repr=False)
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_len", sum(tokens for _, tokens in self.prompt))

    @property
    def labels(self) -> dict[str, Any]:
        """The request's id and labels, as columns of the dataset `requests` of a recording."""
        known = {name: getattr(self, name) for name in ("tenant", "slo_class", "session", "turn", "priority")}
        return {"request_id": self.id, **known}

    @property
    def content(self) -> tuple[Segment, ...]:
        """The prompt with names that tell items apart: segments are cut at items, unless they are private."""
        return _cut_at_items(self.prompt, self.items) if self.items else self.prompt

    @property
    def pools(self) -> bool:
        """True for a pooling request, which gets no tokens."""
        return self.output_len == 0

    @property
    def output_limit(self) -> int:
        """The maximum number of output tokens. A scheduler or a router knows this number, but not `output_len`."""
        return self.output_len if self.max_tokens is None else max(self.max_tokens, self.output_len)

    def server_view(self, predicted_len: int | None = None) -> WorkloadRequest:
        """Return what a server knows of the request: `output_len` is its limit, and later events are left out."""
        limit = 0 if self.pools else self.output_limit
        if limit == self.output_len and self.leaves_ns is None and predicted_len is None:
            return self
        return replace(self, output_len=limit, cancel_ns=None, stop_ns=None, predicted_len=predicted_len)

    @property
    def leaves_ns(self) -> int | None:
        """The time from which the client wants no more tokens: `stop_ns` if set, otherwise `cancel_ns`."""
        return self.cancel_ns if self.stop_ns is None else self.stop_ns


REQUEST_FIELDS = tuple(one.name for one in fields(WorkloadRequest))
as_it_is = attrgetter(*REQUEST_FIELDS)
"""The present REQUEST_FIELDS of a request; they can be compared later, because a user's code may change a request."""


@dataclass(frozen=True)
class Workload:
    """The requests, ordered by `(arrival_ns, id)`, and how they are offered.

    `requests` can be iterated more than once. It need not be a list, so that a million synthetic requests can be made
    one by one. With `concurrency` the loop is closed: at most this number of requests is outstanding, and the end of
    one request releases the next, not before its `arrival_ns`; the time of release becomes its arrival time. Requests
    of a closed loop that would be released at the same time are sent `stagger_ns` apart, as a real client sends them.
    If `shares_prefixes` is False, no request can reuse the tokens of another. Requests that arrive before `warm_up_ns`,
    and those with an id below `warm_up_requests`, are served but not counted; a recording has no row for them. Requests
    that would become due at `until_ns` or later are never sent, so users who wait for answers stop together.
    """

    requests: Iterable[WorkloadRequest]
    name: str = "workload"
    concurrency: int | None = None
    shares_prefixes: bool = True
    stagger_ns: int = 0
    warm_up_ns: int = 0
    warm_up_requests: int = 0
    until_ns: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError for values of another kind, because users make workloads, too."""
        requests = self.requests
        if not isinstance(requests, Iterable) or isinstance(requests, str):
            raise UserError("requests", repr(requests), "must be a list of WorkloadRequest")
        if isinstance(requests, (list, tuple)) and not all(isinstance(one, WorkloadRequest) for one in requests):
            raise UserError("requests", None, "must each be a WorkloadRequest")
        if not isinstance(self.name, str):
            raise UserError("name", repr(self.name), "must be a string")
        for name in ("concurrency", "stagger_ns", "warm_up_ns", "warm_up_requests", "until_ns"):
            value, least = getattr(self, name), 1 if name == "concurrency" else 0
            unset = value is None and name in ("concurrency", "until_ns")
            if not unset and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise UserError(name, repr(value), f"must be a whole number of at least {least}")


def what_changed(before: tuple[object, ...], now: WorkloadRequest) -> str:
    """Return a description of the first field of `now` that has changed since `before`; empty if none has."""
    for name, was, is_now in zip(REQUEST_FIELDS, before, as_it_is(now), strict=True):
        if was != is_now:
            return f"came with {name} {was}, which is {is_now} now"
    return ""


def with_session_ends(workload: Workload) -> Workload:
    """Return `workload`, with its requests in a list, in which the last turn of each session ends the session.

    A workload that says itself where sessions end stays as it is.
    """
    requests = list(workload.requests)
    if any(request.ends_session for request in requests):
        return replace(workload, requests=requests)
    last = {request.session: request.id for request in requests if request.session}
    ended = [replace(r, ends_session=True) if last.get(r.session) == r.id else r for r in requests]
    return replace(workload, requests=ended)


def shares_prefixes(requests: Iterable[WorkloadRequest]) -> bool:
    """Return whether any request could reuse tokens of another.

    This is so if two prompts name the same segment, or a prompt contains output tokens.
    """
    seen: set[str] = set()
    for request in requests:
        names = {name for name, _ in request.prompt if name != PRIVATE}
        if any(name.startswith("out:") for name in names) or not seen.isdisjoint(names):
            return True
        seen |= names
    return False


def common_prefix(requests: Iterable[WorkloadRequest]) -> int:
    """Return the number of tokens with which the prompts of all requests start; 0 if a request does not read the cache.

    A single request shares its prompt with no other, so the number is 0 for it, too. Different adapters share nothing.
    """
    rest = iter(requests)
    first = next(rest, None)
    common, alone = () if first is None else first.content, True
    for request in rest:
        common, alone = _common_start(common, request.content), False
        if not common or request.skip_reading_prefix_cache or (first and request.adapter != first.adapter):
            return 0
    return 0 if alone or first is None or first.skip_reading_prefix_cache else sum(tokens for _, tokens in common)


def _common_start(one: tuple[Segment, ...], other: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return the segments with which two prompts start; the last one may be cut."""
    same: list[Segment] = []
    for (name, tokens), (named, count) in zip(one, other, strict=False):
        if name != named or name == PRIVATE:
            break
        same.append((name, min(tokens, count)))
        if tokens != count:
            break
    return tuple(same)


def _cut_at_items(prompt: tuple[Segment, ...], items: tuple[Item, ...]) -> tuple[Segment, ...]:
    """Return the segments of `prompt`, cut where items begin and end.

    The name of a part says where it begins in its segment, and of which item it is a part. As in vLLM, whose keys of
    blocks include items and where they begin, tokens under an item are equal only if the item is.
    """
    parts: list[Segment] = []
    begin = 0
    for name, tokens in prompt:
        end = begin + tokens
        within = [item for item in items if item.offset < end and item.end > begin] if name != PRIVATE else []
        edges = {begin, end} | {edge for item in within for edge in (item.offset, item.end) if begin < edge < end}
        ordered = sorted(edges)
        for at, until in pairwise(ordered):
            own = next((item for item in within if item.offset <= at < item.end), None)
            label = f"\0{at - begin}:{name}" if at > begin else name
            if own is not None:
                label = f"\0{own.content}:{own.tokens}:{at - own.offset}{label}" if own.content else PRIVATE
            parts.append((label, until - at))
        begin = end
    return tuple(parts)


def prompt_of(*parts: Segment) -> tuple[Segment, ...]:
    """Return the prompt made of these segments, without empty segments."""
    return tuple(part for part in parts if part[1])
