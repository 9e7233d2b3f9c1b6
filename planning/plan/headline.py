"""What a plan says first, of its document: a choice with its risk, and what comes close to it.

The command line, the Plan page and reports say the same words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planning.plan.document import Choices
from planning.plan.frontier import Point
from planning.plan.sensitivity import SURE

_NEAR = 0.25  # dearer than the answer, as a share of its price: still beside it


def choices(found: Choices) -> str:
    """`12 GPUs if steps are as predicted; 16 hold in 92 % of cases ...; 20 for the whole 90 % interval`."""
    likely, chosen, whole = found.as_predicted, found.recommended, found.whole_interval
    holds = "hold with unknown probability" if chosen.holds is None else f"hold in {percent(chosen.holds)} of cases"
    if whole is None or whole.replicas > chosen.replicas:
        holds += f", and keep {share(chosen.if_slow)} of the requests within the SLOs even if steps are slow"
    parts = [(likely.gpus, f"{gpus(likely.gpus)} if steps are as predicted"), (chosen.gpus, f"{chosen.gpus:,} {holds}")]
    if whole is not None:
        parts.append((whole.gpus, f"{whole.gpus:,} for the whole 90 % interval of step times"))
    told = [text for _, text in sorted(parts, key=lambda part: part[0])]
    return "; ".join([*told, *(["no number for the whole 90 % interval of step times"] if whole is None else ())])


def near_ties(best: Point, others: Sequence[Point], spares: int) -> Iterator[str]:
    """Of the others those that cost little more: `1 x TP4 B200: +11 % cost, half the GPUs, 75 instead of 50 ...`."""
    for other in others:
        if other.usd_per_hour <= (1 + _NEAR) * best.usd_per_hour:
            replicas = f"{other.replicas}+{spares}" if spares else f"{other.replicas}"
            yield f"{replicas} x {other.engine}: {', '.join(_compared(other, best))}"


def _compared(other: Point, best: Point) -> Iterator[str]:
    if best.usd_per_hour:
        change = 100 * (other.usd_per_hour / best.usd_per_hour - 1)
        yield "the same cost" if abs(change) < 0.5 else f"{change:+.0f} % cost"
    ratios = {1.0: "as many GPUs", 0.5: "half the GPUs", 2.0: "twice the GPUs"}
    yield ratios.get(other.gpus / best.gpus) or f"{other.gpus:,} instead of {gpus(best.gpus)}"
    if other.tok_s_user is not None and best.tok_s_user is not None:
        yield f"{other.tok_s_user:,.0f} instead of {best.tok_s_user:,.0f} tok/s a user"


def percent(probability: float) -> str:
    """In whole percent; the ends are open."""
    if probability >= SURE:
        return f"{100 * SURE:.0f} % or more"
    return f"{100 * probability:.0f} %" if probability > 0 else "less than 1 %"


def share(of_requests: float) -> str:
    """Never rounded up to all of them."""
    return "100 %" if of_requests == 1 else f"{min(100 * of_requests, 99.9):.1f} %"


def gpus(number: int) -> str:
    """`1 GPU`, `12 GPUs`."""
    return f"{number:,} GPU{'' if number == 1 else 's'}"
