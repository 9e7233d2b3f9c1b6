"""Exports of a recording: what comes out is what went in, in the other tool's terms."""

import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.command import tokentwin
from tests.dashboard.samples import MS, toy_run
from tokentwin.cli import cli
from tokentwin.commands.export import export as command
from tokentwin.dashboard.bundled import RUN_SAMPLE, bundled_answer, sample_diagnosis
from tokentwin.dashboard.html_reports.report import write_report
from tokentwin.planning.exports.export import export, formats_of, write_export, write_table
from tokentwin.planning.exports.formats import FORMATS
from tokentwin.planning.exports.perfetto import events
from tokentwin.planning.exports.recorded_run import RecordedRun
from tokentwin.planning.exports.vllm_buckets import one_two_five
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import METRICS
from tokentwin.traces.measured.prometheus import Prometheus, Window
from tokentwin.traces.metrics.run_metrics import REQUEST_METRICS, RunMetrics
from tokentwin.traces.recording_writer import RecordingWriter

OF_A_RUN = ("parquet", "csv", "html", "perfetto", "openmetrics")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "toy"
    toy_run(path, "virtual", seed=0)
    return RecordedRun(path)


@pytest.fixture
def fleet(tmp_path):
    """Two replicas with an overlapped step, a request that no replica had, one under way and one cancelled."""
    deployment = {"model": 'a "b"\\c', "scheduler": {"max_model_len": 1000}}
    about = {"run_id": "x", "clock": "virtual", "deployment": json.dumps(deployment), "replicas": 2, "num_blocks": 10}
    with RecordingWriter(tmp_path / "fleet", about) as writer:
        for replica, start, end in ((1, 0, 10), (1, 8, 20), (0, 5, 6)):
            writer.add_step(
                replica=replica, step=start, start_ns=start * MS + 1, end_ns=end * MS + 1, prefill_tokens=3 * replica,
                prefill_rows=replica, decode_rows=2, running=2, waiting=replica, used_blocks=4, op_ns={"attention": 7},
            )  # fmt: skip
        common = {"prompt_tokens": 40, "output_tokens": 3, "prefix_hit_tokens": 16, "preemptions": 1}
        times = {"arrival_ns": 1, "scheduled_ns": MS + 1, "first_token_ns": 10 * MS + 1}
        tokens = [10 * MS + 1, 20 * MS + 1, 60 * MS + 1]
        writer.add_request(
            request_id=3, replica=1, status="finished", finish_ns=60 * MS + 1, token_times_ns=tokens, **times, **common,
            drafts=2, draft_tokens=6, accepted_tokens=1, tier_hit_tokens={"cpu": 16, "nvme": 8},
        )  # fmt: skip
        writer.add_request(request_id=4, replica=0, status="unfinished", **times, **{**common, "output_tokens": 1})
        writer.add_request(request_id=5, replica=0, status="cancelled", arrival_ns=7, end_ns=3 * MS, prompt_tokens=9)
        writer.add_request(request_id=6, status="rejected", reason="</script><b>&", arrival_ns=5, prompt_tokens=10**6)
    return RecordedRun(tmp_path / "fleet")


def written(source, name, table=None):
    out = io.BytesIO()
    write_export(source, name, out, table, html=write_report)
    return out.getvalue()


# Tables


@pytest.mark.parametrize("table", ["requests", "steps"])
def test_parquet_holds_the_recording_and_its_metrics(run, table):
    read = pq.read_table(io.BytesIO(written(run, "parquet", table)))
    recorded = run.recording.table(table)
    assert read.select(recorded.column_names).equals(recorded)
    more = set(read.column_names) - set(recorded.column_names)
    assert more == (
        set(REQUEST_METRICS)
        if table == "requests"
        else {"step_ms", "batch_tokens", "kv_usage", "kv_pressure", "mfu", "mbu"}
    )
    for name in more:
        np.testing.assert_array_equal(read[name].to_numpy(), RunMetrics.from_recording(run.recording).values(name))
        assert read.schema.field(name).metadata[b"unit"].decode() == METRICS[name].unit


def test_a_spreadsheet_finds_no_formula_in_text_of_a_trace():
    """Of text that came with a trace; numbers stay as they are."""
    names = ["=cmd|' /C calc'!A0", "+1", "-1", "@sum", "\tx", "a=b", "", None]
    out = io.BytesIO()
    write_table(pa.table({"tenant": names, "change": [-1.5] * len(names)}), "csv", out)
    read = csv.read_csv(io.BytesIO(out.getvalue())).to_pydict()
    assert read["tenant"] == ["'=cmd|' /C calc'!A0", "'+1", "'-1", "'@sum", "'\tx", "a=b", "", ""]
    assert read["change"] == [-1.5] * len(names)


