"""A comparison as one HTML file: the verdict, the figures of the Policy lab, every number, and what ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, Any

from calibration.standing import Standing, noted, together
from dashboard import lab_charts
from dashboard.html_reports.document import (
    badge,
    beside,
    details,
    figure,
    heading,
    paragraph,
    table,
    warning,
    write_document,
)
from dashboard.html_reports.origin import origin
from dashboard.lab.side_names import side_names
from dashboard.lab.words import CARRIED_OVER, basis, disturbance, errors, fairness, ranking
from dashboard.lab_charts import Sides, change, label, side_colours, unit
from dashboard.prose import capitalised
from tokentwin.comparison_document import simulated_errors
from tokentwin.exports.comparison import ComparisonAnswer


def write_html(source: ComparisonAnswer, out: IO[bytes]) -> None:
    """The report."""
    answer = source.document
    names = Sides(*side_names(answer["a"], answer["b"]))
    colours = side_colours(*(answer[side]["deployment"]["policy"] for side in "ab"))
    standing = _standing(answer)
    blocks = [
        paragraph(f"A: {names.a}. B: {names.b}."),
        badge(standing),
        paragraph(basis(answer), soft=True),
        warning(CARRIED_OVER) if answer["units"]["carry_over"] else "",
        warning(disturbance(answer)) if answer.get("disturbed") else "",
        heading("Request by request"),
        figure(lab_charts.cdfs(answer["cdfs"], names, colours, log_x=False), standing),
        beside(
            [
                heading("What can be claimed") + figure(lab_charts.differences(answer["rows"], colours), standing),
                heading("Winners and losers") + figure(lab_charts.winners(answer["tallies"], colours), standing),
            ]
        ),
        *_tenants(answer, names, colours),
        *_ranking(answer),
        heading("The numbers"),
        table([_row(row) for row in answer["rows"]]),
        paragraph("From and to are the ends of the 95 % interval of B - A, in the row's unit.", soft=True),
        heading("The two deployments"),
        *(details(f"{side.upper()}: {name}", answer[side]) for side, name in zip("ab", names, strict=True)),
        origin(answer, "Policy lab"),
    ]
    write_document(out, capitalised(answer["verdict"]), blocks)


def _standing(sides: Mapping[str, Any]) -> Standing:
    """Of `a` and `b` together: that of the less certain one."""
    return together((noted(sides[side], "the side does not say how far to trust it") for side in "ab"), "sides")


def _tenants(answer: Mapping[str, Any], names: Sides, colours: Sides) -> Iterator[str]:
    if answer["tenants"]:
        yield heading("Who is served")
        yield figure(lab_charts.shares(answer["tenants"], names, colours), _standing(answer))
        yield paragraph(fairness(answer))


def _ranking(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer.get("ranking") is None or answer.get("simulated") is None:
        return
    yield heading("Did the simulator see it?")
    yield paragraph(ranking(answer["ranking"])[1])
    yield paragraph(f"Simulated: {answer['simulated']['verdict']}.", soft=True)
    yield figure(lab_charts.ranking(answer["ranking"]), _standing(answer["simulated"]))
    yield heading("Simulated against real")
    yield paragraph(errors(answer))
    yield table([_error(row) for row in simulated_errors(answer)])


def _error(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "of": f"{label(row)}, {row['side']}",
        "unit": unit(row),
        "simulated": row["simulated"],
        "real": row["real"],
        "error (%)": change({"metric": row["metric"], "percent": row["error"]}),
    }


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "of": label(row),
        "unit": unit(row),
        "A": row["a"],
        "B": row["b"],
        "B - A (%)": change(row),
        "from": row["low"],
        "to": row["high"],
        "better": row["better"] or None,
    }
