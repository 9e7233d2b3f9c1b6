"""Two plans beside each other: the pinned plan A, the plan B of the page, and their difference in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st

from dashboard import blocks
from dashboard.plan_page.words import plan_name
from dashboard.planned import Planned, plan_named
from dashboard.shown import literal
from dashboard.url import go_to, named
from planning.plan.document import percent
from serving.answers.figures import NOTHING, shown_change, shown_number, shown_share, shown_usd
from serving.answers.report import FIGURE, Column, Table

_CALLED = {"gpus": "GPUs", "slos": "SLOs", "tensor_parallel_sizes": "tensor parallel", "vary": "engine settings"}


class _Figure(NamedTuple):
    """A figure of a plan: a number, as it is shown; a `share` differs in points, other numbers in percent."""

    value: float | None
    shown: str
    share: bool = False


def pinned(runs: Path, plan: Planned) -> None:
    """Draw the pinned plan beside `plan`, or a button that pins `plan`; the link keeps the pin."""
    name = named("pin")
    other = plan_named(runs, name) if name and name != plan.name else None
    if other is None:
        if name == plan.name:
            st.caption("This plan is pinned as A. Change the inputs, and the next plan stands beside it.")
        else:
            st.button("Pin this plan as A", "pin", on_click=go_to, kwargs={"pin": plan.name}, icon=":material/keep:")
        return
    blocks.heading("The pinned plan beside this one", None)
    for letter, one in (("A", other), ("B", plan)):
        st.caption(f"{letter}: {literal(plan_name(one.settings, one.answer))}")
    st.caption(f"Different inputs: {literal(differing(other.settings, plan.settings)) or 'none'}.")
    blocks.table(beside(other, plan))
    st.button("Unpin A", "unpin", on_click=go_to, kwargs={"pin": ""}, icon=":material/keep_off:")


def beside(a: Planned, b: Planned) -> Table:
    """Return the main figures of A and B with the change from A to B between them."""
    first, second = (dict(_figures(plan)) for plan in (a, b))
    rows = [(name, first[name].shown, _change(first[name], second[name]), second[name].shown) for name in first]
    columns = (Column("figure"), Column("A", FIGURE), Column("B against A", FIGURE), Column("B", FIGURE))
    return Table(columns, rows)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the names of the inputs that differ between the settings of two plans."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return ", ".join(_CALLED.get(name, name.replace("_", " ")) for name in names)


def _figures(plan: Planned) -> Iterator[tuple[str, _Figure]]:
    best, mix = plan.answer.recommendation, plan.answer.winning_mix
    if mix is not None:
        yield "fleet", _Figure(None, mix.name)
        yield "GPUs", _Figure(mix.gpus, f"{mix.gpus:,}")
        yield "$ per hour", _Figure(mix.usd_per_hour, shown_usd(mix.usd_per_hour))
        yield "SLOs hold", _Figure(mix.holds, NOTHING if mix.holds is None else percent(mix.holds), share=True)
        yield "attainment", _Figure(mix.attainment, shown_share(mix.attainment, 1), share=True)
        yield "tok/s per user", _Figure(mix.tok_s_user, shown_number(mix.tok_s_user))
        yield "$ per Mtok output", _Figure(None, NOTHING)
        return
    if best is None:
        names = ("fleet", "GPUs", "$ per hour", "SLOs hold", "attainment", "tok/s per user", "$ per Mtok output")
        yield from ((name, _Figure(None, "no fleet" if name == "fleet" else NOTHING)) for name in names)
        return
    holds = best.choices.recommended.holds if best.choices else best.holds
    yield "fleet", _Figure(None, best.called(plan.answer.spares))
    yield "GPUs", _Figure(best.gpus, f"{best.gpus:,}")
    yield "$ per hour", _Figure(best.usd_per_hour, shown_usd(best.usd_per_hour))
    yield "SLOs hold", _Figure(holds, NOTHING if holds is None else percent(holds), share=True)
    yield "attainment", _Figure(best.attainment, shown_share(best.attainment, 1), share=True)
    yield "tok/s per user", _Figure(best.tok_s_user, shown_number(best.tok_s_user))
    yield "$ per Mtok output", _Figure(best.usd_per_mtok_out, shown_usd(best.usd_per_mtok_out))


def _change(a: _Figure, b: _Figure) -> str:
    if a.value is None or b.value is None:
        return "" if a.shown == b.shown else "other"
    if a.value == b.value:
        return "the same"
    if a.share:
        return shown_change(100 * (b.value - a.value), unit=" points")
    return shown_change(100 * (b.value / a.value - 1)) if a.value else NOTHING
