"""How much traffic the Policy lab simulates at most."""

from __future__ import annotations

from planning.compare.request import CompareRequest
from serving.errors import UserError

MOST_REQUESTS = 200_000  # of one run
MOST_IN_ALL = 1_000_000  # of all runs of a side, which are in memory together


def check_few_enough(request: CompareRequest, read: bool = True) -> None:
    """Raises UserError for too many requests, of a specification before any is made; a trace is `read` for it."""
    expected = request.expected_requests
    if expected is None:
        expected = len(list(request.workload().requests)) if read else 0
    whole = expected * request.seeds
    for count, most, where in ((expected, MOST_REQUESTS, ""), (whole, MOST_IN_ALL, " in all runs")):
        if count > most:
            raise UserError("traffic", f"{count:,.0f} requests{where}", f"are too many; {most:,} are allowed")
