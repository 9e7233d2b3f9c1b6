"""What only a browser shows: what axe finds in both themes, the bar, numbers out of range, a lost server."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from tests.dashboard.browser import NEEDED, dashboard, in_scheme, settle, without_plots
from tokentwin.dashboard.pages import PAGES as dashboard_pages

pytestmark = NEEDED
OF_STREAMLIT = "[data-testid=stToolbar], [data-testid=stFileUploaderDropzone], [data-testid=stDataFrame]"


def axe_source() -> str:
    """Return the script of axe-core, which a package of PyPI brings along."""
    axe = pytest.importorskip("axe_playwright_python")
    return next(Path(axe.__file__).parent.rglob("axe.min.js")).read_text()


PAGES = [name.replace("_", "-") for name in dashboard_pages]
VIEWS = [  # with what is folded, or is not there at first
    "plan?show=fleets", "plan?spares=3", "policy-lab?compare=recordings", "run?run=real-1", "run?run=real-1&view=steps",
    "run?run=real-1&view=diagnosis", "run?run=real-1&view=metrics", "trust?view=steps", "trust?view=domain",
    "trust?view=engines", "trust?asked_gpu=A100-80G", "sweeps?kind=table", "calibration?calibration=calibration",
]  # fmt: skip


@pytest.mark.deep  # every page in two themes takes some minutes
def test_axe_has_nothing_to_say_of_any_page_in_both_themes(server, page):
    source, faults = axe_source(), set()
    for name in (*PAGES, *VIEWS):
        page.goto(f"{server}/{name}")
        page.locator("h1").first.wait_for()
        settle(page)
        page.evaluate("document.querySelectorAll('[data-testid=stMain] details').forEach(one => one.open = true)")
        for scheme in ("light", "dark"):
            in_scheme(page, scheme)
            settle(page)
            page.evaluate(source)
            for _ in range(5):  # colours of the other theme fade for a moment
                if not (found := violations(page)):
                    break
                page.wait_for_timeout(1000)
            faults |= {(name, scheme, *fault) for fault in found}
    assert not faults, "\n".join(map(str, sorted(faults)))


def violations(page: Any) -> list[tuple[str, str, str]]:
    """Return the rule, the element and the reason of each fault that axe finds."""
    checked = page.evaluate("of => axe.run({exclude: of.split(', ')}, {resultTypes: ['violations']})", OF_STREAMLIT)
    return [
        (fault["id"], node["html"][:120], node["failureSummary"])
        for fault in checked["violations"]
        for node in fault["nodes"]
    ]


def test_the_bar_marks_the_open_page_and_enter_takes_one_option(server, page):
    page = without_plots(page)
    page.goto(f"{server}/plan?gpus=H100")
    page.locator("[data-testid=stTopNavLink][aria-current=page]", has_text="Plan").wait_for()
    gpus = page.locator("[data-testid=stMultiSelect]", has_text="GPUs").locator("input")
    gpus.fill("A100")
    page.get_by_role("option", name="A100-40G", exact=True).wait_for()
    gpus.press("Enter")
    page.wait_for_url("**gpus=H100%2CA100-40G")


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
