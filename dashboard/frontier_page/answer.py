"""The part of a plan's answer about the engines' speed and cost, on the page and in a report."""

from __future__ import annotations

from tokentwin.dashboard.frontier_page import charts as frontier_charts
from tokentwin.dashboard.plan_page.words import trust_in
from tokentwin.dashboard.sheet import Sheet
from tokentwin.planning.plan.document import PlanDocument

_HELP = (
    "Each line is a kind of engine, on as many GPUs as the recommended fleet has (at most 16 replicas). It runs from a "
    "light load to the highest rate within the SLOs. Further right, the median user gets more output tokens per "
    "second. Each kind of GPU has a colour; hollow points are extrapolated."
)
_READ = (
    "The name of an engine stands at the highest rate at which every SLO holds with predicted step times. Numbers are "
    "concurrent requests in one replica. The star is the recommended fleet, without spares, at the planned traffic. It "
    "does not lie at the end of its line, because the fleet must also hold the SLOs if steps are slower than predicted."
)


def show_engines(to: Sheet, answer: PlanDocument) -> None:
    """Show the speed and the cost of each engine. The answer must have a fleet."""
    rated, best = trust_in(answer.points, "fleets"), answer.recommendation
    left, right = to.beside(2)
    with left:
        plot = frontier_charts.frontier(answer.engine_curves, best)
        to.figure(plot, "frontier", "Speed per user and per GPU", rated, _HELP)
    with right:
        to.figure(frontier_charts.price(answer.engine_curves, best), "price", "The cost of speed", rated, _HELP)
    to.text(_READ, soft=True)
