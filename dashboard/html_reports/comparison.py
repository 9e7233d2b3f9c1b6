"""A comparison as one HTML file: the verdict, the figures of the Policy lab, every number, and what ran."""

from __future__ import annotations

from collections.abc import Iterator

from dashboard.html_reports.document import badge, beside, details, figure, heading, origin, paragraph, table, warning
from dashboard.policy_lab_page import charts as lab_charts
from dashboard.policy_lab_page import words
from dashboard.policy_lab_page.charts import Sides, change, side_colours
from dashboard.policy_lab_page.words import side_names
from dashboard.shown import capitalised
from planning.compare.document import ComparisonDocument

_CHANGE, _ERROR = "B - A (%)", "error (%)"  # columns that a file shows with their sign, and whether they are in points


def comparison_report(answer: ComparisonDocument) -> tuple[str, list[str]]:
    names, sides = Sides(*side_names(answer.a, answer.b)), (answer.a, answer.b)
    colours = side_colours(*(side.deployment.policy for side in sides))
    rated, rows = words.provenance(answer), answer.rows
    told = zip(rows, words.number_rows(rows), strict=True)
    blocks = [
        paragraph(f"A: {names.a}. B: {names.b}."),
        badge(rated),
        paragraph(words.basis(answer), soft=True),
        warning(words.CARRIED_OVER) if answer.units.carry_over else "",
        warning(words.disturbance(answer)) if answer.disturbed else "",
        heading("Latency of all requests"),
        figure(lab_charts.cdfs(answer.cdfs, names, colours), rated),
        beside(
            [
                heading("Differences") + figure(lab_charts.differences(rows, colours), rated),
                heading("Winners and losers") + figure(lab_charts.winners(answer.tallies, colours), rated),
            ]
        ),
        *_tenants(answer, names, colours),
        *_ranking(answer),
        heading("The numbers"),
        table([shown | {_CHANGE: change(row.metric, row.percent)} for row, shown in told]),
        paragraph(words.ENDS, soft=True),
        heading("The two deployments"),
        *(details(f"{key}: {name}", side.as_json()) for key, name, side in zip("AB", names, sides, strict=True)),
        origin(answer.version, answer.inputs, "Policy lab"),
    ]
    return capitalised(answer.verdict), blocks


def _tenants(answer: ComparisonDocument, names: Sides, colours: Sides) -> Iterator[str]:
    if answer.tenants:
        yield heading("Share of each tenant")
        yield figure(lab_charts.shares(answer.tenants, names, colours), words.provenance(answer))
        yield paragraph(words.fairness(answer))


def _ranking(answer: ComparisonDocument) -> Iterator[str]:
    if answer.ranking is None or answer.simulated is None:
        return
    yield heading("Did the simulator see it?")
    yield paragraph(words.ranking(answer.ranking)[1])
    yield paragraph(f"Simulated: {answer.simulated.verdict}.", soft=True)
    yield figure(lab_charts.ranking(answer.ranking), words.provenance(answer.simulated))
    yield heading("Simulated against real")
    yield paragraph(words.errors(answer))
    told = zip(words.error_rows(answer), answer.errors(), strict=True)
    yield table([row | {_ERROR: change(of.metric, of.error)} for row, of in told])
