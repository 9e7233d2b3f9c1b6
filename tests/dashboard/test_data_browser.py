"""The Sweeps and Glossary pages in a real browser: a query, a download, a link to a metric."""

from tests.dashboard.browser import BACKGROUNDS, NEEDED, settle, without_plots
from tests.dashboard.samples import plan_example
from tokentwin.dashboard.html_reports.report import write_report
from tokentwin.planning.exports.export import export
from tokentwin.planning.plan.document import PlanDocument

pytestmark = NEEDED


def test_a_download_is_the_export_and_the_query_of_a_link_waits_for_a_click(server, page, tmp_path):
    without_plots(page).goto(f"{server}/sweeps")
    settle(page)
    page.get_by_test_id("stPopoverButton").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV", exact=True).click()
    lines = download.value.path().read_text().splitlines()
    assert lines[0].startswith('"gpu","max_num_batched_tokens","rate","seed"') and len(lines) == 85
    page.locator("textarea").fill("select count(*) as of_them from runs where gpu = 'H100'")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("1 row", exact=True).wait_for()
    page.wait_for_url("**sql=**")
    page.reload()
    page.get_by_text("This query came with the link").wait_for()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("1 row", exact=True).wait_for()


def test_a_glossary_link_leads_to_its_metric(server, page):
    page.goto(f"{server}/glossary#jain_fairness")
    page.locator("#jain_fairness").wait_for()
    page.wait_for_function("document.querySelector('#jain_fairness').getBoundingClientRect().top < innerHeight")


def test_a_report_draws_its_figures_from_a_file_and_asks_for_nothing_else(page, tmp_path):
    export(PlanDocument.read(plan_example()["answer"]), "html", tmp_path / "plan.html", html=write_report)
    page.set_viewport_size({"width": 800, "height": 900})
    asked, faults = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"file://{tmp_path}/plan.html")
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 14")
    assert asked == [f"file://{tmp_path}/plan.html"] and not faults
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for scheme in BACKGROUNDS:
        page.emulate_media(color_scheme=scheme)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == BACKGROUNDS["dark"]) == (scheme == "dark")
