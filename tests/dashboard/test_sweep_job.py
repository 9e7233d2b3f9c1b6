"""A sweep that is started on the Sweeps page: what it may contain, what its job leaves, and its views."""

from copy import deepcopy
from functools import partial

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("duckdb")

from tests.dashboard.pages import charts, opened, shown
from tokentwin.dashboard.bundled import SAMPLES
from tokentwin.dashboard.sweeps_page import charts as sweep_charts
from tokentwin.dashboard.sweeps_page import tasks
from tokentwin.dashboard.sweeps_page.inputs import sweep_of
from tokentwin.dashboard.sweeps_page.page import SAMPLE
from tokentwin.dashboard.sweeps_page.tasks import DATASET, MOST_RUNS, PARTIAL, SWEEP, UNDER_WAY, check_sweep, sweep
from tokentwin.planning.exports.sweep import SweepView
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.progress import quiet
from tokentwin.planning.sweep.executors import in_processes
from tokentwin.planning.sweep.results import SweepResults
from tokentwin.serving.errors import UserError

sweeps = partial(opened, "sweeps")
SMALL = {"do": "start", "gpus": "H100", "rates": "2,4", "policies": "vllm", "requests": "50", "seeds": "1"}
DATA = {
    "base": {
        "deployment": {"model": "Llama-3.1-8B", "device": "cuda", "gpu_memory_utilization": 0.9},
        "gpu": "H100",
        "workload": {"requests": 50, "arrivals": {"kind": "poisson", "rate": 2}, "prompt": 100, "output": 20},
    },
    "grid": {"workload.arrivals.rate": [2, 4]},
}


@pytest.fixture
def here(monkeypatch):
    """Simulate runs in this process: processes of their own would mostly spend time on imports."""
    monkeypatch.setattr(tasks, "find_executor", lambda *_: partial(in_processes, jobs=1))


def changed(path, value):
    data = deepcopy(DATA)
    *way, last = path.split("/")
    node = data
    for name in way:
        node = node[name]
    node[last] = value
    return data


def test_a_form_starts_a_sweep_and_its_job_opens_in_every_view(tmp_path, started, here):
    app = sweeps(tmp_path, **SMALL)
    assert "2 runs, on all processors" in shown(app) and not charts(app)
    app.button(key="start_sweep").click().run()
    (job,) = started
    assert job.task == SWEEP and check_sweep(job.settings["sweep"]) == 2
    write_json(job.directory / "result.json", sweep(job.settings, job.directory, quiet))
    assert SweepResults.load(job.directory / DATASET).summary == (
        "2 runs; varied: gpu (1), policy (1), tensor_parallel_size (1), rate (2), seed (1)"
    )
    for view in ("line", "scatter"):
        assert len(charts(sweeps(tmp_path, view=view, **SMALL))) == 1
    app = sweeps(tmp_path, view="table", **SMALL)
    assert (
        not charts(app) and len(app.dataframe[0].value) == 2 and "tokentwin sweep" in shown(app) + app.expander[0].label
    )
    assert f"jobs/{job.id}/{DATASET}" in sweeps(tmp_path).selectbox(key="url_sweep").options


def test_a_cancelled_sweep_goes_on_where_it_ended(tmp_path, here):
    job = Job(tmp_path / "jobs", SWEEP, {"sweep": DATA})
    job.directory.mkdir(parents=True)
    sweep({"sweep": changed("grid/workload.arrivals.rate", [2])}, job.directory, quiet)
    (job.directory / DATASET).rename(job.directory / f".{DATASET}")  # as a cancelled job leaves it
    stages = []
    assert sweep(job.settings, job.directory, lambda stage, share: stages.append(stage)) == {"made": 2, "failed": 0}
    assert stages == ["2 of 2 runs"]


