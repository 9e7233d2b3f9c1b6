"""The Sweeps and Glossary pages through Streamlit's AppTest: what is shown, and every error path."""

import json
import shutil
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("streamlit")
pytest.importorskip("duckdb")

from streamlit.testing.v1 import AppTest

import tokentwin.dashboard
from tests.dashboard.badges import badges
from tests.dashboard.pages import charts, opened, parameter, text
from tests.dashboard.samples import one_line, toy_run
from tokentwin.dashboard.glossary_page.page import matches
from tokentwin.dashboard.sweeps_page import charts as sweep_charts
from tokentwin.dashboard.sweeps_page.page import SAMPLE
from tokentwin.planning.sweep.results import SweepResults, axis_title
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import METRICS

SAMPLES = Path(tokentwin.dashboard.__file__).with_name("samples")


sweeps = partial(opened, "sweeps")


@pytest.fixture
def partitioned(tmp_path):
    """A sweep as `tokentwin sweep` leaves it, by GPU, with a run that failed."""
    table = pq.read_table(SAMPLES / "sweep" / "runs" / "runs.parquet")
    about = json.loads((SAMPLES / "sweep" / "sweep.json").read_text()) | {"partition": ["gpu"]}
    rows = table.to_pylist()
    rows[0] |= {"status": "failed", "error": "ZeroDivisionError: not today", "slo_attainment": None}
    for gpu in ("H100", "L40S"):
        folder = tmp_path / "mine" / "runs" / f"gpu={gpu}"
        folder.mkdir(parents=True)
        of_gpu = type(table).from_pylist([r for r in rows if r["gpu"] == gpu], schema=table.schema)
        pq.write_table(of_gpu.drop_columns(["gpu"]), folder / "runs.parquet")
    (tmp_path / "mine" / "sweep.json").write_text(json.dumps(about))
    return tmp_path


# Sweeps


def test_the_sample_is_there_when_nothing_else_is(tmp_path):
    app = sweeps(tmp_path / "nowhere")
    assert not app.exception and not app.error and not dict(app.query_params)
    assert app.selectbox(key="url_sweep").value == SAMPLE
    assert "84 runs" in text(app) and "rate (7), seed (2)" in text(app)
    (figure,) = charts(app)
    assert {trace.get("name") for trace in figure["data"]} >= {"H100", "L40S"}
    assert figure["layout"]["xaxis"]["title"]["text"] == "rate (requests/s)"
    assert figure["layout"]["yaxis"]["title"]["text"] == "SLO attainment (fraction)"
    (badge,) = badges(app)
    assert badge.level == "interpolated" and "Some kernels were measured at smaller and larger sizes" in badge.reason


def test_the_badge_is_of_the_runs_that_are_shown(tmp_path):
    shutil.copytree(SAMPLES / "sweep", tmp_path / "mine")
    path = tmp_path / "mine" / "runs" / "runs.parquet"
    runs = pq.read_table(path)
    fast = pc.greater(runs["rate"], 2)
    trust = pc.if_else(fast, "extrapolated", runs["trust"])
    pq.write_table(runs.set_column(runs.schema.get_field_index("trust"), "trust", trust), path)
    (badge,) = badges(sweeps(tmp_path))
    assert badge.level == "extrapolated" and "Of 84 runs 60 extrapolated, 24 interpolated" in badge.reason
    (badge,) = badges(sweeps(tmp_path, only_rate="1,2"))
    assert badge.level == "interpolated"


def test_the_url_chooses_axes_series_and_filters(partitioned):
    url = {"y": "ttft_ms_p99", "x": "rate", "by": "max_num_batched_tokens", "of_max_num_batched_tokens": "512,8192"}
    app = sweeps(partitioned, sweep="mine", only_gpu="H100", log="1", **url)
    assert not app.exception and not app.error
    (figure,) = charts(app)
    assert [trace["name"] for trace in figure["data"] if trace.get("name")] == ["512", "8192"]
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert "27 runs." in text(app)  # of 28, one failed
    assert "84 runs, 1 of them failed" in text(app)
    assert set(app.dataframe[0].value["gpu"]) == {"H100"} and parameter(app, "only_gpu") == "H100"


