"""What a comparison says beside its figures, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calibration.provenance import Provenance, noted, weakest
from dashboard.policy_lab_page.charts import label
from dashboard.shown import shown
from planning.compare.document import Compared, ComparisonDocument, Ranked, Row, furthest_off, unit_of

OUTCOMES = {
    "holds": "held",
    "reversed": "reversed",
    "open": "open (the engine claims nothing)",
    "missed": "missed (only the engine claims it)",
}
CARRIED_OVER = "Queues outlast the blocks: intervals may be too narrow. Compare longer runs, or more seeds."


def basis(answer: ComparisonDocument) -> str:
    """What the intervals rest on."""
    units, runs = answer.units, answer.runs
    of, arrivals = ("run", "other") if units.of == "runs" else ("block", "consecutive")
    return (
        f"{_counted(answer.requests, 'request')} in {_counted(runs, 'run')} of each side, resampled by "
        f"{_counted(units.count, of)} of {arrivals} arrivals. The 95 % intervals hold for all rows together."
        f"{_lost(answer)}"
    )


def fairness(answer: ComparisonDocument) -> str:
    """Jain's index of both sides, and whether they differ; empty where it is not compared."""
    jain = next((row for row in answer.rows if row.metric == "jain_fairness"), None)
    if jain is None or jain.a is None or jain.b is None:
        return ""
    told = f"Jain's index of A is {jain.a:.3f}, of B {jain.b:.3f}"
    if jain.low is None:
        return f"{told}; the difference has no interval."
    fairer = f"{jain.better} is fairer" if jain.better else "no difference can be claimed"
    return f"{told}; B - A lies within {jain.low:+.3f} to {jain.high:+.3f}: {fairer}."


def ranking(rows: Sequence[Ranked]) -> tuple[str, str]:
    """Whether what was simulated holds on the engine: `reversed`, `holds` or `open`, and a sentence."""
    counts = {name: sum(row.outcome == name for row in rows) for name in OUTCOMES}
    told = ", ".join(f"{count} {OUTCOMES[name]}" for name, count in counts.items() if count)
    if counts["reversed"]:
        return "reversed", f"The ranking does not hold on the engine: {told}."
    if counts["holds"]:
        return "holds", f"The ranking holds on the engine: {told}."
    if not told:
        return "open", "Neither the simulator nor the engine claims a difference."
    return "open", f"The engine does not contradict the simulator: {told}."


def errors(answer: ComparisonDocument) -> str:
    """How far what was simulated is off, at worst; empty where nothing was."""
    worst = furthest_off(answer.errors())
    if worst is None:
        return ""
    return (
        f"Simulated against real, the furthest off is {label(worst)} of {worst.side}: {shown(worst.simulated)} "
        f"{unit_of(worst)} simulated, {shown(worst.real)} real ({worst.error:+.1f} %)."
    )


def disturbance(answer: ComparisonDocument) -> str:
    """What to say of real runs that were disturbed; empty where they were not."""
    if not answer.disturbed:
        return ""
    told = answer.disturbance.rstrip(".")
    return f"The real runs were disturbed: {told}. Part of what differs is the machine's."


def provenance(sides: Compared) -> Provenance:
    """Of what is drawn of both sides: that of the less certain one."""
    why = "the comparison does not say how far step times can be trusted"
    return weakest((noted({"mark": side.mark, "reason": side.reason}, why) for side in (sides.a, sides.b)), "sides")


def number_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every number of both sides, as people read them."""
    return [
        {
            "of": label(row),
            "unit": unit_of(row),
            "A": row.a,
            "B": row.b,
            "B - A (%)": row.percent,
            "from": row.low,
            "to": row.high,
            "better": row.better or None,
        }
        for row in rows
    ]


def error_rows(answer: ComparisonDocument) -> list[dict[str, Any]]:
    """Every simulated number beside the real one."""
    return [
        {
            "of": label(row),
            "unit": unit_of(row),
            "side": row.side,
            "simulated": row.simulated,
            "real": row.real,
            "error (%)": row.error,
        }
        for row in answer.errors()
    ]


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _lost(answer: ComparisonDocument) -> str:
    """How many requests finish, where some do not."""
    row = next((row for row in answer.rows if row.metric == "finished"), None)
    if row is None or row.a is None or row.b is None:
        return ""
    return f" {100 * row.a:.1f} % of them finish on A, {100 * row.b:.1f} % on B."
