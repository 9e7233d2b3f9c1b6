"""The Run page in a real browser: a box on the timeline narrows the requests, and every view opens."""

import re
import shutil
from contextlib import suppress

import pytest

from tests.dashboard.browser import NEEDED, drawn, fits, in_scheme, settle

pytestmark = NEEDED


@pytest.fixture(scope="module")
def timed(server_runs, tmp_path_factory):
    """Add a run that kernel tables timed to the server's runs; return its name."""
    from click.testing import CliRunner

    from tokentwin.cli import cli

    trace, out = tmp_path_factory.mktemp("trace") / "trace.parquet", tmp_path_factory.mktemp("out") / "timed"
    synth = ["--requests", "300", "--arrivals", "gamma:rate=30,cv=3", "--prompt", "700", "--output", "60"]
    for command in (["trace", "synth", str(trace), *synth], ["simulate", str(trace), "--gpu", "H100", "-o", str(out)]):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
    shutil.copytree(out, server_runs / "timed")
    return "timed"


def draw_a_box(page):
    """Draw a box on the timeline until the page has it: a plot that is replaced under the mouse loses the box."""
    from playwright.sync_api import TimeoutError as NotYet

    narrowed = page.get_by_text(re.compile(r"in the time window"))
    for _ in range(8):
        plot = page.locator("[data-testid=stPlotlyChart]").first.bounding_box()
        row = plot["y"] + plot["height"] / 3
        page.mouse.move(plot["x"] + plot["width"] / 3, row)
        page.mouse.down()
        page.mouse.move(plot["x"] + plot["width"] / 2, row + 8, steps=6)
        page.mouse.up()
        with suppress(NotYet):
            return narrowed.wait_for(timeout=20_000)
    raise AssertionError("no box reached the page")


def test_a_box_on_the_timeline_narrows_the_requests(server, page, timed):
    page.goto(f"{server}/run?run={timed}")
    settle(page, plots=6)
    draw_a_box(page)
    page.wait_for_url(re.compile(r"window="))  # written when the page is complete
    low, high = map(float, re.search(r"window=([\d.]+)-([\d.]+)", page.url).groups())
    assert 0 < low < high
    settle(page, plots=6)
    page.reload()
    page.get_by_text(re.compile(r"in the time window")).wait_for()
    page.get_by_role("button", name="Whole run").click()
    page.get_by_text(re.compile(r"in the time window")).wait_for(state="detached")
    page.wait_for_url(lambda url: "window=" not in url)


@pytest.mark.deep  # without a browser in test_run.py
def test_every_view_opens(server, page, timed):
    page.goto(f"{server}/run?run={timed}&view=steps")
    page.get_by_text("What bounds it").wait_for()
    in_scheme(page, "dark")
    settle(page, plots=7)
    drawn(page, 60)
    fits(page, 800)
    page.goto(f"{server}/run?run={timed}&view=metrics")
    settle(page, plots=5)
    drawn(page, 60)
    fits(page, 800)
