"""The Sweeps, Calibration and Glossary pages in a real browser, in both themes at both widths; a query, a download."""

import pytest

from tests.dashboard_browser import CHROMIUM, drawn, settle, shoot

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"),
]

PAGES = {
    "sweeps": ("Ask in SQL", 1, 10),
    "calibration": ("GPU against GPU", 3, 30),
    "glossary": ("vllm:time_to_first_token_seconds", 0, 0),
}


@pytest.fixture(params=[("light", 1280), ("dark", 800)], ids=["light-1280", "dark-800"])
def page(request, browser):
    scheme, width = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    yield context.new_page()
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_at_both_widths_in_both_themes(server, page, tmp_path, name):
    says, plots, marks = PAGES[name]
    page.goto(f"{server}/{name}")
    page.get_by_text(says).first.wait_for()
    settle(page, plots)
    drawn(page, marks)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    shoot(page, tmp_path / f"{name}.png", width=page.viewport_size["width"])


def test_a_query_is_run_and_its_link_shows_it_again(server, browser):
    page = browser.new_page()
    page.goto(f"{server}/sweeps")
    settle(page, 1)
    page.locator("textarea").fill("select count(*) as of_them from runs where gpu = 'H100'")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("1 row", exact=True).wait_for()
    assert "sql=" in page.url
    page.goto(page.url)
    page.get_by_text("1 row", exact=True).wait_for()
    page.close()


def test_a_download_is_the_export(server, browser, tmp_path):
    page = browser.new_page()
    page.goto(f"{server}/sweeps")
    settle(page, 1)
    page.get_by_test_id("stPopoverButton").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV", exact=True).click()
    download.value.save_as(tmp_path / "runs.csv")
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert lines[0].startswith('"gpu","max_num_batched_tokens","rate","seed"') and len(lines) == 85
    page.close()


def test_a_glossary_link_leads_to_its_metric(server, browser):
    page = browser.new_page()
    page.goto(f"{server}/glossary#jain_fairness")
    page.locator("#jain_fairness").wait_for()
    page.wait_for_function("document.querySelector('#jain_fairness').getBoundingClientRect().top < innerHeight")
    page.close()
