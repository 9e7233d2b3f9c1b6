"""The pinned plan beside the plan of the page, by its main figures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tokentwin.dashboard.beside import Shown, Side, pinned, show_beside
from tokentwin.dashboard.plan_page.words import plan_name
from tokentwin.dashboard.planned import Planned, plan_named
from tokentwin.planning.plan.document import percent
from tokentwin.serving.answers.figures import NOTHING, shown_number, shown_share, shown_usd


def pinned_plan(runs: Path, plan: Planned) -> None:
    """Draw the pinned plan beside `plan`, or a button that pins `plan`; the link keeps the pin."""
    other = pinned("plan", plan.name, partial(plan_named, runs))
    if other is not None:
        show_beside("plan", _side(other), _side(plan))


def _side(plan: Planned) -> Side:
    return Side(plan_name(plan.settings, plan.answer), plan.settings, dict(_figures(plan)))


def _figures(plan: Planned) -> Iterator[tuple[str, Shown]]:
    best, mix = plan.answer.recommendation, plan.answer.winning_mix
    fleet = mix or best
    if fleet is None:
        names = ("fleet", "GPUs", "$ per hour", "SLOs hold", "attainment", "tok/s per user", "$ per Mtok output")
        yield from ((name, Shown(None, "no fleet" if name == "fleet" else NOTHING)) for name in names)
        return
    holds = mix.holds if mix else plan.answer.hold_probabilities[best.engine, best.replicas] if best else None
    usd_per_mtok_out = best.usd_per_mtok_out if best and mix is None else None
    yield "fleet", Shown(None, mix.name if mix else best.called(plan.answer.spares) if best else "")
    yield "GPUs", Shown(fleet.gpus, f"{fleet.gpus:,}")
    yield "$ per hour", Shown(fleet.usd_per_hour, shown_usd(fleet.usd_per_hour))
    yield "SLOs hold", Shown(holds, NOTHING if holds is None else percent(holds), share=True)
    yield "attainment", Shown(fleet.attainment, shown_share(fleet.attainment, 1), share=True)
    yield "tok/s per user", Shown(fleet.tok_s_user, shown_number(fleet.tok_s_user))
    yield "$ per Mtok output", Shown(usd_per_mtok_out, shown_usd(usd_per_mtok_out))