@pytest.mark.parametrize("table", ["requests", "steps"])
def test_csv_reads_back_with_lists_as_words(fleet, table):
    read = csv.read_csv(io.BytesIO(written(fleet, "csv", table))).to_pydict()
    if table == "requests":
        assert read["ttft_ms"] == [10.0, None, None, None] and read["request_id"] == [3, 4, 5, 6]
        assert read["token_times_ns"][0] == f"{10 * MS + 1} {20 * MS + 1} {60 * MS + 1}"
        assert read["reason"][3] == "</script><b>&"
    else:
        assert read["step_ms"] == [10.0, 12.0, 1.0] and read["op_ns"][0] == '{"attention": 7}'


# Perfetto


def test_a_trace_keeps_every_nanosecond_of_steps_and_requests(run):
    trace = json.loads(written(run, "perfetto"))["traceEvents"]
    steps = [e for e in trace if e["ph"] == "X"]
    recorded = run.recording.table("steps", ["start_ns", "end_ns"]).to_pydict()
    assert [round(1000 * e["ts"]) for e in steps] == recorded["start_ns"]
    assert [round(1000 * (e["ts"] + e["dur"])) for e in steps] == recorded["end_ns"]
    requests = {r["request_id"]: r for r in run.recording.requests.to_pylist() if r["status"] == "finished"}
    spans = {}
    for e in trace:
        if e["ph"] in "be":
            spans.setdefault((e["id"], e["name"]), []).append(round(1000 * e["ts"]))
    for id_, r in requests.items():
        assert spans[id_, "request"] == [r["arrival_ns"], r["finish_ns"]]
        assert spans[id_, "queue"][0] == r["arrival_ns"] and spans[id_, "decode"][1] == r["finish_ns"]
        assert spans[id_, "queue"][1] == spans[id_, "prefill"][0] == r["scheduled_ns"]
        assert spans[id_, "prefill"][1] == spans[id_, "decode"][0] == r["first_token_ns"]


def test_slices_of_a_thread_nest_and_asynchronous_ones_are_balanced(fleet):
    threads, open_ = {}, []
    for e in events(fleet.recording):
        if e["ph"] == "X":
            ends = threads.setdefault((e["pid"], e["tid"]), [0.0])
            assert e["ts"] >= ends[-1]
            ends.append(e["ts"] + e["dur"])
        elif e["ph"] == "b":
            open_.append((e["pid"], e["id"], e["name"]))
        elif e["ph"] == "e":
            assert open_.pop() == (e["pid"], e["id"], e["name"])
    assert not open_ and len(threads) == 3  # the overlapped step has a thread of its own
    names = [e["args"]["name"] for e in events(fleet.recording) if e["ph"] == "M"]
    assert names == ["replica 0", "replica 1", "no replica"]


# OpenMetrics


def families(text):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def value(family, suffix, **labels):
    found = [s.value for s in family.samples if s.name == family.name + suffix and labels.items() <= s.labels.items()]
    assert len(found) == 1
    return found[0]


def test_openmetrics_is_what_the_parser_of_prometheus_accepts(fleet):
    found = families(written(fleet, "openmetrics").decode())
    ttft = found["vllm:time_to_first_token_seconds"]
    assert ttft.type == "histogram" and ttft.unit == "seconds"
    assert {(s.labels["job"], s.labels["model_name"]) for f in found.values() for s in f.samples} == {
        ("sim", 'a "b"\\c')
    }
    assert value(ttft, "_bucket", engine="1", le="0.005") == 0
    assert value(ttft, "_bucket", engine="1", le="0.01") == value(ttft, "_count", engine="1") == 1
    assert value(ttft, "_sum", engine="1") == pytest.approx(0.01)
    assert value(found["vllm:inter_token_latency_seconds"], "_sum", engine="1") == pytest.approx(0.05)
    assert value(found["vllm:iteration_tokens_total"], "_sum", engine="1") == 10
    assert (
        value(found["vllm:prompt_tokens"], "_total", engine="0") == 40
    )  # what was cancelled in the queue was not read
    assert value(found["vllm:num_requests_waiting"], "", engine="1") == 1
    assert value(found["vllm:kv_cache_usage_perc"], "", engine="0") == 0.4
    ended = {(s.labels["engine"], s.labels["finished_reason"]): s.value for s in found["vllm:request_success"].samples}
    assert len(ended) == 10 and {key: n for key, n in ended.items() if n} == {("0", "abort"): 1, ("1", "length"): 1}
    assert value(found["vllm:request_inference_time_seconds"], "_sum", engine="1") == pytest.approx(0.059)
    assert value(found["vllm:request_max_num_generation_tokens"], "_bucket", engine="1", le="2.0") == 0
    assert value(found["vllm:request_max_num_generation_tokens"], "_sum", engine="1") == 3
    assert value(found["vllm:spec_decode_num_draft_tokens"], "_total", engine="1") == 6
    assert value(found["vllm:external_prefix_cache_hits"], "_total", engine="1") == 24
    names = {n for m in METRICS.values() for n in m.prometheus}
    assert names <= {f.name for f in found.values()} | {f"{f.name}_total" for f in found.values()}


