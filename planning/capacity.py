"""The arrival rate beyond which requests pile up in a simulated fleet, with its 90 % band.

A fleet whose backlog grows serves as fast as it can, so its capacity is the arrival rate minus the growth of the
backlog. If it keeps up, the same requests are simulated at higher rates until the backlog grows. Step times at both
ends of their 90 % interval give the band. Near capacity, a small error of step times decides whether requests pile up,
and with it any latency that includes waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel

from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.serving.answers.figures import shown_band, shown_number
from tokentwin.serving.workload import Workload
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.saturation import Saturation
from tokentwin.traces.reshape import reshaped

_WITH_WAITING = ("ttft_ms", "tpot_inclusive_ms", "e2e_ms", "queue_ms")
_FASTER = 1.3  # factor between the rates that are tried
_TRIED = 8  # maximum number of rates that are tried


class Capacity(BaseModel, frozen=True):
    """Rates in requests per second: of the arrivals, and of the capacity with the ends of its 90 % band."""

    arrival_rate: float
    value: float
    low: float
    high: float

    @property
    def is_too_short(self) -> bool:
        """True if the run ended before it was certain that any request is served in steady operation."""
        return self.low <= 0

    @property
    def is_within_error(self) -> bool:
        """True if the arrival rate lies in the band, so that nobody can tell whether requests pile up."""
        return self.low <= self.arrival_rate <= self.high

    @property
    def sentence(self) -> str:
        """What the rates mean for the run."""
        arriving, served = f"{shown_number(self.arrival_rate)} requests/s arrive", shown_number(self.value)
        if self.is_too_short:
            unknown = "how many can be served"
            if self.arrival_rate > self.high:
                return f"{arriving}, more than can be served; the run is too short to tell {unknown}"
            return f"{arriving}, and the run is too short to tell {unknown}, or whether they pile up"
        rates = f"{arriving}, and at most {served} can be served (90 % band {self.band})"
        if self.is_within_error:
            return f"{rates}: stable or not is within the error, and so is any latency that includes waiting"
        return f"{rates}: " + ("requests pile up" if self.arrival_rate > self.high else "requests do not pile up")

    @property
    def band(self) -> str:
        """The ends of the band."""
        return shown_band(self.low, self.high)

    @property
    def uncertain(self) -> tuple[str, ...]:
        """The latencies that nobody can tell, because they include waiting."""
        return _WITH_WAITING if self.is_within_error else ()


def capacity(runs: Sequence[tuple[PricedScenario, Saturation | None]]) -> Capacity | None:
    """Return the capacity of a scenario from its runs: at its step times, then at both ends of their interval.

    It is None if every run keeps up, or if the workload has no rate of its own: in closed loops and in sessions,
    clients wait for answers.
    """
    scenario, central = runs[0]
    if central is None or not _comes_by_the_clock(scenario.workload):
        return None
    if all(verdict is not None and verdict.verdict == "STABLE" for _, verdict in runs):
        return None
    served = [_served(scenario, verdict) for scenario, verdict in runs]
    known = [rates for rates in served if rates is not None]
    if len(known) < len(served):
        return None
    return Capacity(
        arrival_rate=central.arrival_rate,
        value=known[0][0],
        low=min(rate - half for rate, half in known),
        high=max(rate + half for rate, half in known),
    )


def _comes_by_the_clock(workload: Workload) -> bool:
    return workload.concurrency is None and all(request.think_ns is None for request in workload.requests)


def _served(scenario: PricedScenario, verdict: Saturation | None) -> tuple[float, float] | None:
    """Return the capacity and the half-width of its 95 % interval; None if none of the tried rates was too high."""
    scale = 1.0
    for _ in range(_TRIED):
        if verdict is not None and verdict.verdict == "OVERLOADED":
            return max(verdict.arrival_rate - verdict.trend.slope, 0.0), verdict.trend.half
        scale *= _FASTER
        faster = replace(scenario, workload=reshaped(scenario.workload, rate_scale=scale))
        verdict = RunMetrics(faster.requests()).saturation
    return None
