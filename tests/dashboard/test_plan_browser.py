"""A planner's whole path in a real browser: choose, run, read the answer, download, reload, look at a fleet of it."""

import json

import pytest

from tests.dashboard.browser import CHROMIUM, drawn, settle

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"),
]
LINK = "?model=Llama-3.1-8B&gpus=H100&tp=1&traffic=shape&prompt=400&output=60&rate=4&slo=ttft_ms+p99%3C%3D2000"


def test_from_a_question_to_a_run(own_server, page):
    page.goto(f"{own_server}/{LINK}")
    find = page.get_by_role("button", name="Find the fleet")
    find.wait_for()
    rate = page.get_by_role("spinbutton", name="Peak req/s")
    rate.fill("5")
    rate.press("Enter")
    page.wait_for_url("**rate=5**")

    find.click()
    page.get_by_role("button", name="Cancel").wait_for()
    page.get_by_text("This first answer is of").wait_for()
    page.get_by_text("Why not fewer?").wait_for()
    settle(page, plots=5)
    drawn(page, least=50)
    title = page.locator("h1").inner_text()
    assert "GPU" in title

    page.get_by_test_id("stPopoverButton").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    answer = json.loads(download.value.path().read_text())
    best = answer["recommendation"]
    assert title == f"{best['replicas']} \u00d7 {best['engine']} = {best['gpus']} GPU" + "s" * (best["gpus"] > 1)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV", exact=True).click()
    assert len(download.value.path().read_text().splitlines()) == 1 + len(answer["points"])

    page.reload()
    page.get_by_text("Why not fewer?").wait_for()
    assert page.locator("h1").inner_text() == title

    page.get_by_role("link", name="See the frontier").click()
    page.get_by_text("What speed costs").wait_for()
    settle(page, plots=2)
    page.get_by_role("button", name="Simulate it").click()
    page.get_by_text("Four lifecycles").wait_for()  # it goes there by itself
    page.wait_for_url(lambda url: "run?run=jobs%2F" in url)
    assert page.locator("h1").inner_text() == f"{best['replicas']} \u00d7 {best['engine']}"
    settle(page, plots=6)
    drawn(page, least=60)

    run = page.evaluate("location.href")
    page.go_back()
    page.get_by_text("What speed costs").wait_for()
    page.get_by_role("link", name="Open the run").wait_for()
    settle(page, plots=2)
    star = "[data-testid=stPlotlyChart] .scatterlayer .trace:nth-last-of-type(2) .points path.point"
    page.locator(star).first.click(force=True)
    page.wait_for_url(run)  # a click on a recorded fleet opens it
    page.get_by_text("Four lifecycles").wait_for()


def test_an_upload_is_read_and_its_mistake_shown_in_a_line(own_server, page):
    page.goto(f"{own_server}/?traffic=trace")
    page.get_by_text("Upload a trace.").wait_for()
    upload = page.locator("input[type=file]")
    good = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 10},{100 + at},20\n" for at in range(60))
    upload.set_input_files({"name": "../../t.csv", "mimeType": "text/csv", "buffer": good.encode()})
    page.get_by_text("60 requests in").wait_for()
    page.wait_for_url(lambda url: "&trace=" in url)  # written when the page is complete
    page.get_by_role("button", name="Find the fleet").wait_for()
    upload.set_input_files({"name": "bad.csv", "mimeType": "text/csv", "buffer": good.encode() + b"soon,1,1\n"})
    page.get_by_text("line 62: arrival_s").wait_for()
