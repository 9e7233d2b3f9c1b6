"""The fleets that meet the SLOs and that no other such fleet beats: in tokens per second of a user and of a GPU, or in
those of a user and tokens for a dollar.

Bisection tries fleets ever closer to the number of replicas at which an objective breaks, so points lie densest there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tokentwin.planning.engines import Engine
from tokentwin.planning.trial import Trial

_FIGURES = ("tok_s_user", "tok_s_gpu", "usd_per_mtok_out")


@dataclass(frozen=True)
class Point:
    """One simulated fleet: output tokens per second of the median user and of a GPU, dollars per million of each kind.

    Tokens of a GPU and for a dollar are those of steady operation (`steady`). Spares are paid for but carry nothing;
    dollars per million tokens of a kind are of all dollars. `mark` and `reason` are those of its `Figures`.
    """

    engine: str
    replicas: int
    gpus: int
    usd_per_hour: float
    tok_s_user: float
    tok_s_gpu: float
    usd_per_mtok_out: float
    usd_per_mtok_total: float
    attainment: float
    met: bool
    mark: str
    reason: str


def point(engine: Engine, trial: Trial, spares: int = 0) -> Point:
    """The point of a trial that ran to its end. Raises ValueError for one that was stopped."""
    figures = trial.figures
    if figures is None:
        raise ValueError("a trial that was stopped early has no figures")
    bought = trial.replicas + spares
    usd = bought * engine.usd_per_hour
    output = figures.steady.output_throughput
    return Point(
        engine=engine.name,
        replicas=trial.replicas,
        gpus=bought * engine.gpus,
        usd_per_hour=usd,
        tok_s_user=figures.tok_s_user,
        tok_s_gpu=output / (bought * engine.gpus),
        usd_per_mtok_out=_per_million(usd, output),
        usd_per_mtok_total=_per_million(usd, output + figures.steady.input_throughput),
        attainment=figures.attainment,
        met=trial.met,
        mark=figures.mark,
        reason=figures.reason,
    )


def per_gpu(point: Point) -> float:
    """Output tokens per second of a GPU."""
    return point.tok_s_gpu


def per_dollar(point: Point) -> float:
    """Output tokens for a dollar; infinite where nothing costs anything."""
    return 1e6 / point.usd_per_mtok_out if point.usd_per_mtok_out else float("inf")


def pareto(points: Iterable[Point], gain: Callable[[Point], float] = per_gpu) -> list[Point]:
    """Those that meet the SLOs, and that no other such point equals or beats in both tokens per second of a user and
    `gain`, fastest first.
    """
    kept: list[Point] = []
    best = float("-inf")
    met = [point for point in points if point.met]
    for candidate in sorted(met, key=lambda p: (-p.tok_s_user, -gain(p), p.usd_per_hour, p.engine)):
        if gain(candidate) > best:
            kept.append(candidate)
            best = gain(candidate)
    return kept


def unbeaten(points: Sequence[Mapping[str, Any]], gain: Callable[[Point], float] = per_gpu) -> list[int]:
    """Which of the points of a saved plan are in `pareto`, fastest first; one without a figure is none of them."""
    names = {field.name for field in fields(Point)}
    unsaid = {"mark": "", "reason": ""}
    known = {
        Point(**{**unsaid, **{name: value for name, value in point.items() if name in names}}): at
        for at, point in enumerate(points)
        if None not in map(point.get, _FIGURES)
    }
    return [known[point] for point in pareto(known, gain)]


def _per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    return usd_per_hour / (tokens_per_s * 3600) * 1e6 if tokens_per_s else float("inf")
