"""The dashboard's entry: `streamlit run dashboard/app.py -- RUNS_DIR`, which is what `tokentwin dashboard` does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st
from PIL import Image, ImageDraw
from streamlit.navigation.page import StreamlitPage

from dashboard.calibration_page import page as calibration_page
from dashboard.claims_page import page as claims_page
from dashboard.frontier_page import page as frontier_page
from dashboard.glossary_page import page as glossary_page
from dashboard.live_page import page as live_page
from dashboard.palette import REAL, SIMULATED
from dashboard.plan_page import page as plan_page
from dashboard.policy_lab_page import page as policy_lab_page
from dashboard.run_page import page as run_page
from dashboard.step_page import page as step_page
from dashboard.sweeps_page import page as sweeps_page
from dashboard.trust_page import page as trust_page

RUNS = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")


def _icon() -> Image.Image:
    """The twins, one orange and one blue: drawn here, since a named icon would be fetched from elsewhere."""
    icon = Image.new("RGBA", (64, 64))
    draw = ImageDraw.Draw(icon)
    draw.ellipse((20, 12, 60, 52), fill=REAL)
    draw.ellipse((4, 12, 44, 52), fill=SIMULATED)
    return icon


st.set_page_config(page_title="tokentwin", page_icon=_icon(), layout="wide")


def _page(show: Callable[[], None], title: str, icon: str, **how: Any) -> StreamlitPage:
    return st.Page(show, title=title, icon=f":material/{icon}:", **{"url_path": title.lower().replace(" ", "-")} | how)


RUN = _page(lambda: run_page.show(RUNS), "Run", "timeline")
FRONTIER = _page(lambda: frontier_page.show(RUNS, RUN), "Frontier", "scatter_plot")
PLAN = partial(_page, lambda: plan_page.show(RUNS, FRONTIER), "Plan", "dns")
PAGES = [
    # Streamlit has its first page at `/` alone; who types the name that all others have finds it as well.
    PLAN(url_path="", default=True),
    PLAN(visibility="hidden"),
    FRONTIER,
    _page(lambda: policy_lab_page.show(RUNS), "Policy lab", "compare_arrows"),
    RUN,
    _page(live_page.show, "Live", "monitor_heart"),
    _page(step_page.show, "Step", "layers"),
    _page(lambda: trust_page.show(RUNS), "Trust", "balance"),
    _page(lambda: claims_page.show(RUNS), "Claims", "fact_check"),
    _page(lambda: calibration_page.show(RUNS), "Calibration", "tune"),
    _page(lambda: sweeps_page.show(RUNS), "Sweeps", "table_chart"),
    _page(glossary_page.show, "Glossary", "menu_book"),
]
page = st.navigation(PAGES, position="top")
page.run()
