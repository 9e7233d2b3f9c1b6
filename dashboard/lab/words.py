"""What a comparison says beside its figures, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dashboard.lab_charts import label, unit
from dashboard.shown import shown
from tokentwin.comparison_document import furthest_off, simulated_errors

OUTCOMES = {
    "holds": "held",
    "reversed": "reversed",
    "open": "open (the engine claims nothing)",
    "missed": "missed (only the engine claims it)",
}
CARRIED_OVER = "Queues outlast the blocks: intervals may be too narrow. Compare longer runs, or more seeds."


def basis(answer: Mapping[str, Any]) -> str:
    """What the intervals rest on."""
    units, runs = answer["units"], answer["runs"]
    of, arrivals = ("run", "other") if units["of"] == "runs" else ("block", "consecutive")
    return (
        f"{_counted(answer['requests'], 'request')} in {_counted(runs, 'run')} of each side, resampled by "
        f"{_counted(units['count'], of)} of {arrivals} arrivals. The 95 % intervals hold for all rows together."
        f"{_lost(answer)}"
    )


def fairness(answer: Mapping[str, Any]) -> str:
    """Jain's index of both sides, and whether they differ; empty where it is not compared."""
    jain = next((row for row in answer["rows"] if row["metric"] == "jain_fairness"), None)
    if jain is None or jain["a"] is None or jain["b"] is None:
        return ""
    told = f"Jain's index of A is {jain['a']:.3f}, of B {jain['b']:.3f}"
    if jain["low"] is None:
        return f"{told}; the difference has no interval."
    fairer = f"{jain['better']} is fairer" if jain["better"] else "no difference can be claimed"
    return f"{told}; B - A lies within {jain['low']:+.3f} to {jain['high']:+.3f}: {fairer}."


def ranking(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Whether what was simulated holds on the engine: `reversed`, `holds` or `open`, and a sentence."""
    counts = {name: sum(row["outcome"] == name for row in rows) for name in OUTCOMES}
    told = ", ".join(f"{count} {OUTCOMES[name]}" for name, count in counts.items() if count)
    if counts["reversed"]:
        return "reversed", f"The ranking does not hold on the engine: {told}."
    if counts["holds"]:
        return "holds", f"The ranking holds on the engine: {told}."
    if not told:
        return "open", "Neither the simulator nor the engine claims a difference."
    return "open", f"The engine does not contradict the simulator: {told}."


def errors(answer: Mapping[str, Any]) -> str:
    """How far what was simulated is off, at worst; empty where nothing was."""
    worst = furthest_off(simulated_errors(answer))
    if worst is None:
        return ""
    return (
        f"Simulated against real, the furthest off is {label(worst)} of {worst['side']}: {shown(worst['simulated'])} "
        f"{unit(worst)} simulated, {shown(worst['real'])} real ({worst['error']:+.1f} %)."
    )


def disturbance(answer: Mapping[str, Any]) -> str:
    """What to say of real runs that were disturbed; empty where they were not."""
    if not answer.get("disturbed"):
        return ""
    told = str(answer["disturbance"]).rstrip(".")
    return f"The real runs were disturbed: {told}. Part of what differs is the machine's."


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _lost(answer: Mapping[str, Any]) -> str:
    """How many requests finish, where some do not."""
    row = next((row for row in answer["rows"] if row["metric"] == "finished"), None)
    return "" if row is None else f" {100 * row['a']:.1f} % of them finish on A, {100 * row['b']:.1f} % on B."
