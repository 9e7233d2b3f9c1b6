"""A real browser and a real server on loopback: fixtures, and what tests of pages wait for and check."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path(os.environ.get("TOKENTWIN_CHROMIUM", "/usr/bin/chromium"))
_REMEDY = f"apt-get install chromium, or name one in $TOKENTWIN_CHROMIUM (there is no {CHROMIUM})"
NEEDED = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs chromium: {_REMEDY}"),
]
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--process-per-site",
    # nothing but loopback may be reached: a page that needs more would hang here, and fail
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
PATIENCE = 150_000  # ms: what takes a second takes a minute on a busy machine
POLL = 100  # ms: checking at every frame would make the browser draw as many frames as it can
# No animations while a page is made: without a GPU each frame is drawn on the cores that make the page.
STILL = """const still = new CSSStyleSheet()
still.replaceSync('*, ::before, ::after { animation-duration: 0s !important; animation-iteration-count: 1 !important }')
document.adoptedStyleSheets = [still]"""
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 21, 28)"}
FAULTS = re.compile(r"Traceback|Error:|Exception|has encountered an error", re.IGNORECASE)


def skipped_without_it(reports: Sequence[pytest.TestReport]) -> str:
    """Return the line that says how many browser tests were skipped, and why; empty if chromium is there."""
    count = 0 if CHROMIUM.exists() else sum("browser" in report.keywords for report in reports)
    return f"NO PAGE WAS TESTED: {count} browser tests need chromium: {_REMEDY}" if count else ""


@pytest.fixture(scope="session")
def server_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of runs that the server shows."""
    pytest.importorskip("streamlit")
    from tests.dashboard.samples import write_samples

    return write_samples(tmp_path_factory.mktemp("samples") / "samples")


@contextmanager
def dashboard(
    runs: Path, elsewhere: Path, end: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.terminate
) -> Iterator[str]:
    """Start the dashboard over `runs` from the folder `elsewhere`, through its command; yield its address."""
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
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{address}/_stcore/health", timeout=10) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                assert process.poll() is None, (elsewhere / "server.log").read_text()
                time.sleep(0.25)
        else:
            raise TimeoutError(f"the server did not answer: {(elsewhere / 'server.log').read_text()}")
        yield address
        assert not FAULTS.search((elsewhere / "server.log").read_text())
    finally:
        end(process)
        process.wait()


@contextmanager
def chromium(playwright: Any) -> Iterator[Any]:
    """Start a browser that reaches nothing but loopback."""
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, server_runs: Path) -> Iterator[str]:
    """The address of a dashboard that all test files share; one test's results may be the newest for the next."""
    with dashboard(server_runs, tmp_path_factory.mktemp("elsewhere")) as address:
        yield address


@pytest.fixture(scope="session")
def window(server: str) -> Iterator[Any]:
    """A browser that all tests share. Its tabs share a process, which keeps compiled code: most of a page's time."""
    api = pytest.importorskip("playwright.sync_api")
    assert shutil.which(str(CHROMIUM))
    with api.sync_playwright() as playwright, chromium(playwright) as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(PATIENCE)
        context.add_init_script(STILL)
        context.new_page().goto(f"{server}/_stcore/health")  # the process ends with the last of its tabs
        yield context


@pytest.fixture
def page(window: Any) -> Iterator[Any]:
    """A new tab."""
    with closing(window.new_page()) as tab:
        yield tab


def without_plots(page: Any) -> Any:
    """A tab whose plots stay empty, for tests of other things: plots take most of a page's time."""
    empty = {"content_type": "text/javascript", "body": "export default () => null"}
    page.route("**/PlotlyChart.*.js", lambda route: route.fulfill(**empty))
    return page


def in_scheme(page: Any, scheme: str) -> None:
    """Switch the page to the light or dark theme, as the system does, and wait for its background."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function(
        "wanted => getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor === wanted",
        arg=BACKGROUNDS[scheme],
        polling=POLL,
    )


def settle(page: Any, plots: int = 0) -> None:
    """Wait until this many plots are drawn and the page is idle."""
    page.wait_for_function(
        "n => document.querySelectorAll('[data-testid=stPlotlyChart] svg.main-svg').length >= n",
        arg=plots,
        polling=POLL,
    )
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")


def drawn(page: Any, least: int) -> None:
    """Assert that the page shows no exception and has marks in its plots; the last plot may still be drawing."""
    page.wait_for_function(
        """n => document.querySelectorAll(
            '[data-testid=stPlotlyChart] :is(path.point, .points path, path.js-line)').length >= n""",
        arg=least,
        polling=POLL,
    )
    assert not FAULTS.search(page.inner_text("body"))
    assert page.locator("[data-testid=stException]").count() == 0


def fits(page: Any, width: int) -> None:
    """Assert that the page is no wider than a window of this width."""
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth", polling=POLL)
