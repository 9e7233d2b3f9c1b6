"""The Policy lab in a real browser: compare two policies, read, download, reload."""

import json

import pytest

from tests.dashboard.browser import NEEDED, settle, without_plots

pytestmark = NEEDED


@pytest.fixture
def page(page):
    return without_plots(page)


@pytest.mark.deep
def test_from_two_policies_to_an_answer(server, page):
    page.goto(f"{server}/policy-lab?req_s=4&seconds=10&seeds=2&b=sjf")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Winners and losers").wait_for()
    settle(page)
    page.get_by_test_id("stPopoverButton").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    answer = json.loads(download.value.path().read_text())
    assert answer["inputs"]["b"]["settings"] == {"policy": "sjf"} and answer["runs"] == 2
    assert page.get_by_text(answer["verdict"][1:]).count()
    page.reload()
    page.get_by_text("Winners and losers").wait_for()
    page.get_by_text("Recordings", exact=True).click()
    page.get_by_role("button", name="Compare").wait_for()
    page.wait_for_url(lambda url: "compare=recordings" in url and "rec_a=" in url)


@pytest.mark.deep  # without a browser in test_lab.py
def test_a_pasted_deployment_is_read_and_its_mistake_shown_in_a_line(server, page):
    page.goto(f"{server}/policy-lab?b=pasted")
    text = page.get_by_role("textbox", name="Paste it")
    text.fill("model: Llama-3.1-8B\npolicy: os:system")
    text.press("Control+Enter")
    page.get_by_text("deployment.policy: 'os:system'").wait_for()
    text.fill("model: Llama-3.1-8B\ndevice: cuda\npolicy: fair")
    text.press("Control+Enter")
    page.get_by_role("button", name="Compare").wait_for()
    page.wait_for_url("**b_yaml=**")
