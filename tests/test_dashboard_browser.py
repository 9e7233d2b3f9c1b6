"""Every page in a real browser against a real server on loopback, in both themes; screenshots stay in tmp."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tests.dashboard_samples import write_samples

CHROMIUM = Path("/usr/bin/chromium")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    # nothing but loopback may be reached: a page that needs more would hang here, and fail
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
FAULTS = re.compile(r"Traceback|Error:|Exception|has encountered an error", re.IGNORECASE)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The dashboard, started from an unrelated directory through its command; its address."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    runs = write_samples(elsewhere / "samples")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLIT_")}
    environment["HOME"] = str(elsewhere)
    with (elsewhere / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokentwin.cli", "dashboard", str(runs), "--port", str(port)],
            cwd=elsewhere,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"{address}/_stcore/health", timeout=1) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                assert process.poll() is None, (elsewhere / "server.log").read_text()
                time.sleep(0.25)
        else:
            pytest.fail(f"the server did not answer: {(elsewhere / 'server.log').read_text()}")
        yield address
        assert not FAULTS.search((elsewhere / "server.log").read_text())
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    assert shutil.which(str(CHROMIUM))
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
        yield chromium
        chromium.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens(server, browser, tmp_path, scheme):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    outside = []
    page.on(
        "request",
        lambda r: outside.append(r.url) if not r.url.startswith((server, "ws://127", "data:", "blob:")) else 0,
    )

    page.goto(server)
    settle(page, plots=3)
    page.get_by_text("TTFT p50 -3.1 %").wait_for()
    drawn(page, least=200)
    shoot(page, tmp_path / f"trust-{scheme}.png")

    page.get_by_role("link", name="Run").click()
    page.get_by_text("Four lifecycles").wait_for()
    settle(page, plots=6)
    page.get_by_text("Request", exact=True).first.wait_for()
    drawn(page, least=60)
    assert page.url.startswith(f"{server}/run?")
    shoot(page, tmp_path / f"run-{scheme}.png")

    page.get_by_role("link", name="Step").click()
    page.get_by_text("Where the time of one engine step goes").wait_for()
    settle(page, plots=2)
    drawn(page, least=10)
    shoot(page, tmp_path / f"step-{scheme}.png")

    # The background is the theme's, so the themes beside app.py were found.
    background = page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 21, 28)"}[scheme]
    assert outside == []
    context.close()


def settle(page, plots):
    """Wait until this many plots are drawn and the page is idle."""
    page.wait_for_function(
        "n => document.querySelectorAll('[data-testid=stPlotlyChart] svg.main-svg').length >= n",
        arg=plots,
        timeout=60_000,
    )
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=60_000)


def drawn(page, least):
    """No exception on the page, and marks in its plots: points, bars and lines."""
    assert not FAULTS.search(page.inner_text("body"))
    assert page.locator("[data-testid=stException]").count() == 0
    marks = page.evaluate(
        "document.querySelectorAll('[data-testid=stPlotlyChart] :is(path.point, .points path, path.js-line)').length"
    )
    assert marks >= least


def shoot(page, path):
    """A screenshot of the whole page, and that it is not blank."""
    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": 1280, "height": min(height + 60, 3200)})
    page.wait_for_timeout(600)
    page.screenshot(path=path)
    page.set_viewport_size({"width": 1280, "height": 900})
    assert path.stat().st_size > 50_000
