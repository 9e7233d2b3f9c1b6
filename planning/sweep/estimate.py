"""The number of runs of a sweep and the time that they will take, before any of them is prepared.

A run takes time to start, and time for each request. Lengths, rates and GPUs hardly matter, because the simulator skips
steps in which no request comes or goes.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from tokentwin.planning.deployments import overridden
from tokentwin.planning.progress import in_words
from tokentwin.planning.resolution import resolved_fleet
from tokentwin.planning.scenario import Scenario
from tokentwin.planning.sweep.settings import Overrides, SweepSettings
from tokentwin.serving.answers.figures import counted
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError

# Seconds of one CPU with the compiled core: 0.06 to 0.07 s for 100 requests and 0.35 to 0.46 s for 2,000 (2026-11-28)
_RUN_S, _REQUEST_S = 0.045, 0.0002
_FULL, _BANDS = 1.8, 2.4  # factors for `full_metrics` and `bands`
_MOST_BYTES = 4_000_000  # largest trace that is read to count its requests


def sweep_estimate(settings: SweepSettings, jobs: int | None = None) -> str:
    """Return the number of runs and the time that they take, `jobs` at once (None: one for each usable CPU), in words.

    Only runs that together have every value are checked; the text has a line about those that cannot be made. Raises
    the first UserError if all of these cannot. Without the length of a trace there is no time.
    """
    requests, errors = list[float | None](), list[UserError]()
    for overrides in settings.samples():
        try:
            requests.append(_requests(settings, overrides))
        except UserError as error:
            errors.append(error)
    if not requests:
        raise errors[0]
    line, known = counted(settings.runs, "run"), [count for count in requests if count is not None]
    if len(known) == len(requests):
        at_once = min(jobs or len(os.sched_getaffinity(0)), settings.runs)
        factor = (_FULL if settings.full_metrics else 1) * (_BANDS if settings.bands else 1)
        seconds = settings.runs * factor * (_RUN_S + _REQUEST_S * sum(known) / len(known)) / at_once
        line += f", about {in_words(seconds)} with {at_once} at once"
    if errors:
        line += f"\n{len(errors)} of {len(requests) + len(errors)} checked runs cannot be made; the first: {errors[0]}"
    return line


def _requests(settings: SweepSettings, overrides: Overrides) -> float | None:
    """Return the number of requests of a run; None for a long trace. Raises UserError if it cannot be made."""
    scenario = parse(Scenario, overridden(settings.base, overrides), where="base", typed=True)
    resolved_fleet(scenario.described(), scenario.calibration, scenario.gpu)
    if (spec := scenario.synthetic) is not None:
        return spec.expected_requests
    limit: int | None = scenario.workload["limit"]
    return limit or _length(scenario.workload["trace"])


@cache
def _length(trace: str) -> float | None:
    """Return the number of requests of a trace or a specification; None for a long trace."""
    from tokentwin.planning.traffic import Offered

    if Path(trace).is_file() and Path(trace).stat().st_size > _MOST_BYTES:
        return None
    offered = Offered(traffic=trace)
    return offered.expected_requests or len(list(offered.workload().requests))
