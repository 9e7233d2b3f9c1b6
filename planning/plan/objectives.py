"""Objectives of a fleet: bounds on request metrics, and the share of the requests that must meet them, or on a mean.

A percentile also states such a share: `ttft_ms p99<=500` holds if 99 of 100 requests have their first token within
500 ms. A request that does not finish breaks every bound, so rejecting traffic never helps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tokentwin.serving.answers.figures import shown_share, shown_time
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import check_slo
from tokentwin.traces.metrics.run_metrics import RunMetrics

_FORM = (
    "must be like 'ttft_ms p99<=500', 'tpot_ms mean<=50', 'tpot_ms<=50' (a bound for attainment) or 'attainment>=0.99'"
)
_OF_A_CLASS = re.compile(r"(?P<rest>.+?) for (?P<slo_class>\S.*)")
_BOUND = re.compile(
    r"(?P<metric>[a-z0-9_]+)(?:\s+(?:p(?P<percentile>\d+(?:\.\d+)?)|(?P<mean>mean)))?\s*<=?\s*(?P<bound>\S+?)\s*(?P<unit>ms|s)?"
)
_ATTAINMENT = re.compile(r"attainment\s*>=\s*(?P<share>\S+)")

_ENDLESS = re.compile(r"[eE][+-]?\d{4}")  # exponents of numbers with too many digits to compute
_LONGEST_MS = 10**12  # 32 years
_SHORTEST_MS = 0.01  # time of two or three kernel launches; steps take longer, and only queueing can be shorter


@dataclass(frozen=True)
class Objective:
    """An objective: at least `share` of the requests must meet all `bounds`, in milliseconds by metric.

    A percentile covers the requests that have the metric (TPOT needs a second token), attainment covers all. With an
    `slo_class`, a percentile covers only the requests of this class. `class_bounds` are the metric, bound and class of
    an attainment's bounds that only requests of a class must meet. With `mean`, only the mean over the requests that a
    percentile would cover must meet the bound.
    """

    text: str
    bounds: tuple[tuple[str, float], ...]
    share: Fraction
    attainment: bool = False
    slo_class: str = ""
    class_bounds: tuple[tuple[str, float, str], ...] = ()
    mean: bool = False

    @property
    def statistic(self) -> str:
        """What is bounded: `p99` or `mean`; of an attainment, the percentile of its share."""
        return "mean" if self.mean else f"p{float(100 * self.share):.10g}"

    def allowed(self, requests: int) -> int:
        """Return the number of the requests that may break a bound; `requests` are those that it covers, or more.

        By nearest rank, a percentile of n sorted values is the value number ceil(share * n). Of a mean it is the sum of
        all values that the bound allows, in multiples of the bound.
        """
        return requests if self.mean else requests - math.ceil(self.share * requests)

    def misses(self, metrics: RunMetrics) -> tuple[float, int]:
        """Return the number of requests that break a bound, and the number of requests that count.

        Of a mean, return the sum of the values instead of the first number, in multiples of the bound.
        """
        if self.attainment:
            good = _keeping(metrics, self.bounds, self.class_bounds)
            return int((~good).sum()), len(good)
        bound, values = self.bounds[0][1], self._values(metrics)
        return float((values / bound).sum()) if self.mean else int((values > bound).sum()), len(values)

    def observed(self, metrics: RunMetrics, unfinished_ms: float = math.inf) -> float:
        """Return the attainment, or the percentile in ms, which is infinite if it falls on an unfinished request.

        A mean is infinite if any request is unfinished. With NaN as `unfinished_ms`, both are of the finished requests,
        as in a run's report.
        """
        if self.attainment:
            misses, counted = self.misses(metrics)
            return 1.0 - misses / counted
        ordered = np.sort(self._values(metrics, unfinished_ms))
        if not len(ordered):
            return math.nan
        return float(ordered.mean() if self.mean else ordered[max(math.ceil(self.share * len(ordered)), 1) - 1])

    def _values(self, metrics: RunMetrics, unfinished_ms: float = math.inf) -> np.ndarray:
        """Return the metric of every request that has it or did not finish; with NaN, of the finished ones only."""
        values = np.where(metrics.finished, metrics.values(self.bounds[0][0]), unfinished_ms)
        if self.slo_class:
            values = values[metrics.of_class(self.slo_class)]
        return values[~np.isnan(values)]

    def is_broken_by(self, observed: float) -> bool:
        """Return True if the observed attainment, or the observed latency in ms, breaks the objective."""
        return observed < self.share if self.attainment else observed > self.bounds[0][1]

    def over(self, observed: float) -> str:
        """Return by how much an observed latency exceeds its bound: `, 13.2 ms too long`; empty for attainment."""
        if self.attainment or not math.isfinite(observed):
            return ""
        return f", {shown_time(observed - self.bounds[0][1])} too long"

    def excess(self, observed: float) -> float:
        """Return the factor by which `observed` exceeds the bound.

        For attainment it is the number of requests that break the bounds, over the allowed number.
        """
        if self.attainment:
            missed = 1.0 - observed
            if self.share < 1:
                return missed / float(1 - self.share)
            return math.inf if missed else 0.0
        return observed / self.bounds[0][1]

    def check_class(self, classes: Collection[str]) -> None:
        """Raise UserError if the objective is of a class that no request has."""
        if self.slo_class and self.slo_class not in classes:
            names = ", ".join(sorted(filter(None, classes))) or "none"
            raise UserError("slo", self.text, f"is for a class that no request has; the traffic's classes: {names}")


@dataclass(frozen=True)
class Objectives:
    """The objectives of a plan, and the bound of each metric for the attainment (the loosest of any but a mean).

    `bounds` are those of all requests; `class_bounds` have a metric, a bound, and the class that must meet it.
    """

    slos: tuple[Objective, ...]
    bounds: tuple[tuple[str, float], ...]
    class_bounds: tuple[tuple[str, float, str], ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that are bounded, for all requests or for a class."""
        of_slos = [metric for slo in self.slos for metric, _ in slo.bounds]
        names = [metric for metric, _ in self.bounds] + [metric for metric, _, _ in self.class_bounds] + of_slos
        return tuple(dict.fromkeys(names))

    def attainment(self, metrics: RunMetrics) -> float:
        """Return the share of all requests that meet every bound on them."""
        return float(_keeping(metrics, self.bounds, self.class_bounds).mean())

    def broken(self, metrics: RunMetrics) -> tuple[float, ...]:
        """Return the share of all requests that break each of `bounds`, then of `class_bounds`."""
        of_all = [_keeping(metrics, (bound,)) for bound in self.bounds]
        of_class = [_keeping(metrics, (), (bound,)) | ~metrics.of_class(bound[2]) for bound in self.class_bounds]
        return tuple(1.0 - float(good.mean()) for good in (*of_all, *of_class))

    def seen(self, objective: Objective, observed: float, broken: Sequence[float]) -> str:
        """Return the observed value of an objective in words. For attainment, add the share that breaks each bound."""
        if not objective.attainment:
            text = shown_time(observed, 4)
            return text if math.isfinite(observed) else f"{text}: requests are turned away"
        names = [f"{metric}<={bound:g}" for metric, bound in self.bounds]
        names += [f"{metric}<={bound:g} for {slo_class}" for metric, bound, slo_class in self.class_bounds]
        culprits = [
            f"{shown_share(share, 1)} break {name}" for name, share in zip(names, broken, strict=True) if share > 0
        ]
        return ", ".join([f"attainment {shown_share(observed, 2)}", *culprits])

    def seen_broken(self, observed: Sequence[float], broken: Sequence[float]) -> list[str]:
        """Return each broken objective with its observed value and the excess over its bound.

        The arguments are in the order of the objectives.
        """
        return [
            f"{objective.text} ({self.seen(objective, value, broken)}{objective.over(value)})"
            for objective, value in zip(self.slos, observed, strict=True)
            if objective.is_broken_by(value)
        ]


