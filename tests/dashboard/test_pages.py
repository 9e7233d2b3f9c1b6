"""The dashboard's pages through Streamlit's AppTest, and its command line: what is shown, and every error path."""

import os
import shutil
import socket
import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("streamlit")

from click.testing import CliRunner
from streamlit.testing.v1 import AppTest

from tests.dashboard.pages import charts, opened, parameter, text
from tests.dashboard.samples import one_line
from tokentwin.commands.dashboard import dashboard
from tokentwin.dashboard import library
from tokentwin.serving.errors import UserError

run, step = partial(opened, "run"), partial(opened, "step")


# Run


@pytest.mark.parametrize(("name", "clock"), [("real-1", "real"), ("simulated", "simulated")])
def test_run_shows_a_recording_of_either_clock(samples, name, clock):
    app = run(samples, run=name)
    assert not app.exception and not app.error
    assert f"badge[{clock}]" in text(app)
    assert "160 finished, 1 rejected" in text(app)
    assert [m.label for m in app.metric[:2]] == ["TTFT p50 (ms)", "TTFT p99 (ms)"]
    assert "Lower is better." in app.metric[0].proto.help
    timeline, waterfall, *cards = charts(app)
    assert len(timeline["data"]) == 5 and len(cards) == 4
    assert {trace["y"][0] for trace in waterfall["data"]} >= {"queue", "prefill", "decode"}
    assert parameter(app, "run") == name


def test_the_url_chooses_the_request_the_order_and_the_window(samples):
    app = run(samples, run="real-1", by="preempted_ms", request="95", window="2-4")
    assert not app.exception
    assert app.slider[0].value == (2.0, 4.0)
    assert "**Request 95**" in text(app) and "preempted once" in text(app)
    assert any(trace["y"][0] == "preempted" for trace in charts(app)[1]["data"])
    assert [parameter(app, name) for name in ("by", "request", "window")] == ["preempted_ms", "95", "2-4"]


@pytest.mark.parametrize("window", ["", "x-y", "4-2", "-1e9-1e9", "nan-nan", "5"])
def test_a_nonsense_window_is_the_whole_run(samples, window):
    app = run(samples, run="real-1", window=window)
    assert not app.exception
    assert app.slider[0].value == (app.slider[0].min, app.slider[0].max)


def test_choosing_another_recording_changes_the_url(samples):
    app = run(samples, run="real-1")
    app.selectbox[0].set_value("simulated").run()
    assert not app.exception
    assert parameter(app, "run") == "simulated"
    assert "badge[simulated]" in text(app)


def test_a_run_is_called_by_where_it_lies(tmp_path, samples):
    for name in ("exp/run_[1]*", "exp/two"):
        shutil.copytree(samples / "real-1", tmp_path / name)
    titles = {run(tmp_path, run=name).title[0].value.replace("\\", "") for name in ("exp/run_[1]*", "exp/two")}
    assert titles == {"exp/run_[1]*", "exp/two"}


def test_an_old_run_of_a_link_is_opened_however_many_there_are(tmp_path, samples, monkeypatch):
    for name in ("old", "new"):
        shutil.copytree(samples / "real-1", tmp_path / name)
    os.utime(tmp_path / "old" / "requests.parquet", (1, 1))
    monkeypatch.setattr(library, "MOST", 1)
    app = run(tmp_path, run="old")
    assert app.title[0].value == "old" and not app.info
    assert run(tmp_path).title[0].value == "new"


def test_without_recordings_the_page_says_what_makes_one(tmp_path):
    app = run(tmp_path)
    assert not app.exception
    assert "no recording" in app.info[0].value and "**bundled**" in app.info[0].value
    assert "`tokentwin demo`" in text(app) and not app.code  # the highlighter would come before the first figure
    assert len(charts(app)) == 6


@pytest.mark.parametrize("file", ["requests.parquet", "steps.parquet", "runs.parquet"])
def test_a_damaged_recording_is_one_line(tmp_path, samples, file):
    (tmp_path / "broken").mkdir()
    for path in (samples / "real-1").iterdir():
        (tmp_path / "broken" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "broken" / file).write_bytes(b"PAR1 but not really")
    message = one_line(run(tmp_path))
    assert f"'broken/{file}'" in message and str(tmp_path) not in message
    (tmp_path / "broken" / "steps.parquet").unlink()
    if file == "requests.parquet":
        (tmp_path / "broken" / file).write_bytes((samples / "real-1" / file).read_bytes())
        assert "'broken': is damaged: steps.parquet is missing" in one_line(run(tmp_path))


# The app and the command


@pytest.mark.parametrize(("kept", "title"), [("", "GPUs"), ("real-1", "real-1"), ("*", "Can you trust the numbers?")])
def test_the_app_opens_on_what_there_is(samples, monkeypatch, tmp_path, kept, title):
    """On a plan, or without one on a validation or a recording of the user's own."""
    from pathlib import Path

    import tokentwin.dashboard

    for path in samples.glob(kept) if kept else ():
        shutil.copytree(path, tmp_path / path.name)
    monkeypatch.setattr(sys, "argv", ["app.py", str(tmp_path)])
    app = AppTest.from_file(str(Path(tokentwin.dashboard.__file__).parent / "app.py"), default_timeout=300).run()
    assert not app.exception
    assert title in app.title[0].value


def test_the_command_refuses_what_cannot_work(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, field in (
            ([str(tmp_path / "nowhere")], "RUNS_DIR"),
            (["--port", port], "port"),
            (["--host", "no.such.host.invalid"], "host"),
        ):
            result = CliRunner().invoke(dashboard, arguments)
            assert isinstance(result.exception, UserError) and result.exception.field == field


def test_help_does_not_import_streamlit():
    code = (
        "import sys; from tokentwin.cli import cli\n"
        "try: cli.main(['dashboard', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'streamlit' not in sys.modules and 'plotly' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1" in done.stdout


# The Step page


def test_a_step_is_explained_by_its_parts():
    app = step(model="Llama-3.1-70B", gpu="H200", tp="4", rows="32", prompts="1")
    assert not app.exception and not app.error
    assert app.header[0].value.endswith(" ms")
    assert any("-badge[" in m.value for m in app.markdown)
    table, life = app.dataframe
    assert {"qkv", "decode attention", "prefill attention", "all-reduce"} <= set(table.value["operation"])
    assert {"token ids", "embeddings", "logits", "sampled ids"} <= set(life.value["stage"])
    bars, roof = charts(app)
    assert "prompt attention" in bars["data"][0]["y"]
    assert {trace["name"] for trace in roof["data"]} >= {"16-bit roof", "bound by memory"}


def test_an_empty_step_and_a_split_that_cannot_be_say_so():
    empty = step(rows="0")
    assert not empty.exception and "step is empty" in empty.info[0].value
    assert step(rows="-3", context="junk").query_params.get("rows") in (None, [])


def test_an_unmeasured_gpu_is_marked_extrapolated():
    app = step(gpu="A10G")
    assert not app.exception
    assert any("extrapolated" in m.value for m in app.markdown)
