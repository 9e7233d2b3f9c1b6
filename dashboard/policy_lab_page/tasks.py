"""Jobs of `planning.jobs` for the Policy lab, which return `ComparisonDocument`s, and the limits of their traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokentwin.planning.compare import comparer
from tokentwin.planning.compare.request import CompareRecordingsRequest, CompareRequest
from tokentwin.planning.progress import Tell
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError

SIMULATED = "tokentwin.dashboard.policy_lab_page.tasks:simulated"
RECORDED = "tokentwin.dashboard.policy_lab_page.tasks:recorded"
MOST_REQUESTS = 200_000  # requests of one run
MOST_IN_ALL = 1_000_000  # requests of all runs of a side, which are in memory together


def simulated(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Compare both sides of a `CompareRequest`, simulated on the same arrivals."""
    request = parse(CompareRequest, settings, where="lab")
    check_few_enough(request)
    return comparer.compare(request, tell=tell).as_json()


def recorded(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Compare recordings of both sides; with a timing simulate the same runs, and add `simulated` and `ranking`."""
    request = parse(CompareRecordingsRequest, settings, where="lab")
    return comparer.compare_recordings(request, tell=tell).as_json()


def check_few_enough(request: CompareRequest, read: bool = True) -> None:
    """Raise UserError for too many requests. A specification is checked unmade; a trace is counted if `read` is set."""
    expected = request.expected_requests
    if expected is None:
        expected = len(list(request.workload().requests)) if read else 0
    whole = expected * request.seeds
    for count, most, where in ((expected, MOST_REQUESTS, ""), (whole, MOST_IN_ALL, " in all runs")):
        if count > most:
            raise UserError("traffic", f"{count:,.0f} requests{where}", f"are too many; {most:,} are allowed")