def parse_objectives(texts: Sequence[str]) -> Objectives:
    """Parse objectives as written on the command line. Raises a UserError that names the wrong objective.

    Bounds are in milliseconds without a unit, or with the unit `ms` or `s`: `TTFT p99 < 1.5 s`. A percentile or a mean
    may be of the requests of one SLO class: `ttft_ms p99<=500 for chat`.
    """
    statistics: list[Objective] = []
    shares: list[tuple[str, Fraction]] = []
    bounds: dict[tuple[str, str], float] = {}  # by metric and class
    bare = False
    for text in (" ".join(text.split()) for text in texts):
        if match := _ATTAINMENT.fullmatch(text):
            shares.append((text, _fraction(text, match["share"], most=1)))
            continue
        of_class = _OF_A_CLASS.fullmatch(text)
        match = _BOUND.fullmatch((of_class["rest"] if of_class else text).lower())
        if match is None:
            raise UserError("slo", text, _FORM)
        metric = match["metric"] if match["metric"].endswith("_ms") else f"{match['metric']}_ms"
        in_ms = _fraction(text, match["bound"]) * (1000 if match["unit"] == "s" else 1)
        bound = check_slo({metric: float(in_ms)})[metric]
        if bound < _SHORTEST_MS and metric != "queue_ms":
            remedy = f"is below {_SHORTEST_MS} ms, which no GPU can meet; bounds are in milliseconds"
            raise UserError("slo", text, remedy)
        slo_class = of_class["slo_class"] if of_class else ""
        if match["mean"]:
            statistics.append(Objective(text, ((metric, bound),), Fraction(1), slo_class=slo_class, mean=True))
            continue
        bounds[metric, slo_class] = max(bound, bounds.get((metric, slo_class), bound))
        if match["percentile"] is None:
            if of_class:
                raise UserError("slo", text, "needs a percentile or mean, such as 'ttft_ms p99<=500 for chat'")
            bare = True
        else:
            share = _fraction(text, match["percentile"], most=100) / 100
            statistics.append(Objective(text, ((metric, bound),), share, slo_class=slo_class))
    if not bounds and (shares or not statistics):
        raise UserError("slo", "; ".join(texts) or None, f"bounds no latency of a request; an objective {_FORM}")
    if bare and not shares:
        raise UserError("slo", "; ".join(texts), "does not state a share of requests; add 'attainment>=0.99'")
    kept = sorted((metric, bound, slo_class) for (metric, slo_class), bound in bounds.items())
    of_all = tuple((metric, bound) for metric, bound, slo_class in kept if not slo_class)
    of_classes = tuple(one for one in kept if one[2])
    attainments = [Objective(text, of_all, share, attainment=True, class_bounds=of_classes) for text, share in shares]
    return Objectives((*statistics, *attainments), of_all, of_classes)


def _keeping(
    metrics: RunMetrics, bounds: Sequence[tuple[str, float]], class_bounds: Sequence[tuple[str, float, str]] = ()
) -> np.ndarray:
    """Return a mask of the requests that finish within all bounds on them."""
    good = metrics.finished.copy()
    for metric, bound, slo_class in class_bounds:
        good &= ~((metrics.values(metric) > bound) & metrics.of_class(slo_class))
    for metric, bound in bounds:
        values = metrics.values(metric)
        good &= ~(values > bound)  # NaN: a finished request without a value cannot break the bound
    return good


def _fraction(text: str, number: str, most: int = _LONGEST_MS) -> Fraction:
    try:
        if _ENDLESS.search(number):
            raise ValueError
        value = Fraction(number)
    except (ValueError, ZeroDivisionError):
        raise UserError("slo", text, f"{number!r} is not a number; the objective {_FORM}") from None
    if not 0 < value <= most:
        raise UserError("slo", text, f"{number} must be above 0 and at most {most:,}")
    return value
