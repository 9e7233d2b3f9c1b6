"""A plan as one HTML file: the answer, the figures of the Plan and Frontier pages, and everything that lost."""

from __future__ import annotations

from collections.abc import Iterator

from calibration.provenance import ASSUMED, Provenance
from dashboard.bundled import EXTERNAL_SAMPLE
from dashboard.frontier_page import charts as frontier_charts
from dashboard.html_reports.document import (
    badge,
    beside,
    code,
    details,
    facts,
    figure,
    heading,
    origin,
    paragraph,
    table,
)
from dashboard.plan_page import charts as plan_charts
from dashboard.plan_page import words
from dashboard.plan_page.command import plan_command
from dashboard.plan_page.words import fleet_rows
from dashboard.shown import prose, sentence
from dashboard.trust_page.external_results import error_line, load_external
from planning.plan.document import PlanDocument, Recommendation
from serving.metrics import metric


def plan_report(answer: PlanDocument) -> tuple[str, list[str]]:
    best = answer.recommendation
    title = words.fleet_name(best, answer.spares) if best else "No fleet"
    blocks = [
        paragraph(prose(" ".join(filter(None, (answer.answer, answer.risk_told))))),
        paragraph(f"For {prose(', '.join(answer.objectives))}.", soft=True),
        *(_recommended(answer, best) if best else ()),
        *_frontiers(answer),
        *_others(answer),
        heading("The traffic"),
        paragraph(words.traffic_told(answer), soft=True),
        figure(plan_charts.lengths(answer.lengths), Provenance(ASSUMED, "it is what the plan was asked for")),
        origin(answer.version, answer.inputs, "Plan", *plan_command(answer.inputs)),
    ]
    return title, blocks


def _recommended(answer: PlanDocument, best: Recommendation) -> Iterator[str]:
    yield badge(words.provenance(best.standing))
    if error := error_line(load_external(EXTERNAL_SAMPLE), answer.gpu_of(best)):
        yield paragraph(error, soft=True)
    bands = words.headline_bands(answer)
    told = {
        name: f"{value} ({bands[name]})" if name in bands else value for name, value in words.headline(best).items()
    }
    yield facts(told | {"SLOs hold on other draws of the traffic": best.elsewhere or "–"})
    yield paragraph("In brackets: 90 % bands.", soft=True)
    yield from (paragraph(f"Close to it: {prose(tie)}") for tie in answer.near_ties)
    reasons = [f"{prose(answer.why_not_fewer or '')}."]
    if answer.too_short:
        reasons.insert(0, sentence(answer.too_short))
    if best.breaks_first:
        grown = f"When traffic grows by more than {best.headroom_percent} %"
        reasons.append(f"{grown}, {prose(best.breaks_first)} breaks first.")
    offers = [best, *answer.runners_up]
    yield beside(
        [
            heading("How many replicas")
            + figure(
                plan_charts.attainment(answer.by_replicas, best.replicas),
                words.provenance_of(answer.by_replicas, "simulated fleets"),
            ),
            heading(words.why_not_fewer(best, answer.spares))
            + "".join(map(paragraph, reasons))
            + figure(plan_charts.prices(offers, answer.spares), words.provenance_of(offers, "fleets")),
        ]
    )
    drawn = plan_charts.latencies(answer)
    if drawn:
        yield heading("Latency against traffic")
        yield beside(
            [
                figure(curve, words.provenance_of(answer.by_rate, "rates"), metric(name).label)
                for name, curve in drawn.items()
            ]
        )
    if best.vllm_serve:
        yield heading("Serve it with vLLM") + code(best.vllm_serve)
    yield details("the whole deployment of one replica", best.deployment)


def _frontiers(answer: PlanDocument) -> Iterator[str]:
    points = answer.points
    if not points:
        return
    best = answer.recommendation
    recommended = answer.place(best) if best else None
    rated = words.provenance_of(points, "fleets")
    yield heading("Every fleet of the plan")
    yield paragraph(f"{len(points)} fleets, each simulated with the same {answer.requests:,} requests.", soft=True)
    yield beside(
        [
            figure(frontier_charts.frontier(answer.engine_curves, best), rated, "Speed per user and per GPU"),
            figure(frontier_charts.price(answer.engine_curves, best), rated, "What speed costs"),
        ]
    )
    yield table(fleet_rows(answer, recommended))


def _others(answer: PlanDocument) -> Iterator[str]:
    """Every engine that was a candidate, and why it is not the answer."""
    if rows := words.alternatives(answer):
        yield heading("Other candidates") + table(rows, dict.fromkeys(words.ROOM, words.ROOM_HELP))
