"""SLOs in latency charts: those of a plan, or those that a reader types on a page whose runs state none."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from tokentwin.dashboard.blocks import mistake
from tokentwin.dashboard.url import text
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.serving.errors import UserError

Bounds = Mapping[str, Mapping[float, str]]  # names of bounds in ms, by metric
NO_BOUNDS: Bounds = MappingProxyType({})
_MOST_TEXT = 400
_HELP = (
    "The charts then have a dashed red line at each bound. Separate several SLOs by commas. They are kept in the link, "
    "and are of this page only."
)


def asked_slos() -> tuple[str, ...]:
    """Draw a line for SLOs, and return them as `parse_objectives` takes them; empty with an error if one is wrong."""
    said = text("SLOs", "slos", placeholder="TTFT p99 < 1 s, TPOT p99 < 50 ms", max_chars=_MOST_TEXT, help=_HELP)
    slos = tuple(filter(None, (part.strip() for part in re.split(r"[,;\n]", said))))
    try:
        if slos:
            parse_objectives(slos)
    except UserError as error:
        mistake(error)
        return ()
    return slos


def bounds_of(slos: Collection[str]) -> Bounds:
    """Return the bound of each SLO with a name such as `SLO p99 chat`. Raises UserError for a wrong SLO."""
    bounds: dict[str, dict[float, str]] = {}
    for objective in parse_objectives(tuple(slos)).slos if slos else ():
        for name, bound in objective.bounds:
            label = "SLO" if objective.attainment else f"SLO {objective.statistic}"
            label += f" {objective.slo_class}" if objective.slo_class else ""
            bounds.setdefault(name, {}).setdefault(bound, label)
    return bounds
