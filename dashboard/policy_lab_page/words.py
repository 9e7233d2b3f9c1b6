"""Sentences of a comparison beside its figures, and the names of its two sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokentwin.calibration.trust import Trust, noted_trust, weakest
from tokentwin.dashboard.policy_lab_page.charts import label
from tokentwin.planning.compare.comparison import ranking as rank
from tokentwin.planning.compare.document import SHARES, Compared, ComparisonDocument, Row, Side, change_of
from tokentwin.serving.answers.figures import NOTHING, counted, shown_change, shown_number, shown_share, shown_time
from tokentwin.serving.answers.report import FIGURE, Column, Table
from tokentwin.serving.metrics import METRICS


def fairness(answer: ComparisonDocument) -> str:
    """Return Jain's index of both sides, and whether they differ; empty if it is not compared."""
    jain = next((row for row in answer.rows if row.metric == "jain_fairness"), None)
    if jain is None or jain.a is None or jain.b is None:
        return ""
    indices = f"Jain's fairness index is {jain.a:.3f} for A and {jain.b:.3f} for B"
    if jain.low is None:
        return f"{indices}. The difference has no interval."
    fairer = f"{jain.better} is fairer" if jain.better else "the difference may be chance"
    return f"{indices}. B - A lies between {jain.low:+.3f} and {jain.high:+.3f}, so {fairer}."


_MAIN = (
    ("slo_attainment", "value"),
    ("finished", "value"),
    ("ttft_ms", "p99"),
    ("tpot_ms", "p99"),
    ("e2e_ms", "p99"),
    ("output_throughput", "value"),
)


def beside(answer: Compared) -> Table:
    """Return the main figures of A and B with the difference between them, and whether it may be chance."""
    names = [f"{key}: {name}" for key, name in zip("AB", side_names(answer.a, answer.b), strict=True)]
    by_name = {(row.metric, row.stat): row for row in answer.rows}
    rows = [
        (label(row), _shown(row.metric, row.a), _claimed(row), _shown(row.metric, row.b))
        for row in filter(None, map(by_name.get, _MAIN))
    ]
    columns = (Column("figure"), Column(names[0], FIGURE), Column("B against A", FIGURE), Column(names[1], FIGURE))
    return Table(columns, rows)


def _shown(name: str, value: float | None) -> str:
    if name in SHARES:
        return shown_share(value, 1)
    return shown_time(value) if name.endswith("_ms") else f"{shown_number(value)} {METRICS[name].unit}"


def _claimed(row: Row) -> str:
    if row.percent is None:
        return NOTHING
    return change_of(row.metric, row.percent) + ("" if row.better else ", may be chance")


def trust(sides: Compared) -> Trust:
    """Return the trust in figures of both sides, taken from the less certain side."""
    why = "the comparison does not state how far to trust its step times"
    return weakest((noted_trust(side.level, side.reason, why) for side in (sides.a, sides.b)), "sides")


def engines(answers: Sequence[ComparisonDocument]) -> list[str]:
    """Return the columns of `engine_rows`: the simulation of the first of `answers`, then their engines.

    Of several pairs on one engine, all but the first have a number.
    """
    names = ["simulated"] if answers[0].simulated else []
    for answer in answers:
        name = _engine(answer.a)
        again = sum(other.startswith(name) for other in names)
        names.append(f"{name} ({again + 1})" if again else name)
    return names


def engine_rows(answers: Sequence[ComparisonDocument]) -> list[list[str]]:
    """Return the change of each latency in percent of A, with its interval, on each engine."""
    first = answers[0]
    compared = ([first.simulated] if first.simulated else []) + list(answers)
    by_engine = [{(row.metric, row.stat): row for row in one.rows} for one in compared]
    return [
        [label(row), *(_change(rows.get(key)) for rows in by_engine)]
        for key, row in by_engine[0].items()
        if row.metric.endswith("_ms") and row.percent is not None
    ]


def agreement(answers: Sequence[ComparisonDocument]) -> str:
    """Return a text about how many differences on the first engine hold on each other engine."""
    first, *others = answers
    return " ".join(_agreement(first, other) for other in others)


def _agreement(first: ComparisonDocument, other: ComparisonDocument) -> str:
    outcomes = [row.outcome for row in rank(first.rows, other.rows)]
    shown_first = len(outcomes) - outcomes.count("missed")
    *_, one, two = engines((first, other))
    return (
        f"Of {counted(shown_first, 'difference')} on {one}, {outcomes.count('holds')} hold on {two}, "
        f"{outcomes.count('open')} may be chance there, and {outcomes.count('reversed')} are reversed. "
        f"{outcomes.count('missed')} more differences appear only on {two}."
    )


def _engine(side: Side) -> str:
    """Return the common name of the engine of a recorded side."""
    stated = str(side.deployment.as_json().get("engine") or "")
    return "our engine" if not stated or stated.startswith("tokentwin") else stated.replace("vllm", "vLLM")


def _change(row: Row | None) -> str:
    """Return a difference in percent of A, and the ends of its interval."""
    if row is None or row.percent is None or not row.a:
        return ""
    if row.low is None or row.high is None:
        return shown_change(row.percent, 0)
    low, high = (100 * end / abs(row.a) for end in (row.low, row.high))
    return f"{shown_change(row.percent, 0)} ({shown_change(low, 0, '')} to {shown_change(high, 0, '')})"


_MOST = 2  # settings in a name; the page shows the deployments with all of them


def side_names(a: Side, b: Side) -> tuple[str, str]:
    """Return short names of two sides, such as `vllm, max_num_seqs 64`: the policy, and settings that differ."""
    names = []
    for mine, other in ((a, b), (b, a)):
        own = list(_differing(_flat(mine), _flat(other)))
        more = [f"{len(own) - _MOST} more"] if len(own) > _MOST else []
        policy = mine.deployment.policy.rpartition("/")[2]  # of a user's own policy without its folder
        names.append(", ".join([policy, *own[:_MOST], *more]))
    return names[0], names[1]


def _flat(side: Side) -> dict[str, Any]:
    """Return settings by their last name, also of the scheduler, and the fleet as a whole."""
    deployment = side.deployment.as_json()
    run = {name: value for name, value in (("replicas", side.replicas), ("router", side.router)) if value is not None}
    return {**run, **deployment, **deployment["scheduler"], "policy": None, "scheduler": None}


def _differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name, value in mine.items():
        if value == other.get(name):
            continue
        if name == "fleet":
            yield "a fleet" if value else "no fleet"
        elif name == "router":
            yield str(value)
        elif name == "replicas" and isinstance(value, int):
            yield counted(value, "replica")
        elif isinstance(value, int | float | str):
            yield f"{name} {value}"
