"""The Sweeps and Glossary pages in a real browser: a query, a download, a link to a metric."""

import pytest

from tests.dashboard_browser import CHROMIUM, settle

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"),
]


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
