"""All pages of the dashboard, in the order of its navigation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from tokentwin.dashboard.library import RECORDING, find
from tokentwin.planning.jobs.job import finished

PAGES = {  # title and icon of each page by the name of its folder
    "plan": ("Plan", "dns"),
    "policy_lab": ("Policy lab", "compare_arrows"),
    "run": ("Run", "timeline"),
    "live": ("Live", "monitor_heart"),
    "sweeps": ("Sweeps", "table_chart"),
    "trust": ("Trust", "balance"),
    "your_server": ("Your server", "fingerprint"),
    "step": ("Step", "layers"),
    "calibration": ("Calibration", "tune"),
    "claims": ("Claims", "fact_check"),
    "glossary": ("Glossary", "menu_book"),
    "frontier": ("Frontier", "scatter_plot"),
}
_TOP = ("plan", "policy_lab", "run", "live", "sweeps", "trust")  # pages in the bar
_UNLISTED = ("frontier", "glossary")  # they open by their links
_LEAD_ON = {"plan", "frontier", "policy_lab", "run", "claims", "your_server", "trust"}  # pages that link to other pages
_OF_NO_RUNS = {"frontier", "live", "step", "glossary"}
_OF_OWN_POLICIES = {"plan", "policy_lab", "sweeps"}


def pages(runs: Path, own_policies: bool = False) -> dict[str, list[StreamlitPage]]:
    """Return the pages over the directory `runs` by section of the menu; each drawing needs new page objects.

    If `own_policies` is set, users may upload policies, which are code.
    """
    ways: dict[str, StreamlitPage] = {}  # complete when a page is drawn

    def page(name: str, **how: Any) -> StreamlitPage:
        given: tuple[Any, ...] = () if name in _OF_NO_RUNS else (runs,)
        given += (ways,) if name in _LEAD_ON else ()
        given += (own_policies,) if name in _OF_OWN_POLICIES else ()
        title, icon = PAGES[name]
        how = {"url_path": name.replace("_", "-")} | how
        return st.Page(lambda: import_page(name).show(*given), title=title, icon=f":material/{icon}:", **how)

    # Streamlit serves the first page only at `/`. A copy serves it at its name, as other pages are served. The bar has
    # the one that is open, because it could not mark the other.
    at_its_name = urlsplit(st.context.url or "").path.rstrip("/").endswith("/plan")
    plan = [page("plan", url_path="", default=True, visibility="hidden" if at_its_name else "visible")]
    plan.append(page("plan", visibility="visible" if at_its_name else "hidden"))
    top = [*plan[:: -1 if at_its_name else 1], *map(page, _TOP[1:]), *(page(n, visibility="hidden") for n in _UNLISTED)]
    evidence = [page(name) for name in PAGES if name not in (*_TOP, *_UNLISTED)]
    ways |= {page.title: page for page in reversed([*top, *evidence])}
    return {"": top, "Evidence": evidence}


def first_page(page: StreamlitPage, runs: Path) -> StreamlitPage | None:
    """Return the page that a tab shows first in place of `page`; None for `page` itself.

    A tab that is opened without a link shows the results under `runs` if there is no plan among them: a validation, or
    else the newest recording.
    """
    new = "visited" not in st.session_state
    st.session_state["visited"] = True
    if not new or page.url_path or st.query_params or not find(runs, RECORDING):
        return None
    if finished(runs / "jobs", import_module("tokentwin.dashboard.plan_page.tasks").PLAN):
        return None
    name = "trust" if find(runs, import_page("trust").REPORT) else "run"
    return next(one for one in pages(runs)[""] if one.url_path == name)


def import_page(name: str) -> Any:
    """Return the module of a page, imported when it is first needed: together the modules take seconds."""
    return import_module(f"tokentwin.dashboard.{name}_page.page")
