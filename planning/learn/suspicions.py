"""Servers whose answers are not those of one engine, and would only mislead a fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planning.learn.answers import Answer

_BUNDLED = 0.1  # share of the mean time between two tokens below which they came together
_SAME = 0.15  # difference of the logarithms of step times between engines that are alike
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
    gaps = [np.diff(times) for times in lone.tokens_ns.values() if len(times) > 2]
    if not gaps:
        return "sends each answer in one piece; ask the server behind the proxy, with streaming on"
    together = np.mean([np.mean(gap < _BUNDLED * gap.mean()) for gap in gaps])
    if together > 0.3:
        share = f"{100 * together:.0f} % of the tokens come together with the one before"
        return f"buffers tokens ({share}); ask the server behind the proxy"
    steps = np.sort(np.log([np.median(gap) for gap in gaps]))
    middle = len(steps) // 2
    slow, fast = np.median(steps[middle:]), np.median(steps[:middle]) if middle else steps[0]
    if len(steps) >= 6 and slow - fast > _SAME and np.diff(steps).max() > _SAME / 2:
        times = " and ".join(f"{np.exp(step) / 1e6:.1f}" for step in (fast, slow))
        return (
            f"decodes alone in steps of {times} ms; behind the URL are different GPUs, or other traffic: ask one engine"
        )
    if repeated is not None:
        again = [np.median(np.diff(times)) for _, times in sorted(repeated.tokens_ns.items()) if len(times) > 2][1:]
        if again and np.log(np.median(again)) < fast - 1.0:
            return "answers a repeated prompt from a cache of answers; switch the cache off"
    return ""
