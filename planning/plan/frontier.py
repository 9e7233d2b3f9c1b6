"""The Pareto frontier: the fleets that meet the SLOs and are not beaten by another fleet that meets them.

Fleets are compared in tokens per second of a user and tokens per second of a GPU, or in tokens per second of a user and
tokens per dollar. Bisection tries fleets ever closer to the number of replicas at which an objective breaks, so points
lie closest together there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tokentwin.serving.answers.document import Number, Part, fact, metric_fact

if TYPE_CHECKING:
    from tokentwin.planning.plan.candidates import Engine
    from tokentwin.planning.plan.trial import Trial

_STEADY = "in steady operation; figures of a run divide by its complete time instead, including the last answers"


class Fleet(Part):
    """Replicas of an engine, and their cost. Spares are paid for but serve no traffic."""

    engine: str = fact("one replica: its split, parallelism, GPU, and other settings that distinguish it")
    replicas: int = fact("replicas that serve the traffic, without spares")
    gpus: int = fact("GPUs of all replicas, spares included")
    usd_per_hour: float = fact("price of all GPUs, spares included", "$/h")

    def called(self, spares: int = 0) -> str:
        """Return the name of the fleet, such as `4 × TP4 H100`, or `3+1 × TP4 H100` with one spare replica."""
        return f"{self.replicas}{f'+{spares}' if spares else ''} × {self.engine}"


class Point(Fleet):
    """One simulated fleet. Its tokens per GPU and per dollar are those of steady operation (`steady`)."""

    tok_s_user: Number = metric_fact("tok_s_user")
    tok_s_gpu: Number = metric_fact("tok_s_gpu")
    usd_per_mtok_out: Number = fact(f"all dollars over output tokens {_STEADY}", "$/Mtok")
    usd_per_mtok_total: Number = fact(f"all dollars over prompt and output tokens {_STEADY}", "$/Mtok")
    power_w: Number = fact(
        "estimated mean power of all GPUs in steady operation, spares included, times the PUE; null if not asked for, "
        "and for fleets that the answer does not show",
        "W",
        default=None,
    )
    joules_per_token: Number = fact("that power over output tokens/s", "J", default=None)
    co2_g_per_mtok_out: Number = fact("carbon of that energy, if the grid's is stated", "gCO2/Mtok", default=None)
    attainment: float = fact("share of the requests within every bound", "fraction")
    met: bool = fact("whether every SLO is met, also with steps as slow as the accepted risk demands")
    met_as_predicted: bool = fact("whether every SLO is met with steps as predicted", default=False)
    level: str = fact("how far its step times can be trusted: validated, interpolated, extrapolated", default="")
    reason: str = fact("reason of the level", default="")


def point(engine: Engine, trial: Trial, spares: int = 0) -> Point:
    """Return the point of a trial that ran to its end. Raises ValueError for a trial that was stopped early."""
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
        tok_s_gpu=output / (bought * engine.gpus) if output else math.nan,
        usd_per_mtok_out=_per_million(usd, output),
        usd_per_mtok_total=_per_million(usd, output + figures.steady.input_throughput),
        attainment=figures.attainment,
        met=trial.met,
        met_as_predicted=trial.met or trial.late is not None,
        **figures.trust._asdict(),
    )


def per_gpu(point: Point) -> float:
    """Return output tokens per second of a GPU; NaN if it is not known."""
    return math.nan if point.tok_s_gpu is None else point.tok_s_gpu


def per_dollar(point: Point) -> float:
    """Return output tokens per dollar; infinite if the price is 0, NaN if the throughput is not known."""
    if point.usd_per_mtok_out is None:
        return math.nan
    return 1e6 / point.usd_per_mtok_out if point.usd_per_mtok_out else math.inf


def pareto(points: Iterable[Point], gain: Callable[[Point], float] = per_gpu) -> list[Point]:
    """Return the points that meet the SLOs and are not beaten by another point that meets them, fastest first.

    A point is beaten if another equals or exceeds it in both tokens per second of a user and `gain`. Points that lack a
    figure are left out.
    """
    listed = list(points)
    return [listed[at] for at in unbeaten(listed, gain)]


def unbeaten(points: Sequence[Point], gain: Callable[[Point], float] = per_gpu) -> list[int]:
    """Return the indices of the points that `pareto` returns, in the same order."""
    ranked = sorted(
        (-point.tok_s_user, -gain(point), point.usd_per_hour, point.engine, at)
        for at, point in enumerate(points)
        if point.met and point.tok_s_user is not None and not math.isnan(gain(point))
    )
    kept, best = [], math.inf
    for _, loss, *_, at in ranked:
        if loss < best:
            kept.append(at)
            best = loss
    return kept


def _per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    return usd_per_hour / (tokens_per_s * 3600) * 1e6 if tokens_per_s else math.inf
