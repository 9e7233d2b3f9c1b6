"""The script that Streamlit runs to draw a page; `dashboard/server.py` starts it, and passes RUNS_DIR and a flag."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st
from PIL import Image, ImageDraw

from tokentwin.dashboard.own_policy import FLAG
from tokentwin.dashboard.pages import first_page, pages
from tokentwin.dashboard.palette import REAL, SIMULATED


def _icon() -> Image.Image:
    """Return the icon, an orange and a blue circle; a browser would fetch a named icon from another server."""
    icon = Image.new("RGBA", (64, 64))
    draw = ImageDraw.Draw(icon)
    draw.ellipse((20, 12, 60, 52), fill=REAL)
    draw.ellipse((4, 12, 44, 52), fill=SIMULATED)
    return icon


st.set_page_config(page_title="tokentwin", page_icon=_icon(), layout="wide")
# Streamlit leaves 96 px above a page's first line; its own bar takes 60 of them. Its captions, with an opacity of 0.6,
# and white text on the primary colour of the dark theme have a contrast below 4.5.
st.html(
    "<style>[data-testid=stMainBlockContainer] { padding-top: 4.5rem }"
    "[data-testid=stCaptionContainer] { opacity: 0.82 !important }"
    "[data-testid=stMultiSelectTagsContainer] :has(> span[title]), [data-testid=stBaseButton-primary] "
    "{ background-color: #2257b8 !important; border-color: #2257b8 !important }</style>"
)
runs = Path(sys.argv[1])
page = st.navigation(pages(runs, FLAG in sys.argv[2:]), position="top")
if first := first_page(page, runs):
    st.switch_page(first)
page.run()
