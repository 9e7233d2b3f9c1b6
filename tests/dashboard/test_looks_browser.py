"""What only a browser shows: contrast in both themes, numbers out of range, a lost server."""

from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import NEEDED, dashboard, in_scheme, settle, without_plots

pytestmark = NEEDED
OF_STREAMLIT = "[data-testid=stToolbar], [data-testid=stFileUploaderDropzone], [data-testid=stDataFrame]"


def axe_source() -> str:
    """Return the script of axe-core, which a package of PyPI brings along."""
    axe = pytest.importorskip("axe_playwright_python")
    return next(Path(axe.__file__).parent.rglob("axe.min.js")).read_text()


@pytest.mark.deep  # 7 pages in two themes take a minute
def test_text_has_enough_contrast_in_both_themes(server, page):
    source, faults = axe_source(), []
    for name in ("plan", "frontier?plan=example", "policy-lab", "run?run=real-1", "trust", "step", "sweeps"):
        page.goto(f"{server}/{name}")
        page.locator("h1").wait_for()
        settle(page)
        for scheme in ("light", "dark"):
            in_scheme(page, scheme)
            settle(page)
            page.evaluate(source)
            for _ in range(5):  # colours of the other theme fade for a moment
                if not (nodes := too_faint(page)):
                    break
                page.wait_for_timeout(1000)
            faults += [(name, scheme, node["html"][:120], node["failureSummary"]) for node in nodes]
    assert not faults, faults


def too_faint(page: Any) -> list[dict[str, Any]]:
    """Return what axe says of each text whose contrast is below 4.5:1."""
    checked = page.evaluate(
        "of => axe.run({exclude: of.split(', ')}, {runOnly: ['color-contrast'], resultTypes: ['violations']})",
        OF_STREAMLIT,
    )
    return [node for fault in checked["violations"] for node in fault["nodes"]]


def test_a_number_out_of_its_range_stops_the_button(server, page):
    page = without_plots(page)
    page.goto(f"{server}/?spares=3")
    page.get_by_role("button", name="Find the fleet").wait_for()
    settle(page)
    field = page.get_by_role("spinbutton", name="Spare replicas")
    field.fill("101")
    field.press("Enter")
    page.get_by_text("must be from 0 to 100").wait_for()
    assert page.get_by_role("button", name="Find the fleet").count() == 0
    field.fill("4")
    field.press("Enter")
    page.get_by_role("button", name="Find the fleet").wait_for()
    page.wait_for_url("**spares=4**")


def test_a_lost_server_is_said(server_runs, window, tmp_path):
    page = without_plots(window.new_page())
    with dashboard(server_runs, tmp_path) as address:
        page.goto(f"{address}/glossary")
        page.locator("h1").wait_for()
        settle(page)
    page.get_by_text("Connection error").wait_for()
    page.close()
