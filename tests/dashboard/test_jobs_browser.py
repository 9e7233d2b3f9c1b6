"""Long work as a planner sees it: found again after a reload, in other tabs, and after kills of server and job."""

import os
import signal
import subprocess
from contextlib import suppress

import pytest

from planning.jobs.files import read_json
from tests.dashboard.browser import CHROMIUM, dashboard, new_context
from tests.planning.test_jobs import until
from tests.planning.test_plan_workers import group

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"),
]
HEAVY = "?preset=reasoning&gpus=H100,H200,B200&rate={}"
LIGHT = "?model=Llama-3.1-8B&gpus=H100&tp=1&traffic=shape&prompt=200&output=20&rate=2&slo=ttft_ms+p99%3C%3D2000"
ANSWER = "Why not fewer?"


@pytest.fixture
def runs(tmp_path):
    """Where jobs are kept; none of their processes outlives the test."""
    path = tmp_path / "runs"
    path.mkdir()
    yield path
    for leader in leaders(path):
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def leaders(runs):
    """The processes of all jobs, dead or alive."""
    return [read_json(path) for path in sorted(runs.glob("jobs/*/process.json"))]


def begun(page, address, link):
    page.goto(f"{address}/{link}")
    page.get_by_role("button", name="Find the fleet").click()
    page.get_by_role("button", name="Cancel").wait_for()


def test_tabs_and_reloads_find_the_same_work_and_other_work_is_left_alone(runs, browser, tmp_path):
    with dashboard(runs, tmp_path) as address:
        context = new_context(browser, plots=False)
        first, second, other = (context.new_page() for _ in range(3))
        begun(first, address, HEAVY.format(30))
        (leader,) = leaders(runs)
        os.killpg(leader, signal.SIGSTOP)  # it has to be there, not to work: it would never be done in time
        first.reload()
        first.get_by_role("progressbar").wait_for()
        second.goto(first.url)
        second.get_by_role("button", name="Cancel").wait_for()
        begun(other, address, LIGHT)
        second.get_by_role("button", name="Cancel").click()
        for page in (first, second):
            page.get_by_text("Cancelled. You can start it again.").wait_for()
            page.get_by_role("button", name="Find the fleet", disabled=False).wait_for()
        until(lambda: not group(leader))
        other.get_by_text(ANSWER).wait_for()  # without a click
        assert len(leaders(runs)) == 2
        context.close()


def test_no_kill_loses_work(runs, browser, tmp_path):
    page = new_context(browser, plots=False).new_page()
    with dashboard(runs, tmp_path, end=subprocess.Popen.kill) as address:
        begun(page, address, LIGHT)
    (leader,) = leaders(runs)
    (result,) = [path.with_name("result.json") for path in runs.glob("jobs/*/process.json")]
    until(lambda: result.is_file() or leader not in group(leader))
    with dashboard(runs, tmp_path) as address:
        page.goto(f"{address}/{LIGHT}")
        page.get_by_text(ANSWER).wait_for()
        begun(page, address, HEAVY.format(31))
        (heavy,) = [found for found in leaders(runs) if group(found)]
        os.kill(heavy, signal.SIGKILL)
        page.get_by_text("its process died before it was done").wait_for()
        until(lambda: not group(heavy))
        page.get_by_role("button", name="Find the fleet").click()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("Cancelled. You can start it again.").wait_for()
    page.close()
