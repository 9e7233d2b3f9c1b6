"""`tokentwin trace`, as it is called."""

import json
import re
from contextlib import redirect_stderr
from io import StringIO

import pytest

from tests.command import tokentwin
from tokentwin.planning.progress import LOG, telling
from tokentwin.traces.formats.trace_file import read_workload

SYNTH = ("--requests", "500", "--arrivals", "gamma:rate=9,cv=3", "--prompt", "lognormal:mean=600,p99=4000",
         "--output", "exponential:mean=40,max=300", "--system-prompts", "count=3,tokens=1024,choice=zipf")  # fmt: skip


def test_synth_inspect_convert(tmp_path):
    made = tokentwin("trace", "synth", "a.parquet", *SYNTH, "--format", "json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    summary = json.loads(made.stdout)
    assert summary["requests"] == 500
    assert tokentwin("trace", "synth", "b.parquet", *SYNTH, cwd=tmp_path).returncode == 0
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert tokentwin("trace", "convert", "a.parquet", "c.jsonl", cwd=tmp_path).returncode == 0
    shown = tokentwin("trace", "inspect", "c.jsonl", "--block-size", 512, "--format", "json", cwd=tmp_path)
    converted = json.loads(shown.stdout)
    for field in ("prompt_tokens", "output_tokens", "prompt", "output", "prefix_hit_tokens"):
        assert converted[field] == summary[field]
    table = tokentwin("trace", "inspect", "c.jsonl", cwd=tmp_path)
    assert "prefix hits, infinite cache" in table.stdout and "lengths" in table.stdout


def test_a_yaml_spec_and_options_over_it(tmp_path):
    (tmp_path / "spec.yaml").write_text(
        "requests: 50\nseed: 3\narrivals: {kind: closed, concurrency: 8}\n"
        "prompt: 64\noutput: {kind: uniform, low: 1, high: 9}\n"
    )
    done = tokentwin("trace", "synth", "a.parquet", "--spec", "spec.yaml", "--prompt", 32, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    workload = read_workload(tmp_path / "a.parquet")
    assert workload.concurrency == 8
    assert {request.prompt_len for request in workload.requests} == {32}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("inspect", "nothing"), "trace: 'nothing': cannot be read: No such file or directory"),
        (("inspect", "junk"), "trace: 'junk': has no known format"),
        (("convert", "good", "good"), "output: 'good'|give --to"),
        (("convert", "good", "kept.parquet"), "kept.parquet': exists; use --force"),
        (("synth", "new.parquet", "--prompt", "normal", *SYNTH[:4], "--output", 3), "spec.prompt"),
        (("synth", "new.parquet", "--sessions", "turns", *SYNTH), "--sessions: 'turns': 'turns' must be key=value"),
        (("synth", "new.parquet", *SYNTH[:2], "--arrivals", "poisson:rate=1,rate=2"), "gives rate twice"),
        (("synth", "new.parquet", "--spec", "junk"), "spec: 'junk': must be a mapping"),
        (("convert", "talk", "new.parquet"), "trace: 'talk': states no arrival times; tokentwin trace convert --arriv"),
        (("convert", "talk", "new.parquet", "--arrivals", "closed:concurrency=3"), "convert.arrivals"),
        (("convert", "good", "new.parquet", "--seed", 1), "has the format simple CSV, which needs no seed; leave it"),
        (("convert", "talk", "new.parquet", "--tokenizer", "none"), "tokenizer.json cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, arguments, message):
    (tmp_path / "junk").write_text("what is this")
    (tmp_path / "talk").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}]}'
    )
    (tmp_path / "good").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    (tmp_path / "kept.parquet").write_text("kept")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = tokentwin("trace", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert any(part in done.stderr for part in message.split("|"))
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_long_work_says_how_far_it_is_where_there_is_no_bar(tmp_path, monkeypatch, caplog):
    rows = [f"{at},5,5\n" for at in range(20_000)]
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(rows))
    assert tokentwin("trace", "inspect", "t.csv", cwd=tmp_path).stderr == ""
    monkeypatch.setattr("tokentwin.cli._EVERY_S", 0)
    monkeypatch.setattr("tokentwin.traces.formats.text_columns._BLOCK_BYTES", 90_000)
    said = tokentwin("trace", "inspect", "t.csv", cwd=tmp_path).stderr
    assert re.fullmatch(r"(tokentwin: reading t.csv: \d+,\d{3} lines so far\n){2}", said)
    monkeypatch.setattr(LOG, "propagate", True)
    with caplog.at_level("INFO"), redirect_stderr(StringIO()), telling() as tell:
        tell("searching", 0.25)
    assert caplog.messages[-1] == "searching: 25 % done"


def test_conversations_are_given_arrivals_and_inspect_says_that_turns_wait(tmp_path):
    said = [{"from": who, "value": "what to say " * 9} for who in ("human", "gpt") * 3]
    (tmp_path / "c.json").write_text(json.dumps([{"conversations": said}] * 20))
    options = ("--arrivals", "poisson:rate=2", "--think-ms", "uniform:low=1000,high=3000", "--seed", 4)
    for out in ("a.parquet", "b.parquet"):
        done = tokentwin("trace", "convert", "c.json", out, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert "four characters count as a token" in done.stderr
    shown = tokentwin("trace", "inspect", "a.parquet", cwd=tmp_path).stdout
    assert "sessions arrive, 40 turns wait for answers" in shown and "20, 3 turns on average" in shown
    summary = json.loads(tokentwin("trace", "inspect", "a.parquet", "--format", "json", cwd=tmp_path).stdout)
    assert (summary["sessions"], summary["waiting"]) == (20, 40) and 1 < summary["think_s"] < 3


def test_inspect_calls_users_a_closed_loop(tmp_path):
    options = ("--duration-s", 60, "--arrivals", "users:users=7", "--prompt", 100, "--output", 10)
    made = tokentwin("trace", "synth", "u.parquet", *options, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "closed, 7 users for 60 s" in made.stdout and "span if answers took no time" in made.stdout
    assert "open" not in made.stdout
