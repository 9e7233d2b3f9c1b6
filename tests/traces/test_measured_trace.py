"""Reports of load generators as traces, by their content: what was sent, and when."""

import json
import logging
from pathlib import Path

import pytest

from tests.traces.test_measured_readers import aiperf_phases, aiperf_row, bench, guidellm_benchmark
from tokentwin.serving.errors import UserError
from tokentwin.traces.formats.trace_file import read_workload


def written(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_bench_serve_with_details(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = written(tmp_path / "any name", bench())
    with caplog.at_level(logging.WARNING, "tokentwin"):
        workload = read_workload(report)
    assert [(r.arrival_ns, r.prompt_len, r.output_len) for r in workload.requests] == [(0, 20, 2), (500_000_000, 10, 4)]
    assert caplog.messages == ["any name: 1 requests failed and are left out"]


def test_bench_serve_without_details_is_refused_with_the_option_to_add(tmp_path: Path) -> None:
    report = written(tmp_path / "b.json", {key: value for key, value in bench().items() if not key.endswith("_lens")})
    with pytest.raises(UserError, match=r"b.json.*has no lengths of requests; run .* --save-detailed"):
        read_workload(report)


def test_guidellm_with_several_runs_asks_for_one(tmp_path: Path) -> None:
    one, two = guidellm_benchmark(type_="concurrent", streams=2), guidellm_benchmark(type_="poisson", rate=4.0)
    report = written(tmp_path / "benchmarks.json", {"benchmarks": [one, two]})
    with pytest.raises(UserError, match=r"holds 2 runs; give one of them: benchmarks.json#0, benchmarks.json#1"):
        read_workload(report)
    assert read_workload(f"{report}#0").concurrency == 2
    assert [request.arrival_ns for request in read_workload(f"{report}#1").requests] == [0, 250_000_000]
    with pytest.raises(UserError, match=r"#2': must be one of benchmarks.json#0"):
        read_workload(f"{report}#2")
    alone = written(tmp_path / "one.json", {"benchmarks": [two]})
    assert len(list(read_workload(alone).requests)) == 2


def test_a_run_of_a_trace_that_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    with pytest.raises(UserError, match=r"t.csv#1': is no report of several runs; give .*t.csv$"):
        read_workload(tmp_path / "t.csv#1")


def test_aiperf_by_its_folder_or_its_file(tmp_path: Path) -> None:
    rows = [aiperf_row(100, 20.5, 40.5), aiperf_row(350, 40.5, 50.5)]
    export = tmp_path / "profile_export.jsonl"
    export.write_text("".join(json.dumps(row) + "\n" for row in rows))
    phases = {"input_config": {"phases": aiperf_phases(type="poisson", rate=4.0)}}
    written(tmp_path / "profile_export_aiperf.json", phases)
    for path in (tmp_path, export):
        assert [request.arrival_ns for request in read_workload(path).requests] == [0, 250_000_000]
    other = export.rename(tmp_path / "monday.jsonl")
    with pytest.raises(UserError, match=r"call it profile_export.jsonl again"):
        read_workload(other)
