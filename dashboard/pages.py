"""All pages of the dashboard, as its navigation has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from dashboard.calibration_page import page as calibration_page
from dashboard.claims_page import page as claims_page
from dashboard.frontier_page import page as frontier_page
from dashboard.glossary_page import page as glossary_page
from dashboard.live_page import page as live_page
from dashboard.plan_page import page as plan_page
from dashboard.policy_lab_page import page as policy_lab_page
from dashboard.run_page import page as run_page
from dashboard.step_page import page as step_page
from dashboard.sweeps_page import page as sweeps_page
from dashboard.trust_page import page as trust_page


def pages(runs: Path) -> list[StreamlitPage]:
    """The pages over what lies under `runs`; made anew for each drawing, as Streamlit wants them."""
    ways: dict[str, StreamlitPage] = {}  # complete when a page is drawn
    plan = partial(_page, lambda: plan_page.show(runs, ways), "Plan", "dns")
    found = [
        # Streamlit has its first page at `/` alone; who types the name that all others have finds it as well.
        plan(url_path="", default=True),
        plan(visibility="hidden"),
        _page(lambda: frontier_page.show(runs, ways), "Frontier", "scatter_plot"),
        _page(lambda: policy_lab_page.show(runs, ways), "Policy lab", "compare_arrows"),
        _page(lambda: run_page.show(runs, ways), "Run", "timeline"),
        _page(live_page.show, "Live", "monitor_heart"),
        _page(step_page.show, "Step", "layers"),
        _page(lambda: trust_page.show(runs), "Trust", "balance"),
        _page(lambda: claims_page.show(runs, ways), "Claims", "fact_check"),
        _page(lambda: calibration_page.show(runs), "Calibration", "tune"),
        _page(lambda: sweeps_page.show(runs), "Sweeps", "table_chart"),
        _page(glossary_page.show, "Glossary", "menu_book"),
    ]
    ways |= {page.title: page for page in reversed(found)}
    return found


def _page(show: Callable[[], None], title: str, icon: str, **how: Any) -> StreamlitPage:
    return st.Page(show, title=title, icon=f":material/{icon}:", **{"url_path": title.lower().replace(" ", "-")} | how)
