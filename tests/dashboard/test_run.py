"""The Run page's views: what each shows of a run, and what it says where it cannot. A browser brushes elsewhere."""

import io
import json
import threading
import time
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("streamlit")

import streamlit
from click.testing import CliRunner

from tests.dashboard.badges import badges
from tests.dashboard.pages import charts, opened, parameter, text, worded_alike
from tokentwin.calibration.steps.explanation import ExplainedOperation
from tokentwin.calibration.steps.external_calibration import identity, predicted_cost
from tokentwin.calibration.steps.run_explanation import (
    PREDICTED_COLUMNS,
    SAMPLE,
    RunExplanation,
    explain_run,
    measured_parts,
)
from tokentwin.calibration.trust import TrustLevel
from tokentwin.cli import cli
from tokentwin.commands.simulate import simulate
from tokentwin.dashboard.bundled import RUN_SAMPLE, bundled_answer, portable, sample_diagnosis
from tokentwin.dashboard.loading import prefetch, token_gaps
from tokentwin.dashboard.run_page import page as run_page
from tokentwin.dashboard.run_page.diagnosis_charts import what_it_buys
from tokentwin.dashboard.run_page.request_table import _row, slowest
from tokentwin.dashboard.run_page.step_time_charts import part_times
from tokentwin.planning.diagnose.baseline import LATENCIES
from tokentwin.planning.diagnose.document import Counterfactual, DiagnosisDocument
from tokentwin.planning.diagnose.recorded_run import diagnosis
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.repricing import Source, source_of
from tokentwin.planning.run_report import RequestEndings
from tokentwin.run_table import print_metrics, print_reasons
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording, notes_of
from tokentwin.traces.recording_writer import RecordingWriter

SPEC = {
    "requests": 150,
    "seed": 3,
    "arrivals": "gamma:rate=40,cv=3",
    "prompt": "uniform:low=20,high=900",
    "output": "exponential:mean=40",
}


@pytest.fixture(scope="module")
def timed(samples):
    """Add a run that the kernel tables of an H100 timed, simulated by the command."""
    trace = samples.parent / "trace.parquet"
    options = [f"--{name}={value}" for name, value in SPEC.items()]
    made = CliRunner().invoke(cli, ["trace", "synth", str(trace), *options])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(simulate, [str(trace), "--gpu", "H100", "--out", str(samples / "timed")])
    assert done.exit_code == 0, done.output
    return Recording.load(samples / "timed")


page = partial(opened, "run")


# Trust and bands


def test_a_simulated_run_carries_its_trust_and_bands(samples, timed):
    app = page(samples, run="timed")
    assert not app.exception and not app.error
    notes = notes_of(timed.run)
    assert notes["gpu"] == "H100"
    assert {badge.level for badge in badges(app)} == {notes["trust"]["level"]}
    assert all(notes["trust"]["reason"][1:] in badge.reason for badge in badges(app))
    low, high = notes["bands"]["ttft_ms"]["p99"]
    assert low <= RunMetrics.from_recording(timed).distribution("ttft_ms").p99 <= high
    deltas = [metric.delta for metric in app.metric[:6]]
    assert all("–" in delta for delta in deltas)


def test_a_simulated_run_of_which_nothing_is_known_says_so(samples):
    app = page(samples, run="simulated")
    assert {badge.level for badge in badges(app)} == {"unknown"}
    assert not app.metric[0].delta
    assert {badge.level for badge in badges(page(samples, run="real-1"))} == {"measured"}


# A run that came to little


