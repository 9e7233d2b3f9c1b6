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
    if mix is not None:
        yield "fleet", Shown(None, mix.name)
        yield "GPUs", Shown(mix.gpus, f"{mix.gpus:,}")
        yield "$ per hour", Shown(mix.usd_per_hour, shown_usd(mix.usd_per_hour))
        yield "SLOs hold", Shown(mix.holds, NOTHING if mix.holds is None else percent(mix.holds), share=True)
        yield "attainment", Shown(mix.attainment, shown_share(mix.attainment, 1), share=True)
        yield "tok/s per user", Shown(mix.tok_s_user, shown_number(mix.tok_s_user))
        yield "$ per Mtok output", Shown(None, NOTHING)
        return
    if best is None:
        names = ("fleet", "GPUs", "$ per hour", "SLOs hold", "attainment", "tok/s per user", "$ per Mtok output")
        yield from ((name, Shown(None, "no fleet" if name == "fleet" else NOTHING)) for name in names)
        return
    holds = best.choices.recommended.holds if best.choices else best.holds
    yield "fleet", Shown(None, best.called(plan.answer.spares))
    yield "GPUs", Shown(best.gpus, f"{best.gpus:,}")
    yield "$ per hour", Shown(best.usd_per_hour, shown_usd(best.usd_per_hour))
    yield "SLOs hold", Shown(holds, NOTHING if holds is None else percent(holds), share=True)
    yield "attainment", Shown(best.attainment, shown_share(best.attainment, 1), share=True)
    yield "tok/s per user", Shown(best.tok_s_user, shown_number(best.tok_s_user))
    yield "$ per Mtok output", Shown(best.usd_per_mtok_out, shown_usd(best.usd_per_mtok_out))
