"""Texts of a plan and of its fleets beside the figures: names, headline figures, and how far to trust them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokentwin.calibration.trust import Trust, noted_trust, weakest
from tokentwin.dashboard.shown import prose
from tokentwin.dashboard.uploads import trace_name
from tokentwin.planning.plan.document import (
    Choice,
    FleetPoint,
    LoadPoint,
    PlanDocument,
    Recommendation,
    TrustSection,
    percent,
)
from tokentwin.planning.plan.frontier import Fleet, Point, per_dollar, per_gpu, unbeaten
from tokentwin.planning.plan.mixed_fleet import MixedFleet
from tokentwin.serving.answers.figures import counted, shown_band, shown_number, shown_share, shown_usd
from tokentwin.serving.answers.report import Column, Table
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.errors import UserError

EXAMPLE = "example"  # the bundled plan, in a link
LOOKED_AT = "plan_looked_at"  # key of a tab's state: the plan whose answer its Plan page showed last
_UNSAID = "the plan does not state how far to trust its step times"


def fleet_name(point: Fleet, spares: int = 0) -> str:
    """Return `4 × TP4 H100 = 16 GPUs`, spares included."""
    return f"{point.called(spares)} = {counted(point.gpus, 'GPU')}"


def answer_name(answer: PlanDocument, best: Recommendation) -> str:
    """Return the name of the fleet that is the answer: the mixed fleet that wins, or else the recommended one."""
    mix = answer.winning_mix
    return fleet_name(best, answer.spares) if mix is None else f"{mix.name} = {counted(mix.gpus, 'GPU')}"


def trusted_part(answer: PlanDocument, best: Recommendation) -> tuple[list[str], Trust]:
    """Return the GPUs of the fleet that is the answer, and the trust in its step times."""
    mix = answer.winning_mix
    if mix is None:
        return [answer.gpu_of(best)], trust(best.trust)
    gpus = dict.fromkeys(answer.gpu_of(pool) for pool in mix.pools)
    return list(gpus), noted_trust(mix.level, mix.reason, _UNSAID)


def headline(best: Recommendation) -> dict[str, str]:
    """Return the main figures of the recommended fleet by name."""
    figures = mixed_headline(best) | {
        "headroom": best.headroom,
        "$ per Mtok output": shown_usd(best.usd_per_mtok_out),
    }
    if best.energy:
        figures |= {
            "W": shown_number(best.energy.power_w),
            "J per token output": shown_number(best.energy.joules_per_token),
        }
    return figures


def attainment_of(answer: PlanDocument, fleet: Point) -> str:
    """Return the attainment of any fleet of a plan, with its band if both ends of its step times were simulated."""
    best = answer.recommendation
    choices = best.choices.existing if best and best.choices else ()
    for known in (*choices, *answer.by_replicas):
        if best and (best.engine, known.replicas) == (fleet.engine, fleet.replicas):
            return known.attained
    return shown_share(fleet.attainment, 1)


def mixed_headline(fleet: MixedFleet | Recommendation) -> dict[str, str]:
    """Return the main figures by name that a mixed fleet has, too."""
    return {
        "GPUs": f"{fleet.gpus:,}",
        "$ per hour": shown_usd(fleet.usd_per_hour),
        "attainment": shown_share(fleet.attainment, 1),
        "tok/s per user": shown_number(fleet.tok_s_user),
    }


def headline_bands(answer: PlanDocument) -> dict[str, str]:
    """Return the 90 % bands of the figures of this fleet that depend on step times. Its GPUs and prices do not."""
    best = answer.recommendation
    if best is None or best.choices is None:
        return {}
    mine = best.choices.recommended
    users = (mine.tok_s_user_if_slow, mine.tok_s_user_if_fast)
    bands = {"attainment": mine.band}
    if all(users):
        bands["tok/s per user"] = shown_band(*users)
    if best.energy:
        bands["W"] = shown_band(*best.energy.power_w_interval)
        bands["J per token output"] = shown_band(*best.energy.joules_per_token_interval)
    return bands | ({"headroom": best.headroom_range} if best.headroom_range else {})


def choice_cards(answer: PlanDocument) -> dict[str, tuple[Choice, bool]]:
    """Return the choice for each level of risk by name, and whether it is the answer; the fewest GPUs come first."""
    best = answer.recommendation
    if best is None or best.choices is None:
        return {}
    likely, chosen, whole = best.choices.as_predicted, best.choices.recommended, best.choices.whole_interval
    named = [("if step times are as predicted", likely), (f"for {shown_share(1 - answer.risk)} of cases", chosen)]
    named += [("for the full 90 % interval of step times", whole)] if whole else []
    return {name: (choice, choice is chosen) for name, choice in sorted(named, key=lambda pair: pair[1].replicas)}


def why_not_fewer(best: Recommendation, spares: int = 0) -> str:
    """Return the heading above the reason why one replica fewer is not enough."""
    beside = f"+{spares}" if spares else ""
    return f"Why not {best.replicas - 1}{beside}?" if best.replicas > 1 else "Why not fewer?"


def trust(point: Point | FleetPoint | LoadPoint | TrustSection) -> Trust:
    return noted_trust(point.level, point.reason, _UNSAID)


def trust_in(points: Sequence[Point | FleetPoint | LoadPoint], things: str) -> Trust:
    """Return the trust in a figure of several points, which are `things` (a plural)."""
    return weakest(map(trust, points), things)


def plan_name(settings: Mapping[str, Any], answer: PlanDocument) -> str:
    """Return one line that distinguishes the plan from others. `settings` are the fields of a `PlanRequest`."""
    best = answer.recommendation
    fleet = best.called(answer.spares) if best else "no fleet"
    if (mix := answer.winning_mix) is not None:
        fleet = mix.name
    slos = ", ".join(prose(objective) for objective in answer.objectives)
    # The model may come from a calibration.
    served = (candidate.deployment["model"] for candidate in answer.candidates.values())
    model = settings.get("model") or next(served, "no model")
    return f"{fleet}: {model_name(model)}, {traffic_name(settings['traffic'], answer)}, {slos}"


def model_name(model: str) -> str:
    """Return a catalogue model's name, or a pasted model's architecture and size."""
    if Path(model).name == model:
        return model
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        spec = spec_from_hf_config(config, "pasted")
    except (OSError, ValueError, UserError):
        return "a model that was deleted"
    size = spec.parameters / 1e9
    return (
        f"{config['architectures'][0]}, {shown_number(size) + ' B' if size >= 1 else shown_number(1000 * size) + ' M'}"
    )


def traffic_name(traffic: Any, answer: PlanDocument) -> str:
    """Return the name and the rate of `traffic`: a specification, several of them, or the path of a trace."""
    spec = traffic if isinstance(traffic, Mapping) else {}
    rate = spec.get("arrivals", {}).get("rate") or answer.requests_per_s
    said = f" at {shown_number(rate)} requests/s" if rate else ""
    name = trace_name(Path(traffic)) if isinstance(traffic, str) else spec.get("name", "a mix")
    return f"{name}{said}"


def every_fleet(answer: PlanDocument, recommended: int | None) -> Table:
    """Return every simulated fleet; `recommended` is the index of the recommended one."""
    points = answer.points
    order, frontier = ranked(points, recommended), {*unbeaten(points, per_gpu), *unbeaten(points, per_dollar)}
    more: list[tuple[Column, Sequence[Any]]] = [
        (Column("SLOs"), [slos_of(answer, points[at]) for at in order]),
        (Column("on a frontier"), [at in frontier for at in order]),
        (Column("trust"), [trust(points[at]).level for at in order]),
    ]
    return answer.fleets([points[at] for at in order], more)


def slos_of(answer: PlanDocument, point: Point) -> str:
    """Return in how many cases a fleet keeps the SLOs: its probability, or at least on which side of the plan's."""
    holds = answer.hold_probabilities.get((point.engine, point.replicas))
    if holds is not None:
        return f"hold in {percent(holds)} of cases"
    if not point.met_as_predicted:
        return "broken"
    return f"hold in {'≥' if point.met else '<'} {shown_share(1 - answer.risk)} of cases"


def ranked(points: Sequence[Point], recommended: int | None) -> list[int]:
    """Return the fleets' indices: the recommended one, fleets that meet the SLOs, then others; the cheapest first."""

    def rank(at: int) -> tuple[bool, bool, float, int]:
        return at != recommended, not points[at].met, points[at].usd_per_hour, points[at].gpus

    return sorted(range(len(points)), key=rank)