def test_what_an_engine_does_not_do_it_has_no_metrics_of(run):
    found = families(written(run, "openmetrics").decode())
    assert not [name for name in found if "spec_decode" in name or "external" in name]


def test_our_own_reader_of_prometheus_finds_the_run_again(run, tmp_path):
    export(run, "openmetrics", tmp_path / "after")
    (tmp_path / "before").write_text("")
    metrics = RunMetrics.from_recording(run.recording)
    settings = Prometheus(before="before", after="after", window_s=metrics.window_s)
    (measured,) = settings.read(tmp_path)
    assert len(measured.workload.requests) == metrics.finished.sum()
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert measured.figures[f"{name}.mean"] == pytest.approx(metrics.distribution(name).mean)
    assert measured.figures["output_throughput"] == pytest.approx(metrics.scalars()["output_throughput"])
    window = Window.between(tmp_path / "before", tmp_path / "after")
    for name, prometheus in (("ttft_ms", "time_to_first_token"), ("itl_ms", "inter_token_latency")):
        histogram = window.histogram(f"vllm:{prometheus}_seconds")
        bucket = int(np.searchsorted(np.cumsum(histogram.counts), 0.99 * histogram.count))
        assert (0.0, *histogram.bounds)[bucket] < metrics.distribution(name).p99 / 1e3 <= histogram.bounds[bucket]


def test_what_was_not_kept_is_left_out(tmp_path):
    with RecordingWriter(tmp_path / "bare", {"run_id": "", "clock": "wall"}) as writer:
        writer.add_request(request_id=0, replica=0, status="finished", arrival_ns=0, scheduled_ns=0,
                           first_token_ns=5, finish_ns=9, prompt_tokens=1, output_tokens=2)  # fmt: skip
    found = families(written(RecordedRun(tmp_path / "bare"), "openmetrics").decode())
    assert "vllm:time_to_first_token_seconds" in found
    assert not {"vllm:inter_token_latency_seconds", "vllm:iteration_tokens_total", "vllm:num_requests_running"} & set(
        found
    )
    assert {s.labels["job"] for f in found.values() for s in f.samples} == {"real"}


def test_tokens_of_one_draft_are_one_gap_as_vllm_observes_them(tmp_path):
    with RecordingWriter(tmp_path / "drafts", {"run_id": "", "clock": "virtual"}) as writer:
        times = [10 * MS, 20 * MS, 20 * MS, 20 * MS, 60 * MS]
        writer.add_request(
            request_id=0, replica=0, status="finished", arrival_ns=0, scheduled_ns=0, first_token_ns=times[0],
            finish_ns=times[-1], token_times_ns=times, prompt_tokens=1, output_tokens=5,
        )  # fmt: skip
    run = RecordedRun(tmp_path / "drafts")
    gaps = families(written(run, "openmetrics").decode())["vllm:inter_token_latency_seconds"]
    assert value(gaps, "_count", engine="0") == 2 and value(gaps, "_sum", engine="0") == pytest.approx(0.05)
    assert RunMetrics.from_recording(run.recording).distribution("itl_ms").count == 4


def test_an_empty_run_is_an_empty_exposition(tmp_path):
    with RecordingWriter(tmp_path / "empty", {"run_id": ""}):
        pass
    empty = RecordedRun(tmp_path / "empty")
    assert written(empty, "openmetrics") == b"# EOF\n"
    assert json.loads(written(empty, "perfetto"))["traceEvents"] == []
    assert written(empty, "html").endswith(b"</html>\n")


def test_buckets_of_lengths():
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100) and one_two_five(30)[-1] == 20


# The report


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.scripts, self._figure = [], [], False

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self._figure = tag == "script" and dict(attributes).get("class") == "figure"

    def handle_data(self, data):
        if self._figure:
            self.scripts.append(data)
            self._figure = False


def test_the_report_stands_alone_and_holds_its_figures(run):
    pytest.importorskip("plotly")
    tags = Tags()
    tags.feed(written(run, "html").decode())
    assert not [a for _, a in tags.found if a.get("src") or a.get("href")]
    figures = [json.loads(script) for script in tags.scripts]
    assert [len(figure["data"]) for figure in figures] == [5, 1, 2, 2, 3]


