"""The dashboard's entry: `streamlit run dashboard/app.py -- RUNS_DIR`, which is what `tokentwin dashboard` does."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st
from PIL import Image, ImageDraw

from dashboard.calibration_page import page as calibration_page
from dashboard.frontier_page import page as frontier_page
from dashboard.glossary_page import page as glossary_page
from dashboard.palette import REAL, SIMULATED
from dashboard.plan_page import page as plan_page
from dashboard.policy_lab_page import page as policy_lab_page
from dashboard.run_page import page as run_page
from dashboard.step_page import page as step_page
from dashboard.sweeps_page import page as sweeps_page
from dashboard.trust_page import page as trust_page

RUNS = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")


def plan() -> None:
    plan_page.show(RUNS, FRONTIER)


def frontier() -> None:
    frontier_page.show(RUNS, RUN)


def run() -> None:
    run_page.show(RUNS)


def policy_lab() -> None:
    policy_lab_page.show(RUNS)


def trust() -> None:
    trust_page.show(RUNS)


def calibration() -> None:
    calibration_page.show(RUNS)


def sweeps() -> None:
    sweeps_page.show(RUNS)


def _icon() -> Image.Image:
    """The twins, one orange and one blue: drawn here, since a named icon would be fetched from elsewhere."""
    icon = Image.new("RGBA", (64, 64))
    draw = ImageDraw.Draw(icon)
    draw.ellipse((20, 12, 60, 52), fill=REAL)
    draw.ellipse((4, 12, 44, 52), fill=SIMULATED)
    return icon


st.set_page_config(page_title="tokentwin", page_icon=_icon(), layout="wide")
RUN = st.Page(run, title="Run", icon=":material/timeline:", url_path="run")
FRONTIER = st.Page(frontier, title="Frontier", icon=":material/scatter_plot:", url_path="frontier")
PAGES = [
    # Streamlit has its first page at `/` alone; who types the name that all others have finds it as well.
    st.Page(plan, title="Plan", icon=":material/dns:", url_path="", default=True),
    st.Page(plan, title="Plan", icon=":material/dns:", url_path="plan", visibility="hidden"),
    FRONTIER,
    st.Page(policy_lab, title="Policy lab", icon=":material/compare_arrows:", url_path="policy-lab"),
    RUN,
    st.Page(step_page.show, title="Step", icon=":material/layers:", url_path="step"),
    st.Page(trust, title="Trust", icon=":material/balance:", url_path="trust"),
    st.Page(calibration, title="Calibration", icon=":material/tune:", url_path="calibration"),
    st.Page(sweeps, title="Sweeps", icon=":material/table_chart:", url_path="sweeps"),
    st.Page(glossary_page.show, title="Glossary", icon=":material/menu_book:", url_path="glossary"),
]
page = st.navigation(PAGES, position="top")
page.run()
