"""Servers whose answers are not those of one engine, and would only mislead a fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokentwin.planning.learn.answers import Answer

_BUNDLED = 0.1  # share of the mean time between two tokens below which they came together
_SAME = 0.15  # difference of the logarithms of step times between engines that are alike
_TURNS = 2  # changes between fast and slow, in the order of requests, that one change of speed explains
_LOST = 0.02  # share of requests that may stay without an answer


def suspicion(lone: Answer, repeated: Answer | None, answers: Sequence[Answer]) -> str:
    """Return why the answers cannot be those of one engine, with a remedy; empty if nothing speaks against it.

    `lone` and `repeated` are the answers to prompts that were sent one after another.
    """
    sent = sum(len(answer.tokens_ns) + answer.unanswered for answer in answers)
    lost = sum(answer.unanswered for answer in answers)
    if lost > _LOST * sent:
        return (
            f"left {lost} of {sent} requests without a whole answer; if it limits rates, lower --max-concurrency, "
            "or ask the server behind the limit"
        )
    gaps = [np.diff(times) for _, times in sorted(lone.tokens_ns.items()) if len(times) > 2]
    if not gaps:
        return "sends each answer in one piece; ask the server behind the proxy, with streaming on"
    together = np.mean([np.mean(gap < _BUNDLED * gap.mean()) for gap in gaps])
    if together > 0.3:
        share = f"{100 * together:.0f} % of the tokens come together with the one before"
        return f"buffers tokens ({share}); ask the server behind the proxy"
    steps = np.log([float(np.median(gap)) for gap in gaps])
    if speeds := _two_speeds(steps):
        fast, slow = (f"{np.exp(speed) / 1e6:.1f} ms" for speed in speeds)
        if np.count_nonzero(np.diff(steps > sum(speeds) / 2)) > _TURNS:
            times = f"decodes alone in steps of {fast} and {slow}"
            return f"{times}; behind the URL are different GPUs, or other traffic: ask one engine"
        return (
            f"changed its speed between steps of {fast} and {slow}; it warms up, or other traffic came or went: wait, "
            "then start with another output directory"
        )
    if repeated is not None:
        again = [np.median(np.diff(times)) for _, times in sorted(repeated.tokens_ns.items()) if len(times) > 2][1:]
        if again and np.log(np.median(again)) < np.median(steps) - 1.0:
            return "answers a repeated prompt from a cache of answers; switch the cache off"
    return ""


def _two_speeds(steps: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the two logarithms of step times around which `steps` lie; None if one describes them."""
    if len(steps) < 6:
        return None
    ordered = np.sort(steps)
    fast, slow = (float(np.median(half)) for half in np.array_split(ordered, 2))
    return (fast, slow) if slow - fast > _SAME and np.diff(ordered).max() > _SAME / 2 else None