def test_the_report_has_the_run_by_name_and_what_did_not_finish(fleet):
    pytest.importorskip("plotly")
    text = written(fleet, "html").decode()
    assert "<h1>fleet</h1>" in text
    assert "75.0 % did not finish: latencies are those of the 1 of 4 requests that finished" in text
    assert "<h1>a/b</h1>" in written(RecordedRun(fleet.recording, "a/b"), "html").decode()


def test_the_report_shows_where_the_step_time_of_a_run_goes():
    pytest.importorskip("plotly")
    tags = Tags()
    tags.feed(written(RecordedRun(RUN_SAMPLE), "html").decode())
    parts, roof = (json.loads(script)["layout"]["xaxis"]["title"]["text"] for script in tags.scripts[1:3])
    assert (parts, roof) == ("time of steps (s)", "FLOP per byte")


def test_the_report_shows_the_diagnosis_where_there_is_one(tmp_path):
    pytest.importorskip("plotly")
    toy_run(tmp_path / "run", "virtual", seed=0)
    without = written(RecordedRun(tmp_path / "run"), "html").decode()
    answer = bundled_answer(sample_diagnosis().as_json())
    (tmp_path / "run" / "diagnosis.json").write_text(json.dumps(answer))
    beside = written(RecordedRun(tmp_path / "run"), "html").decode()
    verdict = answer["verdict"][1:].replace("'", "&#x27;")
    assert verdict in beside and verdict not in without and "What would help" not in without
    assert verdict in written(RecordedRun(RUN_SAMPLE), "html").decode()
    (tmp_path / "run" / "diagnosis.json").write_text("{}")
    with pytest.raises(UserError, match=r"diagnosis\.verdict: is missing"):
        written(RecordedRun(tmp_path / "run"), "html")


def test_what_a_recording_says_is_text_in_the_report(fleet):
    pytest.importorskip("plotly")
    text = written(fleet, "html").decode()
    assert "a &quot;b" not in text.split("<details>")[0] and "<b>&" not in text


# The command


def test_the_same_run_gives_the_same_bytes(run):
    for name in OF_A_RUN:
        assert written(run, name) == written(run, name), name


def test_every_format_is_written_whole_and_never_over_a_file_unasked(run, tmp_path):
    assert tuple(formats_of(run)) == OF_A_RUN
    for name in OF_A_RUN:
        target, path = tmp_path / f"out{FORMATS[name].suffix}", str(run.recording.path)
        done = CliRunner().invoke(command, [path, "--to", name, "-o", str(target)])
        assert done.exit_code == 0, done.output
        assert target.stat().st_size > 1000
        again = CliRunner().invoke(command, [path, "--to", name, "-o", str(target)])
        assert isinstance(again.exception, UserError) and again.exception.field == "output"
        assert CliRunner().invoke(command, [path, "--to", name, "-o", str(target), "--force"]).exit_code == 0
    assert not list(tmp_path.glob(".*"))


def test_a_failure_leaves_what_was_there(run, tmp_path, monkeypatch):
    target = tmp_path / "out.csv"
    target.write_text("before")
    monkeypatch.setattr(RecordedRun, "table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run, "csv", target, overwrite=True)
    assert target.read_text() == "before" and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "table", "field"),
    [
        ("xlsx", None, "format"),
        ("json", None, "format"),
        ("csv", "rows", "table"),
        ("html", "steps", "table"),
        ("perfetto", "requests", "table"),
    ],
)
def test_what_cannot_be_is_refused(run, tmp_path, name, table, field):
    with pytest.raises(UserError) as caught:
        export(run, name, tmp_path / "out", table, html=write_report)
    assert caught.value.field == field and not list(tmp_path.iterdir())


def test_steps_that_were_not_kept_are_refused(tmp_path):
    with RecordingWriter(tmp_path / "run", {"run_id": "x", "clock": "virtual"}):
        pass
    command = ["export", str(tmp_path / "run"), "--to", "csv", "--table", "steps", "-o", str(tmp_path / "x.csv")]
    with pytest.raises(UserError, match=r"table: 'steps': does not exist in .*; choose requests"):
        cli.main(command, standalone_mode=False)
    assert not (tmp_path / "x.csv").exists()


def test_a_mistake_is_one_line(tmp_path):
    for arguments in (["nowhere", "--to", "csv", "-o", "x"], ["nowhere", "--to", "pdf", "-o", "x"]):
        done = tokentwin("export", *arguments, cwd=tmp_path)
        assert done.returncode == 2 and re.fullmatch(r"tokentwin: .*\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_one_line(run, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        export(run, "csv", tmp_path / "no" / "where.csv")
