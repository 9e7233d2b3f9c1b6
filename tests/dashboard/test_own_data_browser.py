"""What users bring and start themselves, in a real browser: a sweep, a CSV file, SLOs by form, a policy, a link."""

import io

import pyarrow.parquet as pq

from tests.dashboard.browser import NEEDED, settle, without_plots
from tests.dashboard.test_uploads import OTHERS

pytestmark = NEEDED


def test_a_sweep_is_started_watched_opened_in_every_view_and_downloaded(server, page):
    link = "do=start&gpus=H100&rates=2,4&policies=vllm,sjf&requests=50&seeds=1"
    page.goto(f"{server}/sweeps?{link}")
    page.get_by_role("button", name="Start the sweep").click()
    page.get_by_role("button", name="Cancel").wait_for()
    page.get_by_text("4 runs; varied: gpu (1)").wait_for()
    page.get_by_role("radio", name="Heat map").click()
    page.locator("[data-testid=stPlotlyChart] .heatmaplayer image").wait_for()
    page.get_by_role("radio", name="Scatter").click()
    page.locator("[data-testid=stPlotlyChart] .points path").first.wait_for()
    page.get_by_role("radio", name="Table").click()
    page.locator("[data-testid=stPlotlyChart]").wait_for(state="detached")
    page.get_by_test_id("stPopoverButton").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Parquet", exact=True).click()
    assert pq.read_table(io.BytesIO(download.value.path().read_bytes()))["rate"].to_pylist().count(2.0) == 2


def test_columns_are_mapped_ten_rows_are_seen_and_the_template_is_a_trace(server, page):
    page = without_plots(page)
    page.goto(f"{server}/?traffic=trace")
    with page.expect_download() as download:
        page.get_by_role("button", name="Template (CSV)").click()
    upload = page.locator("input[type=file]").first
    rows = b"".join(OTHERS.splitlines(keepends=True)[:1]) + b"".join(
        f"2026-11-24 10:00:{second:02},{10 + second},5,a,1\n".encode() for second in range(30)
    )
    upload.set_input_files([{"name": "mine.csv", "mimeType": "text/csv", "buffer": rows}])
    page.get_by_text("Which column is which?").wait_for()
    page.get_by_text("The first 10 requests").click()
    page.get_by_text("The plan uses all 29 s of the trace").wait_for()
    page.wait_for_url("**mine.csv**")
    settle(page)
    page.locator("input[type=file]").first.set_input_files(download.value.path())
    page.get_by_text("The plan uses all 1 s of the trace").wait_for()
    assert page.get_by_text("Which column is which?").count() == 0


def test_slos_by_form_are_the_text(server, page):
    page = without_plots(page)
    page.goto(f"{server}/?slo=TTFT+p99+<+1s")
    page.get_by_text("SLOs by form").click()
    bound = page.get_by_role("spinbutton", name="at most (ms)")
    assert bound.input_value() == "1000"
    bound.fill("700")
    bound.press("Enter")
    page.wait_for_url("**slo=ttft_ms**700**")
    settle(page)
    text = page.get_by_role("textbox", name="SLOs")
    assert text.input_value() == "ttft_ms p99<=700"
    page.get_by_role("button", name="Add an SLO").click()
    page.wait_for_url("**slo=tpot_ms**")
    settle(page)
    assert text.input_value().splitlines() == ["ttft_ms p99<=700", "tpot_ms p99<=10000"]


def test_an_own_policy_needs_the_flag_an_old_link_leads_to_the_plan_and_trust_to_its_evidence(server, page):
    page = without_plots(page)
    page.goto(f"{server}/policy-lab?b=own")
    page.get_by_text("tokentwin dashboard RUNS_DIR --own-policies").wait_for()
    page.goto(f"{server}/frontier?plan=example")
    page.get_by_text("All fleets and the frontier").wait_for()
    page.get_by_text("The cost of speed").wait_for()
    page.wait_for_url("**show=fleets**")
    page.goto(f"{server}/trust")
    page.get_by_role("link", name="Step: the cost of one engine step").click()
    page.wait_for_url("**/step**")
