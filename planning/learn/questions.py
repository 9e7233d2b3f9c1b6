"""The questions that a server is asked: short workloads, of which each reveals something else.

A question is sent as any other workload, and its answer is a recording of what the client saw. All prompts of a
question are new to the server's prefix cache unless they name a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from serving.workload import PRIVATE, Workload, WorkloadRequest

_ANSWER = 8  # output tokens of a prompt whose prefill is of interest
_MOST_TOKENS = 200_000  # of the prompts of one question
_SHORT = 16
_THINK_NS = (101_000_000, 73_000_000, 89_000_000, 59_000_000, 67_000_000)  # no multiples of a step's time


class Bounds(NamedTuple):
    """What a question may ask for: unfinished requests at a time, and tokens of a prompt with its answer."""

    concurrency: int
    longest: int


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
    """Return plateaus over a ladder of rows, with short and long contexts."""
    short = [plateau(rows, 128, bounds) for rows in (1, 4, 16, 64, 256) if rows <= bounds.concurrency]
    rows = [rows for rows in (4, 16, 48) if rows <= bounds.concurrency]
    return short + [plateau(count, min(4096, _MOST_TOKENS // count), bounds) for count in rows]


def prompts_into_decodes(streams: int, bounds: Bounds) -> Question:
    """Return prompts of increasing length that are sent one after another while `streams` requests decode."""
    lengths = [length for length in _doubling(64, 16_384) if length + _ANSWER <= bounds.longest]
    lengths += 8 * [64]  # each at another moment of a step
    decoding = [_request(number, 0, 64, min(500, bounds.longest - 64)) for number in range(streams)]
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
    return Question(f"prompts-into-{streams}", "whether prompts and decodes share steps, and in which chunks", workload)


def prompts_at_once(length: int, bounds: Bounds) -> Question:
    """Return prompts of `length` tokens that are sent at the same time and answered with one token."""
    length = min(length, bounds.longest - 1)
    count = min(bounds.concurrency, max(_MOST_TOKENS // 5 // length, 4))
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


def repeated_prompt(bounds: Bounds) -> Question:
    """Return one long prompt three times, one after another."""
    length = min(4096, bounds.longest - _ANSWER)
    requests = [WorkloadRequest(number, 0, (("repeated", length),), _ANSWER) for number in range(3)]
    return Question("repeated-prompt", "whether prefixes are cached", Workload(requests, "repeat", concurrency=1))


def closed_loop(rows: int, bounds: Bounds) -> Question:
    """Return a closed loop of `rows` clients, whose prompts and answers have different lengths."""
    requests = [
        _request(n, 0, min(64 << (n % 6), bounds.longest - 96), 32 + 16 * (n % 5)) for n in range(max(4 * rows, 24))
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
