"""A plan as one HTML file: the answer, the figures of the Plan and Frontier pages, and everything that lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, Any

from calibration.standing import ASSUMED, Standing
from dashboard import frontier_charts, plan_charts
from dashboard.bundled import EXTERNAL_SAMPLE
from dashboard.external_results import load_external
from dashboard.html_reports.document import (
    badge,
    beside,
    code,
    details,
    facts,
    figure,
    heading,
    paragraph,
    table,
    write_document,
)
from dashboard.html_reports.origin import origin
from dashboard.plan_command import plan_command
from dashboard.plan_words import (
    ROOM,
    ROOM_HELP,
    alternatives,
    carriers,
    costs,
    fleet_name,
    headroom,
    other_draws,
    plausible_gpus,
    standing,
    standing_of,
    why_not_fewer,
)
from dashboard.prose import prose, sentence
from dashboard.published_error import error_line
from serving.metrics import metric
from tokentwin.exports.plan import PlanAnswer


def write_html(source: PlanAnswer, out: IO[bytes]) -> None:
    """The report."""
    answer = source.document
    best = answer["recommendation"]
    title = fleet_name(best, answer["spares"]) if best else "No fleet"
    blocks = [
        paragraph(prose(answer["answer"])),
        paragraph(f"For {prose(', '.join(answer['objectives']))}.", soft=True),
        *(_recommended(answer, best) if best else ()),
        *_frontiers(answer),
        *_others(answer),
        heading("The traffic"),
        paragraph(_traffic(answer), soft=True),
        figure(plan_charts.lengths(answer["lengths"]), Standing(ASSUMED, "it is what the plan was asked for")),
        origin(answer, "Plan", *plan_command(answer.get("asked", {}))),
    ]
    write_document(out, title, blocks)


def _recommended(answer: Mapping[str, Any], best: Mapping[str, Any]) -> Iterator[str]:
    yield badge(standing(best["standing"]))
    gpu = answer["candidates"][best["engine"]]["gpu"]
    if error := error_line(load_external(EXTERNAL_SAMPLE), gpu):
        yield paragraph(error, soft=True)
    yield facts(
        {
            "GPUs": f"{best['gpus']:,}",
            "plausible": plausible_gpus(best),
            "SLOs met on other draws of the traffic": other_draws(best) or "–",
            "$ per hour": _usd(best["usd_per_hour"]),
            "$ per Mtok output": _usd(best["usd_per_mtok_out"]),
            "attainment": f"{100 * best['attainment']:.1f} %",
            "headroom": headroom(best),
            "tok/s per user": "–" if best["tok_s_user"] is None else f"{best['tok_s_user']:,.0f}",
        }
    )
    reasons = [f"{prose(answer['why_not_fewer'] or '')}."]
    if short := answer.get("too_short"):
        reasons.insert(0, sentence(short))
    if best["breaks_first"]:
        more = f"beyond {best['headroom_percent']} % more"
        reasons.append(f"With more traffic, {prose(best['breaks_first'])} breaks first, {more}.")
    offers = [best, *answer["runners_up"]]
    yield beside(
        [
            heading("How many replicas")
            + figure(
                plan_charts.attainment(answer["by_replicas"], best["replicas"]),
                standing_of(answer["by_replicas"], "simulated fleets"),
            ),
            heading(why_not_fewer(best, answer["spares"]))
            + "".join(map(paragraph, reasons))
            + figure(plan_charts.prices(offers, answer["spares"]), standing_of(offers, "fleets")),
        ]
    )
    drawn = plan_charts.latencies(answer)
    if drawn:
        yield heading("Latency against traffic")
        yield beside(
            [
                figure(curve, standing_of(answer["by_rate"], "rates"), metric(name).label)
                for name, curve in drawn.items()
            ]
        )
    if best["vllm_serve"]:
        yield heading("To serve it") + code(best["vllm_serve"])
    yield details("the whole deployment of one replica", best["deployment"])


def _frontiers(answer: Mapping[str, Any]) -> Iterator[str]:
    points = answer["points"]
    if not points:
        return
    best = answer["recommendation"]
    recommended = frontier_charts.place(points, best) if best else None
    rated = standing_of(points, "fleets")
    best_of = frontier_charts.on_a_frontier(points)
    yield heading("What can be bought")
    yield paragraph(f"{len(points)} fleets, simulated on the same {answer['requests']:,} requests.", soft=True)
    yield beside(
        [
            figure(frontier_charts.frontier(points, recommended), rated, "Fast for users, or for GPUs"),
            figure(frontier_charts.price(points, recommended), rated, "What speed costs"),
        ]
    )
    yield table(
        [_row(points[at], answer["spares"], at in best_of) for at in frontier_charts.ranked(points, recommended)]
    )


def _others(answer: Mapping[str, Any]) -> Iterator[str]:
    """Every engine that was a candidate, and why it is not the answer."""
    if rows := alternatives(answer):
        yield heading("What else there is") + table(rows, dict.fromkeys(ROOM, ROOM_HELP))


def _row(point: Mapping[str, Any], spares: int, on_frontier: bool) -> dict[str, Any]:
    return {
        "fleet": carriers(point, spares),
        **costs(point),
        "attainment (%)": 100 * point["attainment"],
        "SLOs": "met" if point["met"] else "broken",
        "on a frontier": on_frontier,
        "standing": standing(point).mark,
    }


def _traffic(answer: Mapping[str, Any]) -> str:
    rate = answer["requests_per_s"]
    pace = "all at once" if rate is None else f"{rate:,.3g} a second"
    return f"{answer['requests']:,} requests in {answer['span_s']:,.0f} s, {pace}."


def _usd(value: float | None) -> str:
    return "–" if value is None else f"${value:,.2f}"