def test_at_most_four_series_unasked_and_another_sweep_changes_the_url(partitioned):
    app = sweeps(partitioned, by="rate", x="gpu")
    (figure,) = charts(app)
    assert [trace["name"] for trace in figure["data"]] == ["1", "4", "12", "20"]
    app.selectbox[0].set_value(SAMPLE).run()
    assert not app.exception and parameter(app, "sweep") == SAMPLE


def test_what_the_url_names_and_is_not_there_is_said(tmp_path):
    app = sweeps(tmp_path, sweep="../../etc", y="speed")
    assert not app.exception and len(app.info) == 2
    assert parameter(app, "sweep") == SAMPLE


def test_a_filter_that_leaves_nothing_says_so(tmp_path):
    app = sweeps(tmp_path)
    app.multiselect[1].set_value([]).run()
    assert not app.exception and "No run matches" in app.info[0].value


def test_a_query_is_answered_and_stays_in_the_url(tmp_path):
    sql = "select gpu, max(rate) as best from runs where slo_attainment > 0.9 group by all order by gpu"
    app = sweeps(tmp_path)
    app.text_area[0].set_value(sql)
    app.button[0].click().run()
    assert app.dataframe[-1].value.to_dict("list") == {"gpu": ["H100", "L40S"], "best": [20, 1]}
    assert parameter(app, "sql") == sql
    again = sweeps(tmp_path, sql="select sum(rate) as s from runs")
    assert "came with the link" in again.info[-1].value and len(again.dataframe) == len(app.dataframe) - 1
    again.button[0].click().run()
    assert again.dataframe[-1].value["s"].tolist() == [756.0]


@pytest.mark.parametrize("sql", ["select", "select * from read_csv('/etc/passwd')", "attach 'x.db'"])
def test_a_query_that_cannot_be_is_one_line(tmp_path, sql):
    assert one_line(sweeps(tmp_path, sql=sql).button[0].click().run())


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sweep.json", b"{"),
        ("sweep.json", b"[]"),
        ("sweep.json", b'{"varied": 3}'),
        ("sweep.json", b'{"varied": {"a": "nothing"}, "columns": {}, "partition": []}'),
        ("sweep.json", b'{"varied": {}, "columns": {}, "partition": ["gpu"]}'),
        ("runs/runs.parquet", b"PAR1 but not really"),
    ],
)
def test_a_damaged_sweep_is_one_line(tmp_path, file, content):
    shutil.copytree(SAMPLES / "sweep", tmp_path / "broken")
    (tmp_path / "broken" / file).write_bytes(content)
    assert "sweep" in one_line(sweeps(tmp_path, sweep="broken"))


def test_a_sweep_whose_runs_all_failed_shows_why(tmp_path):
    shutil.copytree(SAMPLES / "sweep", tmp_path / "failed")
    file = tmp_path / "failed" / "runs" / "runs.parquet"
    table = pq.read_table(file)
    rows = [row | {"status": "failed", "error": "no memory"} for row in table.to_pylist()]
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), file)
    app = sweeps(tmp_path, sweep="failed")
    assert not app.exception and "No run of this sweep finished" in app.warning[0].value
    assert set(app.dataframe[0].value["error"]) == {"no memory"}


def test_results_are_read_with_their_partitions(partitioned):
    part = SweepResults.load(partitioned / "mine")
    whole = SweepResults.load(SAMPLES / "sweep")
    assert set(part.parameters) == set(whole.parameters) and part.values("gpu") == ["H100", "L40S"]
    assert part.complete.num_rows == 83 and whole.complete.num_rows == 84
    assert part.metrics["ttft_ms_p99"] == "TTFT p99 (ms)"
    with pytest.raises(UserError, match="cannot be read"):
        SweepResults.load(partitioned)


def test_axis_titles():
    assert axis_title("kv_usage_peak") == "KV usage peak (fraction)"
    assert axis_title("itl_ms_count") == "ITL count" and axis_title("saturation") == "saturation"
    assert axis_title("gpus") == axis_title("ttft_ms_p42") == axis_title("run_id") == ""
    assert sweep_charts.parameter_title("deployment.scheduler.max_num_seqs") == (
        "deployment.scheduler.max_num_seqs (requests)"
    )


