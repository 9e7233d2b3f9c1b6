"""The first sentences about a plan: a fleet with its risk, and the fleets that cost little more.

The command line, the Plan page and reports use the same words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from planning.plan.document import Choices, percent
from planning.plan.frontier import Point
from serving.figures import counted, shown_change, shown_number, shown_share, shown_usd

if TYPE_CHECKING:
    from planning.plan.first_answer import FirstAnswer

_NAMED = 3  # maximum number of engines that a first answer names
_NEAR = 0.25  # share of the answer's price by which a fleet that is shown beside it may cost more


def first_answer(answer: FirstAnswer | None) -> str:
    """Return in words the range in which the answer lies; `answer` is None if probably no fleet meets the SLOs."""
    if answer is None:
        return "From quick estimates: probably no fleet meets the SLOs, because every fleet that was tried breaks them"
    (few, many), (least, most) = answer.gpus, answer.usd_per_hour
    usd = " to ".join(dict.fromkeys(map(shown_usd, (least, most))))
    *named, last = answer.engines
    if len(named) >= _NAMED:
        named, last = named[: _NAMED - 1], f"{len(answer.engines) - _NAMED + 1} others"
    engines = " or ".join([", ".join(named), last] if named else [last])
    return f"From quick estimates: {f'{few:,} to ' if few < many else ''}{counted(many, 'GPU')}, {usd}/h, of {engines}"


def risk(by_risk: Choices | None) -> str:
    """Return a text like `The SLOs hold in 92 % of cases. If steps are slow, 97.0 % of the requests keep them`."""
    holds = None if by_risk is None else by_risk.recommended.holds
    if by_risk is None or holds is None:
        return "The probability that the SLOs hold is unknown."
    chosen, whole = by_risk.recommended, by_risk.whole_interval
    slow = f"If steps are slow, {shown_share(chosen.if_slow, 1)} of the requests keep them"
    if whole is None:
        slow += ", and no number of GPUs holds the SLOs"
    elif whole.replicas <= chosen.replicas:
        slow = "They hold even if steps are slow"
    return f"The SLOs hold in {percent(holds)} of cases. {slow}."


def choices(by_risk: Choices) -> str:
    """Return the GPUs for more and for less risk: `12 GPUs would be enough if steps were as predicted`."""
    likely, chosen, whole = by_risk.as_predicted, by_risk.recommended, by_risk.whole_interval
    fewer = counted(likely.gpus, "GPU") if likely.gpus < chosen.gpus else "No fewer"
    text = f"{fewer} would be enough if steps were as predicted"
    if whole and whole.gpus > chosen.gpus:
        text += f", and {whole.gpus:,} for the complete 90 % interval of step times"
    return f"{text}."


def near_ties(best: Point, others: Sequence[Point], spares: int) -> Iterator[str]:
    """Yield the fleets that cost little more: `1 x TP4 B200: +11 % cost, half the GPUs, 75 instead of 50 ...`."""
    for other in others:
        if other.usd_per_hour <= (1 + _NEAR) * best.usd_per_hour:
            replicas = f"{other.replicas}+{spares}" if spares else f"{other.replicas}"
            yield f"{replicas} x {other.engine}: {', '.join(_compared(other, best))}"


def _compared(other: Point, best: Point) -> Iterator[str]:
    if best.usd_per_hour:
        change = 100 * (other.usd_per_hour / best.usd_per_hour - 1)
        yield "the same cost" if abs(change) < 0.5 else f"{shown_change(change, 0)} cost"
    ratios = {1.0: "as many GPUs", 0.5: "half the GPUs", 2.0: "twice the GPUs"}
    yield ratios.get(other.gpus / best.gpus) or f"{other.gpus:,} instead of {counted(best.gpus, 'GPU')}"
    if other.tok_s_user is not None and best.tok_s_user is not None:
        yield f"{shown_number(other.tok_s_user)} instead of {shown_number(best.tok_s_user)} tok/s per user"
