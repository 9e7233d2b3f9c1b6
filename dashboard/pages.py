"""All pages of the dashboard, in the order of its navigation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.navigation.page import StreamlitPage

PAGES = {  # title and icon of each page by the name of its folder
    "plan": ("Plan", "dns"),
    "frontier": ("Frontier", "scatter_plot"),
    "policy_lab": ("Policy lab", "compare_arrows"),
    "run": ("Run", "timeline"),
    "live": ("Live", "monitor_heart"),
    "step": ("Step", "layers"),
    "your_server": ("Your server", "fingerprint"),
    "trust": ("Trust", "balance"),
    "claims": ("Claims", "fact_check"),
    "calibration": ("Calibration", "tune"),
    "sweeps": ("Sweeps", "table_chart"),
    "glossary": ("Glossary", "menu_book"),
}
_LEAD_ON = {"plan", "frontier", "policy_lab", "run", "claims", "your_server", "trust"}  # pages that link to other pages
_OF_NO_RUNS = {"live", "step", "glossary"}


def pages(runs: Path) -> list[StreamlitPage]:
    """Return the pages over the directory `runs`; Streamlit needs new page objects for each drawing."""
    ways: dict[str, StreamlitPage] = {}  # complete when a page is drawn

    def page(name: str, **how: Any) -> StreamlitPage:
        given: tuple[Any, ...] = (runs,)
        if name in _OF_NO_RUNS:
            given = ()
        elif name in _LEAD_ON:
            given = (runs, ways)
        title, icon = PAGES[name]
        how = {"url_path": name.replace("_", "-")} | how
        return st.Page(lambda: import_page(name).show(*given), title=title, icon=f":material/{icon}:", **how)

    # Streamlit serves the first page only at `/`. A hidden copy serves it at its name, as other pages are served.
    shown = [page("plan", url_path="", default=True), page("plan", visibility="hidden"), *map(page, list(PAGES)[1:])]
    ways |= {page.title: page for page in reversed(shown)}
    return shown


def import_page(name: str) -> Any:
    """Return the module of a page, imported when it is first needed: together the modules take seconds."""
    return import_module(f"dashboard.{name}_page.page")
