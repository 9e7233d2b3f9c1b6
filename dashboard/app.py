"""The dashboard's entry: `streamlit run dashboard/app.py -- RUNS_DIR`, which is what `tokentwin dashboard` does."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st
from PIL import Image, ImageDraw

from dashboard import run_page, step_page, trust_page
from dashboard.palette import REAL, SIMULATED

RUNS = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")


def trust() -> None:
    trust_page.show(RUNS)


def run() -> None:
    run_page.show(RUNS)


def _icon() -> Image.Image:
    """The twins, one orange and one blue: drawn here, since a named icon would be fetched from elsewhere."""
    icon = Image.new("RGBA", (64, 64))
    draw = ImageDraw.Draw(icon)
    draw.ellipse((20, 12, 60, 52), fill=REAL)
    draw.ellipse((4, 12, 44, 52), fill=SIMULATED)
    return icon


st.set_page_config(page_title="tokentwin", page_icon=_icon(), layout="wide")
st.navigation(
    [
        st.Page(trust, title="Trust", icon=":material/balance:", url_path="trust", default=True),
        st.Page(run, title="Run", icon=":material/timeline:", url_path="run"),
        st.Page(step_page.show, title="Step", icon=":material/layers:", url_path="step"),
    ],
    position="top",
).run()
