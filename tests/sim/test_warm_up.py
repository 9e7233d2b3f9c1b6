"""Requests of the warm-up are served as usual, and have no row."""

import json

import pytest

from tests.command import tokentwin
from tests.sim.test_queueing import ONE_SLOT, PER_TOKEN
from tests.traces.test_readers import SIMPLE
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.formats.trace_file import read_workload
from tokentwin.traces.recording import Recording
from tokentwin.traces.reshape import reshaped

S = 10**9


def rows(workload: Workload) -> list[dict]:
    sink = TableSink()
    deployment = Deployment(scheduler=SchedulerConfig(**ONE_SLOT))
    Cluster(deployment, PER_TOKEN, sink, shares_prefixes=False, steps=False).run(workload)
    return sink.requests.to_pylist()


@pytest.fixture
def workload(tmp_path) -> Workload:
    lines = [f"{second / 10},{5000 + second},2" for second in range(40)]
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines))
    return read_workload(tmp_path / "t.csv")


def test_counted_requests_are_served_as_without_a_warm_up(workload: Workload) -> None:
    late = [row for row in rows(workload) if row["arrival_ns"] >= S]
    assert 0 < len(late) < 40
    assert rows(reshaped(workload, warm_up_s=1.0)) == late


def test_the_warm_up_counts_after_the_rate_was_scaled(workload: Workload) -> None:
    scaled = reshaped(workload, rate_scale=2.0, warm_up_s=1.0)
    assert [row["request_id"] for row in rows(scaled)] == list(range(20, 40))


def test_a_trace_keeps_its_warm_up(workload: Workload, tmp_path) -> None:
    write_parquet(reshaped(workload, warm_up_s=1.5), tmp_path / "w.parquet")
    assert read_workload(tmp_path / "w.parquet").warm_up_ns == 15 * S // 10
    write_parquet(workload, tmp_path / "plain.parquet")
    assert read_workload(tmp_path / "plain.parquet").warm_up_ns == 0


def test_a_warm_up_that_leaves_nothing_is_refused(workload: Workload) -> None:
    with pytest.raises(UserError, match=r"warm-up: 5.0: ends after the last arrival; shorten it"):
        reshaped(workload, warm_up_s=5.0)


def test_simulate_and_compare_take_one(tmp_path) -> None:
    trace, out = tmp_path / "t.csv", tmp_path / "run"
    trace.write_text(SIMPLE)
    warm = ("--gpu", "H100", "--warm-up", 0.3)
    done = tokentwin("simulate", trace, "-o", out, "--no-band", *warm)
    assert done.returncode == 0, done.stderr
    assert Recording.load(out).requests.num_rows == 1
    assert "have other times" not in tokentwin("diagnose", out, "--gpu", "H100").stdout
    done = tokentwin("compare", "--trace", trace, *warm, "--b", "max_num_seqs=1", "--format", "json")
    assert done.returncode == 3 and json.loads(done.stdout)["requests"] == 1
    (tmp_path / "s.yaml").write_text("requests: 9\narrivals: {kind: closed, concurrency: 2}\nprompt: 9\noutput: 2\n")
    done = tokentwin("compare", "--trace", tmp_path / "s.yaml", *warm, "--b", "max_num_seqs=1")
    assert done.returncode == 2 and "warm-up: 0.3: needs the same arrivals in A and B" in done.stderr