def test_a_point_is_the_median_of_its_runs_in_a_band_of_all_of_them():
    runs = pd.DataFrame({"rate": [1, 1, 1, 2], "v": [3.0, 9.0, 4.0, 5.0], "trust": ["", "extrapolated", "", ""]})
    band, line = sweep_charts.metric_over(runs, "rate", "v", None, {"rate": "rate", "v": "v"}).data
    assert list(line.y) == [4.0, 5.0] and list(line.marker.symbol) == ["circle-open", "circle"]
    assert list(band.y) == [3.0, 5.0, 5.0, 9.0]
    banded = runs.assign(v_low=runs["v"] - 1, v_high=runs["v"] + 2)
    band, _ = sweep_charts.metric_over(banded, "rate", "v", None, {"rate": "rate", "v": "v"}).data
    assert list(band.y) == [2.0, 4.0, 7.0, 11.0]


def test_points_lie_where_they_are_on_numbers_and_side_by_side_on_names():
    runs = pd.DataFrame({"rate": [1, 2], "gpu": ["a", "b"], "v": [3.0, 4.0], "trust": ""})
    titles = {name: name for name in runs}
    assert sweep_charts.metric_over(runs, "rate", "v", "gpu", titles, ["a", "b"]).layout.scattermode is None
    assert sweep_charts.metric_over(runs, "gpu", "v", "rate", titles, [1, 2]).layout.scattermode == "group"


def test_many_values_are_a_point_each_and_none_is_said():
    runs = pd.DataFrame({"x": range(5000), "v": range(5000), "trust": "interpolated"})
    (points,) = sweep_charts.metric_over(runs, "x", "v", None, {"x": "x", "v": "v"}).data
    assert points.mode == "markers" and len(points.x) == 2000
    nothing = sweep_charts.metric_over(runs.assign(v=float("nan")), "x", "v", None, {"x": "x", "v": "v"})
    assert nothing.layout.annotations[0].text


# Downloads


def test_a_run_has_a_download_of_every_format(tmp_path):
    def script(path):
        from pathlib import Path

        from tokentwin.dashboard.downloads import downloads
        from tokentwin.planning.exports.exportable import open_exportable

        downloads(open_exportable(Path(path)), "toy")

    toy_run(tmp_path / "toy", "virtual", seed=0, count=5)
    app = AppTest.from_function(script, args=(str(tmp_path / "toy"),), default_timeout=300).run()
    assert not app.exception
    assert [button.label for button in app.get("download_button")] == [
        *("Parquet of requests", "Parquet of steps", "CSV of requests", "CSV of steps"),
        *("Report", "Perfetto trace", "OpenMetrics"),
    ]


@pytest.mark.parametrize(
    ("page", "labels"),
    [
        ("sweeps", ["Parquet", "CSV", "Report"]),
        ("plan", ["Parquet", "CSV", "Report", "JSON"]),
        ("trust", ["Parquet of rows", "Parquet of steps", "CSV of rows", "CSV of steps", "Report"]),
    ],
)
def test_every_page_of_answers_has_the_same_menu(tmp_path, page, labels):
    app = opened(page, tmp_path)
    assert not app.exception
    assert [button.label for button in app.get("download_button")] == labels
    (menu,) = [block for block in app.get("popover") if block.proto.popover.label == "Download"]
    assert menu.proto.popover.icon == ":material/download:"


# Glossary


def test_the_glossary_holds_every_metric_with_an_anchor():
    app = opened("glossary")
    assert not app.exception
    assert {e.proto.anchor for e in app.get("subheader")} == set(METRICS)
    assert {e.value for e in app.get("subheader")} == {m.label for m in METRICS.values()}
    assert "`vllm:time_to_first_token_seconds`" in text(app)


def test_a_search_finds_names_of_other_tools_and_says_when_there_is_none():
    app = opened("glossary", q="num_requests_waiting")
    assert [e.value for e in app.get("subheader")] == ["waiting"]
    app.text_input[0].set_value("no such *thing*").run()
    assert not app.exception and "No metric" in app.info[0].value and parameter(app, "q") == "no such *thing*"
    assert [name for name, m in METRICS.items() if matches(m, "JAIN tenants")] == ["jain_fairness"]
