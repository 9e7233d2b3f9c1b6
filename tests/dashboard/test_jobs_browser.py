"""Long work as a planner sees it: found again after a reload, in other tabs, and after kills of server and job."""

import os
import signal
import subprocess
from contextlib import suppress

import pytest

from tests.dashboard.browser import NEEDED, dashboard, without_plots
from tests.planning.test_jobs import until
from tests.planning.test_plan_workers import group
from tokentwin.planning.jobs.files import read_json

pytestmark = NEEDED
HEAVY = "?preset=reasoning&gpus=H100,H200,B200&rate={}"
LIGHT = "?model=Llama-3.1-8B&gpus=H100&tp=1&traffic=shape&prompt=200&output=4&rate=2&slo=ttft_ms+p99%3C%3D2000"
ANSWER = "Why not fewer?"


@pytest.fixture
def new_leaders(server_runs):
    """A function that returns the processes of the jobs that the test starts; none of them outlives it."""
    before = set(server_runs.glob("jobs/*/process.json"))

    def leaders():
        return [read_json(path) for path in sorted(set(server_runs.glob("jobs/*/process.json")) - before)]

    yield leaders
    for leader in leaders():
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def begun(page, address, link):
    page.goto(f"{address}/{link}")
    page.get_by_role("button", name="Find the fleet").click()
    page.get_by_role("button", name="Cancel").wait_for()


@pytest.mark.deep  # without a browser in tests/planning/test_jobs.py and test_plan.py
def test_tabs_and_reloads_find_the_same_work_and_no_kill_loses_any(server, server_runs, new_leaders, window, tmp_path):
    first, second, other = (without_plots(window.new_page()) for _ in range(3))
    with dashboard(server_runs, tmp_path, end=subprocess.Popen.kill) as address:
        begun(first, address, HEAVY.format(30))
        (heavy,) = new_leaders()
        os.killpg(heavy, signal.SIGSTOP)  # it has to be there, not to work: it would never be done in time
        first.reload()
        first.get_by_role("progressbar").wait_for()
        second.goto(first.url)
        second.get_by_role("button", name="Cancel").wait_for()
        begun(other, address, LIGHT)
        second.get_by_role("button", name="Cancel").click()
        for page in (first, second):
            page.get_by_text("Cancelled. You can start it again.").wait_for()
            page.get_by_role("button", name="Find the fleet", disabled=False).wait_for()
        until(lambda: not group(heavy))
        (light,) = [leader for leader in new_leaders() if leader != heavy]  # and not a third
    until(lambda: not group(light))
    # another server over the same runs
    other.goto(f"{server}/{LIGHT}")
    other.get_by_text(ANSWER).wait_for()
    begun(first, server, HEAVY.format(31))
    (heavy,) = [leader for leader in new_leaders() if group(leader)]
    os.kill(heavy, signal.SIGKILL)
    first.get_by_text("its process ended before the job was done").wait_for()
    until(lambda: not group(heavy))
    first.get_by_role("button", name="Find the fleet").click()
    first.get_by_role("button", name="Cancel").click()
    first.get_by_text("Cancelled. You can start it again.").wait_for()
    for page in (first, second, other):
        page.close()
