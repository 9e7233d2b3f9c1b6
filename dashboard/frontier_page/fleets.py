"""The fleets of a plan as a table: the recommended one, then those that meet the SLOs, then the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dashboard.plan_page.words import carriers, costs, provenance
from dashboard.shown import prose
from planning.plan.document import PlanDocument
from planning.plan.frontier import Point, per_dollar, per_gpu, unbeaten


def fleet_rows(answer: PlanDocument, recommended: int | None) -> list[dict[str, Any]]:
    """A row for every fleet that was simulated; `recommended` is the place of one."""
    points = answer.points
    frontier = {*unbeaten(points, per_gpu), *unbeaten(points, per_dollar)}
    return [
        {
            "fleet": prose(carriers(points[at], answer.spares)),
            "standing": provenance(points[at]).mark,
            **costs(points[at]),
            "attainment (%)": 100 * points[at].attainment,
            "SLOs": "met" if points[at].met else "broken",
            "on a frontier": at in frontier,
        }
        for at in ranked(points, recommended)
    ]


def ranked(points: Sequence[Point], recommended: int | None) -> list[int]:
    """The recommended one, then those that meet the SLOs, then the others, each from the cheapest on."""

    def rank(at: int) -> tuple[bool, bool, float, int]:
        return at != recommended, not points[at].met, points[at].usd_per_hour, points[at].gpus

    return sorted(range(len(points)), key=rank)
