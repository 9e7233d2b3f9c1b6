"""The questions that a server is asked: short workloads, of which each reveals something else.

A question is sent as any other workload, and its answer is a recording of what the client saw. All prompts of a
question are new to the server's prefix cache unless they name a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest

_ANSWER = 8  # output tokens of a prompt whose prefill is of interest
_MOST_TOKENS = 200_000
INTO_DECODES = "prompts-into"
_SHORT = 16
_MEAN_PROMPT = 672  # mean length of the prompts of a closed loop
_PREFIXES = (265, 272, 288, 320, 384)  # 1, 16, 32, 64 and 128 tokens divide one more of them each
_THINK_NS = (101_000_000, 73_000_000, 89_000_000, 59_000_000, 67_000_000)  # no multiples of a step's time


class Bounds(NamedTuple):
    """What a question may ask for.

    Attributes:
        concurrency: maximum number of unfinished requests at a time
        longest: maximum number of tokens of a prompt with its answer
        tokens: maximum number of tokens of all prompts of a question, unless the question needs more
        steps: number of tokens of an answer during which prompts are sent
    """

    concurrency: int
    longest: int
    tokens: int = _MOST_TOKENS
    steps: int = 500


@dataclass(frozen=True)
class Question:
    """A workload, with a name that is unique among the questions and a description of what it reveals."""

    name: str
    reveals: str
    workload: Workload


def lone_prompts(bounds: Bounds) -> Question:
    """Return prompts of increasing length, one after another."""
    lengths = [length for length in _doubling(_SHORT, 16_384) if length + _ANSWER <= bounds.longest]
    requests = [_request(number, 0, length, _ANSWER) for number, length in enumerate(2 * lengths)]
    workload = Workload(requests, "lone prompts", concurrency=1, shares_prefixes=False)
    return Question("lone-prompts", "the time of a prefill by its length", workload)


def two_lengths(short: int, long: int, bounds: Bounds) -> Question:
    """Return prompts of two lengths in turns, one after another."""
    requests = [_request(number, 0, (short, min(long, bounds.longest - 1))[number % 2], 1) for number in range(10)]
    workload = Workload(requests, "two lengths", concurrency=1, shares_prefixes=False)
    return Question("two-lengths", "whether prefills take as long as before", workload)


def plateau(rows: int, context: int, bounds: Bounds) -> Question:
    """Return `rows` equal requests at once, whose prompts have `context` tokens and which decode together."""
    context = min(context, bounds.longest - 64)
    requests = [_request(number, 0, context, 64) for number in range(rows)]
    workload = Workload(requests, f"plateau of {rows} rows", shares_prefixes=False)
    return Question(f"plateau-{rows}-{context}", "the time of a decode step by rows and context", workload)


def plateaus(bounds: Bounds) -> list[Question]:
    """Return plateaus over a ladder of rows, with short contexts."""
    rows = [rows for rows in (1, 4, 16, 64, 256) if rows <= min(bounds.concurrency, bounds.tokens // 128)]
    return [plateau(count, 128, bounds) for count in rows]


def long_plateaus(bounds: Bounds) -> list[Question]:
    """Return plateaus of a few rows with long contexts."""
    rows = [rows for rows in (4, 16, 48) if rows <= bounds.concurrency]
    return [plateau(count, min(4096, bounds.tokens // count), bounds) for count in rows]


def prompts_into_decodes(streams: int, bounds: Bounds) -> Question:
    """Return prompts of increasing length that are sent one after another while `streams` requests decode."""
    lengths = [
        length for length in _doubling(64, 16_384) if length + _ANSWER <= min(bounds.longest, bounds.tokens // 2)
    ]
    lengths += 8 * [64]  # each at another moment of a step
    decoding = [_request(number, 0, 64, min(bounds.steps, bounds.longest - 64)) for number in range(streams)]
    prompts = [
        replace(
            _request(streams + turn, 0, length, 1),
            session="prompts",
            turn=turn,
            think_ns=_THINK_NS[turn % len(_THINK_NS)],
        )
        for turn, length in enumerate(lengths)
    ]
    workload = Workload(decoding + prompts, "prompts into decodes", shares_prefixes=False)
    return Question(
        f"{INTO_DECODES}-{streams}", "whether prompts and decodes share steps, and in which chunks", workload
    )


def prompts_at_once(length: int, bounds: Bounds) -> Question:
    """Return prompts of `length` tokens that are sent at the same time and answered with one token."""
    length = min(length, bounds.longest - 1)
    count = min(bounds.concurrency, max(bounds.tokens // 5 // length, 4))
    workload = Workload([_request(n, 0, length, 1) for n in range(count)], "prompts at once", shares_prefixes=False)
    return Question(f"at-once-{length}", "how many prompts a step computes, and its time", workload)


def burst(bounds: Bounds) -> Question:
    """Return as many short requests at once as are allowed."""
    workload = Workload([_request(n, 0, _SHORT, 48) for n in range(bounds.concurrency)], "burst", shares_prefixes=False)
    return Question("burst", "how many requests run at the same time", workload)


def full_memory(tokens: int, count: int, budget: int, bounds: Bounds) -> Question:
    """Return `count` equal requests at once whose prompts have `tokens` tokens together, or as many as are allowed.

    Steps of `budget` tokens compute all prompts before the first answer ends.
    """
    length = min(max(tokens // count, _SHORT), 3 * bounds.longest // 4)
    output = min(count * length // budget + 48, bounds.longest - length)
    requests = [_request(number, 0, length, output) for number in range(count)]
    workload = Workload(requests, "full memory", shares_prefixes=False)
    return Question(f"full-memory-{count}-{length}", "how many KV blocks there are", workload)


def repeated_prompt(replicas: int, bounds: Bounds) -> Question:
    """Return one long prompt again and again, one after another, twice more than there are replicas."""
    length = min(4096, bounds.longest - _ANSWER)
    requests = [WorkloadRequest(number, 0, (("repeated", length),), _ANSWER) for number in range(replicas + 2)]
    return Question("repeated-prompt", "whether prefixes are cached", Workload(requests, "repeat", concurrency=1))


def cached_prefixes(budget: int, replicas: int, bounds: Bounds) -> Question | None:
    """Return prompts with a cached prefix and `budget` new tokens, which are one step if the whole prefix is found.

    The lengths of the prefixes are multiples of different powers of two, so each block size leaves the end of others
    uncached. Each of `replicas` engines gets the prefix first. None if the prompts would be too long.
    """
    if budget + _PREFIXES[-1] + 1 > bounds.longest:
        return None
    segments = []
    for number, length in enumerate(2 * _PREFIXES):
        prefix = (f"prefix {number}", length)
        segments += [*replicas * [(prefix,)], (prefix, (PRIVATE, budget))]
    requests = [WorkloadRequest(number, 0, prompt, 1) for number, prompt in enumerate(segments)]
    workload = Workload(requests, "prefixes", concurrency=1)
    return Question("cached-prefixes", "the block size of the prefix cache", workload)


def closed_loop(rows: int, bounds: Bounds) -> Question:
    """Return a closed loop of `rows` clients, whose prompts and answers have different lengths."""
    count = min(max(4 * rows, 24), max(rows + 8, bounds.tokens // _MEAN_PROMPT))
    requests = [
        _request(number, 0, min(64 << (number % 6), bounds.longest - 96), 32 + 16 * (number % 5))
        for number in range(count)
    ]
    workload = Workload(requests, f"loop of {rows} clients", concurrency=rows, shares_prefixes=False)
    return Question(f"loop-{rows}", "the time of steps with prompts and decodes", workload)


def _request(number: int, arrival_ns: int, prompt: int, output: int) -> WorkloadRequest:
    return WorkloadRequest(number, arrival_ns, ((PRIVATE, prompt),), output)


def _doubling(first: int, last: int) -> list[int]:
    lengths = [first]
    while lengths[-1] < last:
        lengths.append(2 * lengths[-1])
    return lengths
