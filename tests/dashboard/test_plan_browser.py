"""A planner's whole path in a real browser: choose, run, read the answer, download, reload, look at a fleet of it.

Plots stay empty here: that they are drawn on each of these pages is in `test_browser.py`."""

import json
import re

import pytest

from tests.dashboard.browser import NEEDED, settle, without_plots

pytestmark = NEEDED


def test_from_an_upload_to_a_run_in_five_clicks(server, page):
    """The planner's path: upload, SLO, answer, run, and the link for a colleague."""
    clicks, page = [], without_plots(page)

    def click(role, name, **how):
        page.get_by_role(role, name=name, **how).first.click()
        clicks.append(name)

    page.goto(f"{server}/?model=Llama-3.1-8B&gpus=H100&tp=1")
    page.get_by_role("button", name="Find the fleet").wait_for()
    click("radio", "Trace")
    page.get_by_text("Upload a trace.").wait_for()
    good = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 5},{300 + at},8\n" for at in range(600))
    page.locator("input[type=file]").set_input_files(
        {"name": "../../office hours.csv", "mimeType": "text/csv", "buffer": good.encode()}
    )
    clicks.append("the file")
    page.get_by_text("600 requests in").wait_for()
    page.wait_for_url(lambda url: "office_hours.csv" in url)  # written when the page is complete
    settle(page)
    slos = page.get_by_role("textbox", name="SLOs")
    slos.fill("ttft_ms p99<=2000\ntpot_ms p99<=50")
    slos.press("Control+Enter")
    page.wait_for_url(lambda url: "slo=ttft_ms" in url)
    click("button", "Find the fleet")
    page.get_by_text("From quick estimates").wait_for()
    page.get_by_text("Why not fewer?").wait_for()
    settle(page)
    title, link = page.locator("h1").inner_text(), page.url
    click("button", "Simulate it and open its run")
    page.get_by_text("Four lifecycles").wait_for()  # it goes there by itself
    page.wait_for_url(lambda url: "run?run=jobs%2F" in url)
    page.get_by_text("Against the SLOs").wait_for()
    page.get_by_text(re.compile("Planned:.*office_hours.csv")).wait_for()
    page.get_by_text("TTFT p99 \u2264 2,000 ms holds").wait_for()
    settle(page)
    assert len(clicks) <= 5, clicks

    page.goto(link)
    page.get_by_text("Why not fewer?").wait_for()
    assert page.locator("h1").inner_text() == title
    page.get_by_test_id("stPopoverButton").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    answer = json.loads(download.value.path().read_text())
    best = answer["recommendation"]
    assert title == f"{best['replicas']} \u00d7 {best['engine']} = {best['gpus']} GPU" + "s" * (best["gpus"] > 1)


@pytest.mark.deep
def test_from_a_plan_to_its_policies_and_the_frontier(server, page):
    page = without_plots(page)
    page.goto(server)
    page.get_by_role("button", name="Compare policies on this plan").click()
    page.wait_for_url(lambda url: "policy-lab?" in url and "offered=plan" in url)
    page.get_by_text("Winners and losers").wait_for()
    page.get_by_role("link", name="Back to the plan").click()
    page.get_by_role("radio", name="All fleets and the frontier").click()
    page.get_by_text("The cost of speed").wait_for()


@pytest.mark.deep  # its parts: test_plan.py and tests/tokentwin/test_made_up_traffic.py
def test_from_users_to_the_most_that_a_fleet_bears(server, page):
    """A planner without a trace: users who think, then how many of them one replica bears."""
    page = without_plots(page)
    shape = "traffic=shape&prompt=1500&output=60&prompt_sigma=0&output_sigma=0&minutes=1&slo=ttft_ms+p95<%3D150"
    page.goto(f"{server}/?model=Llama-3.1-8B&gpus=H100&tp=1&{shape}")
    page.get_by_role("button", name="Find the fleet").wait_for()
    page.get_by_role("radio", name="Users").click()
    page.get_by_role("spinbutton", name="Replicas", exact=True).wait_for()  # the last input that depends on the choice
    settle(page)
    for name, value in (("Users", "8"), ("Think time (s)", "2"), ("Replicas", "1")):
        field = page.get_by_role("spinbutton", name=name, exact=True)
        field.fill(value)
        field.press("Enter")
        settle(page)
    page.wait_for_url(lambda url: "users=8" in url and "think=2" in url and "replicas=1" in url)
    page.get_by_role("button", name="Find the number").click()
    page.get_by_text(re.compile(r"\d+ users: so many does 1 replica . TP1 H100")).wait_for()
    settle(page)
    page.get_by_test_id("stPopoverButton").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    (fleet,) = json.loads(download.value.path().read_text())["fleets"]
    assert fleet["replicas"] == 1 and 0 < fleet["clients"] <= fleet["as_predicted"]