@pytest.fixture(scope="module")
def shed(tmp_path_factory):
    """Two replicas with KV tiers and drafts; 30 of 40 requests time out, 2 are rejected, 8 finish. By hand."""
    directory = tmp_path_factory.mktemp("shed") / "shed"
    nothing = dict.fromkeys(("workload", "deployment", "hardware", "calibration", "notes"), "")
    run = {"run_id": "shed", "clock": "virtual", "num_blocks": 100, "replicas": 2, **nothing}
    with RecordingWriter(directory, run) as writer:
        for i in range(40):
            status = "finished" if i < 8 else "rejected" if i < 10 else "timed_out"
            at = i * 10_000_000
            came = {"request_id": i, "status": status, "arrival_ns": at, "prompt_tokens": 100, "end_ns": at + 5}
            if i < 8:
                came |= {"replica": i % 2, "scheduled_ns": at, "first_token_ns": at + 5, "finish_ns": at + 9_000_000}
                came |= {"output_tokens": 5, "drafts": 2, "draft_tokens": 6, "accepted_tokens": 3}
                came |= {"tier_hit_tokens": {"cpu": 25, "nvme": 10} if i < 4 else {}}
            else:
                came |= {"reason": f"because of {i}"}
            writer.add_request(**came)
        for i in range(8):
            step = {"replica": i % 2, "step": i // 2, "start_ns": i * 10_000_000, "end_ns": i * 10_000_000 + 9_000_000}
            writer.add_step(**step, prefill_tokens=100, decode_rows=1, draft_tokens=3, running=1, used_blocks=50)
    return Recording.load(directory)


def test_a_run_that_came_to_little_says_so_first(shed):
    app = page(shed.path.parent, run="shed")
    assert not app.exception and not app.error
    (facts,) = [m.value for m in app.markdown if "badge[simulated]" in m.value]
    assert ":red-badge[80.0 % did not finish]" in facts and ":green-badge" not in facts
    assert "30 timed out, 8 finished, 2 rejected" in facts
    assert any("Latencies are those of the 8 of 40 requests" in caption.value for caption in app.caption)
    assert {"timed out", "finished", "rejected"} == set(app.dataframe[0].value["status"])


def test_cards_tell_of_tiers_drafts_and_replicas(shed):
    said = [caption.value for caption in page(shed.path.parent, run="shed").caption]
    assert any("12.5 % from cpu, 5.0 % from nvme" in text for text in said)
    assert any("2.5 tokens" in text and "50 % of the draft" in text for text in said)
    assert any("of one replica" in text for text in said)


@pytest.mark.parametrize(
    ("settings", "items", "says"),
    [
        (
            {"model": "Llama-3.1-8B", "lora": {"max_loras": 2, "max_cpu_loras": 3}},
            ["--adapters", "3"],
            "Adapters: 3 loads from disk",
        ),
        (
            {"model": "Qwen2.5-VL-7B", "multimodal": {}, "fleet": {"pools": [{"role": "encode"}, {"name": "serve"}]}},
            ["--images", "count=1,tokens=400"],
            "on average a request with items waited",
        ),
    ],
)
def test_cards_tell_of_adapters_and_encoders(tmp_path, settings, items, says):
    file, trace = tmp_path / "deployment.yaml", str(tmp_path / "trace.parquet")
    file.write_text(json.dumps({"device": "cuda", "gpu_memory_utilization": 0.9, **settings}))
    made = ["trace", "synth", trace, "--requests", "20", "--arrivals", "poisson:rate=5", "--prompt", "100"]
    run = ["simulate", trace, "--gpu", "H100", "--no-band", "-d", str(file), "-o", str(tmp_path / "runs" / "one")]
    for command in ([*made, "--output", "5", *items], run):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
    assert any(says in caption.value for caption in page(tmp_path / "runs", run="one").caption)


def test_the_command_line_says_what_came_to_nothing_by_how_it_ended(shed, capsys):
    print_metrics(RunMetrics.from_recording(shed), "table")
    print_reasons(shed)
    said = capsys.readouterr().out
    assert "80.0 %" in said and "8 of 40 requests" in " ".join(said.split())
    assert "30 timed out; reason of the first: because of 10\n" in said
    assert "2 rejected; reason of the first: because of 8\n" in said
    usage = next(line for line in said.splitlines() if line.startswith("kv_usage, %"))
    assert usage.split()[2] == "50"


@pytest.mark.parametrize(
    ("counts", "short"),
    [
        ({}, None),
        ({"finished": 99, "rejected": 1}, None),
        ({"finished": 989, "unfinished": 11}, "1.1 % did not finish"),
        ({"rejected": 7}, "no request finished"),
    ],
)
def test_a_shortfall_is_more_than_one_percent(counts, short):
    assert RequestEndings(counts).shortfall == short


# Who timed it


def test_what_timed_a_run_is_found_by_its_id(tmp_path, timed):
    run = timed.run
    assert run["calibration"] == identity("H100")
    assert source_of(run, []) == Source(None, "H100")
    assert source_of({**run, "notes": ""}, []) == Source(None, "H100")
    damaged = tmp_path / "calibration"
    damaged.mkdir()
    (damaged / "calibration.json").write_text("{")
    assert source_of({**run, "calibration": "000000000000"}, [damaged]) is None
    assert source_of({**run, "calibration": ""}, [damaged]) is None


# Where step time goes


def test_parts_add_up_to_the_recorded_time_of_each_regime(timed):
    deployment = Deployment.model_validate_json(timed.run["deployment"]).model_copy(update={"fleet": None})
    steps = timed.table("steps", list(PREDICTED_COLUMNS))
    explained = explain_run(predicted_cost("H100", deployment), steps)
    took = np.array(steps["end_ns"]) - np.array(steps["start_ns"])
    prompts, decodes = np.array(steps["prefill_rows"]) > 0, np.array(steps["decode_rows"]) > 0
    for name, of in (("prefill", prompts & ~decodes), ("decode", ~prompts), ("mixed", prompts & decodes)):
        assert sum(explained.parts_ns.get(name, {}).values()) == pytest.approx(took[of].sum())
    regimes = (prompts & ~decodes, ~prompts, prompts & decodes)
    assert explained.steps == sum(min(int(of.sum()), SAMPLE) for of in regimes)
    assert "past attention" not in explained.parts_ns["decode"] and explained.parts_ns["decode"]["weights"] > 0
    assert all(0 < o.utilisation <= 1.0001 for o in explained.operations)
    qkv = next(o for o in explained.operations if o.name == "qkv, decode")
    assert qkv.bound == "memory"


def test_only_kernels_that_tell_change_how_far_parts_are_trusted():
    def kernel(name, ns, sigma, level):
        return ExplainedOperation(name, 1, 1.0, 1.0, ns, 0.5, "memory", sigma, level)

    big, small = kernel("qkv", 99.0, 0.05, TrustLevel.INTERPOLATED), kernel("send", 1.0, 0.7, TrustLevel.EXTRAPOLATED)
    assert RunExplanation({"decode": {"weights": 100.0}}, [big, small], 1).telling == [big]
    longer = kernel("send", 2.0, 0.7, TrustLevel.EXTRAPOLATED)
    assert RunExplanation({"decode": {"weights": 100.0}}, [big, longer], 1).telling == [big, longer]
    assert RunExplanation({"decode": {"weights": 1e6}}, [small], 1).telling == [small]


def test_steps_that_overlap_are_said_to():
    def axis(run_ns):
        return part_times({"decode": {"weights": 2e9}}, "#3b7ddd", run_ns).layout.xaxis.title.text

    assert (axis(10**9), axis(3 * 10**9)) == ("time of steps, which overlap (s)", "time of steps (s)")


def test_measured_operations_are_summed_and_the_rest_is_said():
    steps = pa.table(
        {
            "start_ns": [0, 100, 300],
            "end_ns": [100, 300, 400],
            "prefill_rows": [0, 1, 0],
            "decode_rows": [2, 2, 2],
            "forward_ns": [80, 150, 90],
            "sample_ns": [20, 50, 10],
            "op_ns": pa.array([[("gemm", 50)], [("gemm", 70), ("attention", 30)], None], pa.map_("string", "int64")),
        }
    )
    assert measured_parts(steps) == {
        "decode": {"gemm": 50, "rest of the model": 120, "sampling": 30},
        "mixed": {"attention": 30, "gemm": 70, "rest of the model": 50, "sampling": 50},
    }
    nobody = pa.nulls(3, pa.map_("string", "int64"))
    whole = measured_parts(steps.set_column(6, "op_ns", nobody))
    assert whole is not None and whole["decode"] == {"model": 170, "sampling": 30}
    assert measured_parts(steps.set_column(4, "forward_ns", pa.nulls(3, "int64"))) is None


def test_the_step_view_shows_parts_and_roofline(samples, timed):
    app = page(samples, run="timed", view="steps")
    assert not app.exception and not app.error
    parts, roof = charts(app)[1:3]
    assert [trace["y"][0] for trace in parts["data"]] == ["all steps"] * len(parts["data"])
    assert len(parts["data"]) <= 5 and {"weights"} <= {trace["name"] for trace in parts["data"]}
    assert {trace["name"] for trace in roof["data"]} >= {"16-bit roof", "bound by memory"}
    assert "(measured kernel times) of H100" in text(app) and "-badge[" in text(app)
    assert any("qkv, decode" in list(frame.value.get("operation", ())) for frame in app.dataframe)


@pytest.mark.parametrize(
    ("name", "line"), [("simulated", "toy) is neither bundled"), ("real-1", "did not time the parts")]
)
def test_the_step_view_says_why_it_cannot_tell(samples, name, line):
    app = page(samples, run=name, view="steps")
    assert not app.exception and not app.error
    assert line in app.info[0].value and "\n" not in app.info[0].value


def test_small_parts_are_one(samples):
    figure = part_times({"decode": {f"part {n}": 2.0**n for n in range(8)}}, "#3b7ddd")
    assert [trace.name for trace in figure.data] == ["part 7", "part 6", "part 5", "part 4", "other"]
    assert sum(trace.x[0] for trace in figure.data) == pytest.approx(255e-9)
    assert len({trace.marker.color for trace in figure.data}) == 5
    assert not part_times({}, "#3b7ddd").data


# Diagnosis


def test_a_diagnosis_is_asked_for_and_found_again(samples, timed):
    app = page(samples, run="timed", view="diagnosis")
    assert not app.exception and not app.error
    assert "Symptoms only, without a cost model" in text(app) or "No problem found" in text(app)
    app.button(key="diagnose").click().run()
    deadline = time.monotonic() + 240
    while not list((samples / "jobs").glob("*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.3)
    (result,) = (samples / "jobs").glob("*/result.json")
    answer = json.loads(result.read_text())
    again = page(samples, run="timed", view="diagnosis")
    assert not again.exception and not again.error
    verdict = answer["verdict"]
    assert verdict[1:] in text(again)
    assert answer["trust"] and badges(again)[1].level == answer["trust"]["level"]
    assert "the simulated p99 differs" in badges(again)[1].reason
    bars = charts(again)[1]
    shown = {name for trace in bars["data"] for name in trace["y"]}
    tried = [c for c in (*answer["counterfactuals"], *answer["changes"]) if not c["skipped"]]
    assert shown == {f"{c['name']} *" if c["ideal"] else c["name"] for c in tried}
    assert {"one more replica", "free prefill *"} <= shown
    assert any(code.value.startswith("tokentwin compare --trace") for code in again.code)
    captions = [caption.value for caption in again.caption]
    assert all(any(words in caption for caption in captions) for words in ("Do not apply", "by area"))


def test_the_bundled_run_shows_what_helps_before_anything_was_recorded(tmp_path):
    app = page(tmp_path, view="diagnosis")
    assert not app.exception and not app.error and not app.warning
    assert "free prefill *" in {name for trace in charts(app)[1]["data"] for name in trace["y"]}
    assert not [button for button in app.button if button.key == "diagnose"]
    other = page(tmp_path, view="diagnosis", judged="tpot_ms")
    assert [button for button in other.button if button.key == "diagnose"], "it is the answer to one question"


def test_the_bundled_diagnosis_is_what_a_job_would_find(tmp_path):
    asked = sample_diagnosis().as_json()
    bundled = bundled_answer(asked)
    assert bundled is not None
    answer = diagnosis(asked, tmp_path, lambda stage, share: None)
    found = {name: value for name, value in portable(answer).items() if name in bundled}
    assert worded_alike(found) == worded_alike(bundled)
    assert bundled_answer({**asked, "run": str(tmp_path)}) is None


@pytest.mark.parametrize(("name", "line"), [("simulated", "has no workload"), ("real-1", "has no workload")])
def test_a_run_that_cannot_be_simulated_again_has_evidence_only(samples, name, line):
    app = page(samples, run=name, view="diagnosis")
    assert not app.exception and not app.error
    assert any(line in caption.value for caption in app.caption)
    assert not [button for button in app.button if button.key == "diagnose"]


def lifted(name, kind, bought, p99, **more):
    return Counterfactual(name=name, cause="", lifecycle="request", kind=kind, bought=bought, p99=p99, **more)


def bundled_diagnosis(**changed):
    return DiagnosisDocument.read(bundled_answer(sample_diagnosis().as_json())).model_copy(update=changed)


def test_harm_is_red_and_help_is_not():
    def tried(name, kind, bought, p99):
        return lifted(name, kind, dict.fromkeys(LATENCIES, bought), {"ttft_ms": p99})

    figure = what_it_buys(
        bundled_diagnosis(
            metric="ttft_ms",
            simulated_p99={"ttft_ms": 100.0},
            changes=(),
            counterfactuals=(
                tried("a", "policy", 0.4, 60.0),
                tried("b", "capacity", 0.0, 100.0),
                tried("c", "policy", -3.0, 400.0),
                tried("d", "capacity", None, None),
            ),
        )
    )
    assert {trace.name: list(trace.y) for trace in figure.data} == {
        "a setting": ["a *"],
        "more of a resource": ["b *"],
        "makes it worse": ["d *", "c *"],
    }
    texts = [text for trace in figure.data for text in trace.text]
    assert texts == ["-40 %, p99 becomes 60 ms", "no change", "over 1 % never finish", "+300 %, p99 becomes 400 ms"]
    assert min(trace.x[0] for trace in figure.data) == -100
    beside = {note.y: (note.x, note.xanchor, note.text) for note in figure.layout.annotations}
    assert beside["c *"] == (0, "left", "+300 %, p99 becomes 400 ms"), "on the side of the axis where there is room"


def test_of_a_run_that_sheds_bars_are_the_requests_that_finish():
    tried = (lifted("a", "policy", {"finished": 0.8}, {}, finished=0.83),)
    figure = what_it_buys(
        bundled_diagnosis(metric="finished", simulated_finished=0.15, counterfactuals=tried, changes=())
    )
    assert list(figure.data[0].x) == [80] and figure.data[0].text[0] == "83.0 % finish"
    assert "15.0 %" in figure.layout.xaxis.title.text


# Every metric


def test_every_metric_that_is_known_is_listed(samples, timed):
    app = page(samples, run="timed", view="metrics")
    assert not app.exception and not app.error
    distributions, scalars = app.dataframe[0].value, app.table[0].value
    known = [name for name, value in RunMetrics.from_recording(timed).scalars().items() if value is not None]
    assert len(scalars) == len(known)
    assert (scalars["90 % band"] != "").sum() == 3 + 4  # throughputs, and power and energy
    assert list(distributions.columns)[:3] == ["metric", "mean", "p50"]


def test_an_unknown_view_is_the_first(samples):
    app = page(samples, run="real-1", view="junk")
    assert not app.exception
    assert "**Request" in text(app)
    assert parameter(app, "run") == "real-1"


# Large runs


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A recording of 131,072 requests, of two tokens each; request i has a gap of i nanoseconds between them."""
    directory = tmp_path_factory.mktemp("large") / "run"
    run = dict.fromkeys(("workload", "deployment", "hardware", "calibration", "notes"), "")
    with RecordingWriter(directory, {"run_id": "large", "clock": "virtual", **run}) as writer:
        for first in range(0, 131_072, 8192):
            ids = range(first, first + 8192)
            writer.add_requests(
                {
                    "request_id": ids,
                    "status": ["finished"] * len(ids),
                    "token_times_ns": [[1000, 1000 + i] for i in ids],
                }
            )
    return Recording.load(directory)


@pytest.mark.parametrize("row", [0, 8191, 8192, 70_003, 131_071])
def test_one_request_is_read_from_its_row_group(large, row):
    assert len(large.group_rows("requests")) > 10
    request = _row(large, row)
    assert request["request_id"] == row and request["token_times_ns"] == [1000, 1000 + row]


def test_gaps_of_a_large_run_are_a_sample_spread_over_it(large):
    gaps = token_gaps(large)
    assert 0.1 < gaps.share < 1
    assert len(gaps.values) == round(gaps.share * 131_072)
    assert gaps.values[0] == 0 and gaps.values[-1] > 0.9 * 131_071 / 1e6
    assert np.median(gaps.values) == pytest.approx(65_536 / 1e6, rel=0.1)


def test_columns_without_a_value_are_known_without_reading_them(large, timed):
    assert large.filled("requests", ["tenant", "status", "token_times_ns", "session"]) == ["status", "token_times_ns"]
    assert large.filled("steps", ["start_ns", "stages_ns"]) == []
    filled = [name for name in timed.steps.column_names if any(timed.steps[name].to_pylist())]
    assert set(filled) <= set(timed.filled("steps", timed.steps.column_names))


@given(st.lists(st.sampled_from([float("nan"), 0.0, 1.0, 2.0, 3.0]), max_size=60), st.integers(1, 20))
def test_the_slowest_are_those_of_a_whole_sort(values, most):
    values, rows = np.array(values), np.arange(len(values))[::2]
    whole = rows[np.argsort(-np.where(np.isnan(values[rows]), -1.0, values[rows]), kind="stable")][:most]
    assert slowest(values, rows, most).tolist() == whole.tolist()


def test_a_page_that_works_ahead_draws_the_same(samples, timed, monkeypatch):
    plain = charts(page(samples, run="timed"))
    streamlit.cache_resource.clear()
    calls = []
    monkeypatch.setattr(run_page, "_LONG", 0)
    monkeypatch.setattr(run_page, "prefetch", lambda *works: calls.append(works) or prefetch(*works))
    assert charts(page(samples, run="timed")) == plain
    assert len(calls) == 1


def test_what_fails_ahead_is_left_for_the_page_to_meet():
    done = threading.Event()

    def damaged():
        raise UserError("recording", "x", "is damaged")

    prefetch(damaged, done.set)
    assert done.wait(60)


def test_gaps_of_a_small_run_are_those_of_all_requests(timed):
    gaps = token_gaps(timed)
    assert gaps.share == 1
    assert np.array_equal(gaps.values, RunMetrics.from_recording(timed).values("itl_ms"))


def test_a_long_table_is_prepared_by_a_job_and_is_the_export(tmp_path, monkeypatch):
    from tokentwin.dashboard import downloads as menu
    from tokentwin.dashboard.export_task import export_job, write
    from tokentwin.planning.exports.export import write_export
    from tokentwin.planning.exports.recorded_run import RecordedRun

    source = RecordedRun(RUN_SAMPLE, runs=tmp_path)
    job = export_job(tmp_path / "jobs", source, "csv", "steps")
    job.directory.mkdir(parents=True)
    assert write(job.settings, job.directory, lambda stage, share: None) > 1000
    whole = io.BytesIO()
    write_export(source, "csv", whole, "steps")
    assert (job.directory / "export").read_bytes() == whole.getvalue()
    monkeypatch.setattr(menu, "MANY", 100)
    started = []
    monkeypatch.setattr(Job, "start", lambda job: started.append(job))
    app = page(tmp_path)
    prepare = [button for button in app.button if button.label.startswith("Prepare ")]
    assert {button.label for button in prepare} >= {"Prepare CSV of requests", "Prepare CSV of steps"}
    next(button for button in prepare if button.label == "Prepare CSV of steps").click().run()
    assert [job.settings["table"] for job in started] == ["steps"] and not app.exception
