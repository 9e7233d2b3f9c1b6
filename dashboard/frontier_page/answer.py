"""The part of a plan's answer about the engines' speed and cost, on the page and in a report."""

from __future__ import annotations

from dashboard.frontier_page import charts as frontier_charts
from dashboard.plan_page.words import trust_in
from dashboard.sheet import Sheet
from planning.plan.document import PlanDocument

_HELP = (
    "Each line is an engine on as many GPUs as are recommended (16 replicas at most), from a light load to its highest "
    "rate within the SLOs. Further right, the median user gets more output tokens per second. Colours are GPUs; hollow "
    "points are extrapolated."
)
_READ = (
    "The name stands at the highest rate at which every SLO holds if steps are as predicted. Numbers are requests at a "
    "time in one replica. The star is the recommended fleet at the planned traffic. It lies before the end of its "
    "line, since it holds even if steps are slow, and below the line where spares carry nothing."
)


def show_engines(to: Sheet, answer: PlanDocument) -> None:
    """Show the speed and the cost of each engine. The answer must have a fleet."""
    rated, best = trust_in(answer.points, "fleets"), answer.recommendation
    left, right = to.beside(2)
    with left:
        plot = frontier_charts.frontier(answer.engine_curves, best)
        to.figure(plot, "frontier", "Speed per user and per GPU", rated, _HELP)
    with right:
        to.figure(frontier_charts.price(answer.engine_curves, best), "price", "What speed costs", rated, _HELP)
    to.text(_READ, soft=True)
