"""A plan as one HTML file: the answer, the figures of the Plan and Frontier pages, and everything that lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from calibration.standing import ASSUMED, Standing, noted, together
from dashboard import frontier_charts, plan_charts
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
from dashboard.prose import prose, sentence
from serving.metrics import metric
from tokentwin.exports.plan import PlanAnswer

_UNSAID = "the plan does not say how far these step times can be trusted"


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


def fleet_name(point: Mapping[str, Any], spares: int = 0) -> str:
    """`4 × TP4 H100 = 16 GPUs`, spares among them."""
    gpus = f"{point['gpus']} GPU{'' if point['gpus'] == 1 else 's'}"
    return f"{point['replicas'] + spares} × {point['engine']} = {gpus}"


def _standing(points: Sequence[Mapping[str, Any]], things: str) -> Standing:
    """Of several points of a plan, together."""
    return together((noted(point, _UNSAID) for point in points), things)


def _recommended(answer: Mapping[str, Any], best: Mapping[str, Any]) -> Iterator[str]:
    low, high = best["plausible_gpus"]
    yield badge(noted(best["standing"], _UNSAID))
    yield facts(
        {
            "GPUs": f"{best['gpus']:,}",
            "plausible": f"{low} or more" if high is None else f"{low}" if low == high else f"{low}–{high}",
            "$ per hour": _usd(best["usd_per_hour"]),
            "$ per Mtok output": _usd(best["usd_per_mtok_out"]),
            "attainment": f"{100 * best['attainment']:.1f} %",
            "headroom": f"{'' if best['breaks_first'] else '> '}{best['headroom_percent']} %",
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
    fewer = f"Why not {best['replicas'] - 1}?" if best["replicas"] > 1 else "Why not fewer?"
    yield beside(
        [
            heading("How many replicas")
            + figure(
                plan_charts.attainment(answer["by_replicas"], best["replicas"]),
                _standing(answer["by_replicas"], "simulated fleets"),
            ),
            heading(fewer)
            + "".join(map(paragraph, reasons))
            + figure(plan_charts.prices(offers), _standing(offers, "fleets")),
        ]
    )
    drawn = plan_charts.latencies(answer)
    if drawn:
        yield heading("Latency against traffic")
        yield beside(
            [figure(curve, _standing(answer["by_rate"], "rates"), metric(name).label) for name, curve in drawn.items()]
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
    rated = _standing(points, "fleets")
    best_of = frontier_charts.on_a_frontier(points)
    yield heading("What can be bought")
    yield paragraph(f"{len(points)} fleets, simulated on the same {answer['requests']:,} requests.", soft=True)
    yield beside(
        [
            figure(frontier_charts.frontier(points, recommended), rated, "Fast for users, or for GPUs"),
            figure(frontier_charts.price(points, recommended), rated, "What speed costs"),
        ]
    )
    yield table([_row(point, at in best_of) for at, point in enumerate(points)])


def _others(answer: Mapping[str, Any]) -> Iterator[str]:
    """Engines of which no fleet is the answer, and why."""
    rows = [
        {"engine": entry["engine"], "verdict": f"dearer: at least {_usd(entry['usd_per_hour_at_least'])}/h"}
        for entry in answer["dearer"]
    ]
    rows += [
        {"engine": entry["engine"], "verdict": prose(f"will not do: {entry['reason']}")}
        for entry in answer["infeasible"]
    ]
    if rows:
        yield heading("What else there is") + table(rows)


def _row(point: Mapping[str, Any], on_frontier: bool) -> dict[str, Any]:
    return {
        "fleet": f"{point['replicas']} × {point['engine']}",
        "GPUs": point["gpus"],
        "$/h": point["usd_per_hour"],
        "tok/s per user": point["tok_s_user"],
        "tok/s per GPU": point["tok_s_gpu"],
        "$/Mtok output": point["usd_per_mtok_out"],
        "attainment (%)": 100 * point["attainment"],
        "SLOs": "met" if point["met"] else "broken",
        "on a frontier": on_frontier,
        "standing": noted(point, _UNSAID).mark,
    }


def _traffic(answer: Mapping[str, Any]) -> str:
    rate = answer["requests_per_s"]
    pace = "all at once" if rate is None else f"{rate:,.3g} a second"
    return f"{answer['requests']:,} requests in {answer['span_s']:,.0f} s, {pace}."


def _usd(value: float | None) -> str:
    return "–" if value is None else f"${value:,.2f}"