def test_a_sweep_under_way_shows_the_runs_that_have_ended(tmp_path, started, here):
    link = SMALL | {"gpus": "H100,L40S"}
    app = sweeps(tmp_path, **link)
    app.button(key="start_sweep").click().run()
    (job,) = started
    seen, watching = [], []

    def tell(stage, share):
        runs = SweepResults.load(job.directory / UNDER_WAY).complete.num_rows
        assert job.document(PARTIAL) == stage == f"{runs} of 4 runs"
        app = sweeps(tmp_path, view=("scatter", "heat map", "heat map", "table")[runs - 1], **link)
        assert f"So far: {runs} run" in shown(app)
        heat_map = [one["data"][0]["type"] for one in charts(app)] == ["heatmap"]
        seen.append((len(charts(app)), heat_map, len(app.dataframe[0].value) if len(app.dataframe) else 0))
        watching.append(watching[-1].run() if watching else sweeps(tmp_path, view="scatter", **link))
        assert len(watching[-1].dataframe[0].value) == runs, "values that nobody chose among are shown when they come"

    sweep(job.settings, job.directory, tell)
    assert seen == [(1, False, 1), (0, False, 0), (1, True, 3), (0, False, 4)]


def test_the_axis_of_a_sweep_under_way_is_at_last_that_of_the_whole_sweep(tmp_path, started, here):
    link = SMALL | {"rates": "1,2,4", "seeds": "2"}
    sweeps(tmp_path, **link).button(key="start_sweep").click().run()
    (job,) = started
    watching = []

    def tell(stage, share):
        if stage != "1 of 6 runs":  # from the second run on, the runs differ in their seeds only
            watching.append(watching[-1].run() if watching else sweeps(tmp_path, **link))

    sweep(job.settings, job.directory, tell)
    assert next(box.value for box in watching[-1].selectbox if box.label == "Against") == "rate"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("base/deployment", "/etc/passwd", "deployment"),
        ("base/calibration", "/etc", "calibration"),
        ("base/workload/trace", "/etc/passwd", "trace"),
        ("base/workload/prompt", {"kind": "empirical", "path": "/etc/passwd"}, "path"),
        ("base/router", "os:system", "router"),
        ("grid/router", ["/tmp/mine.py:Mine"], "router"),
        ("grid/deployment.policy", ["vllm", "/tmp/mine.py:Mine"], "policy"),
        ("grid/deployment.model", ["/etc"], "model"),
        ("grid/calibration", ["runs"], "calibration"),
        ("seeds", MOST_RUNS, "its runs"),
        ("base/workload/requests", 10**9, "requests"),
    ],
)
def test_a_sweep_of_the_page_names_nothing_of_the_server(path, value, field):
    with pytest.raises(UserError) as refused:
        check_sweep(changed(path, value))
    assert field in f"{refused.value.field} {refused.value.value}" and "\n" not in str(refused.value)


def test_a_heat_map_has_the_median_of_each_cell():
    results = SweepResults.load(SAMPLES / "sweep")
    view = SweepView("ttft_ms_p99", "rate", "gpu", (), kind=sweep_charts.HEAT_MAP)
    (cells,) = sweep_charts.drawn(results, results.complete, view).data
    runs = results.complete.to_pandas()
    mine = runs[(runs["gpu"] == "L40S") & (runs["rate"] == 8)]["ttft_ms_p99"]
    at = list(cells.y).index("L40S"), list(cells.x).index("8")
    assert cells.z[at] == mine.median() and cells.customdata[at] == len(mine)
    (drawn,) = charts(sweeps(SAMPLES / "nowhere", sweep=SAMPLE, view="heat map"))
    assert drawn["data"][0]["type"] == "heatmap"


@pytest.mark.parametrize("text", ["base: 2026-01-01", "base: .nan", "base: {1: 2, b: 3}"])
def test_yaml_that_is_not_json_gets_one_line(text):
    with pytest.raises(UserError) as error:
        sweep_of(text)
    assert "\n" not in str(error.value)
