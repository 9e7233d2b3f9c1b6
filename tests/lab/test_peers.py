"""The inputs that `lab/benchmarks/peers/` gives other simulators, as far as they can be checked without these."""

import sys

import pytest

from lab.benchmarks.peers.simulators import Blis, PeerFailed, blis_row, inference_lab_config, timed
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.workload import WorkloadRequest

LIMITS = SchedulerConfig(num_blocks=100)


def test_inference_lab_draws_requests_of_the_rate_and_the_shape_of_the_trace():
    lengths = [(100, 10), (1000, 10), (10_000, 10)]
    requests = [WorkloadRequest(i, i * 500_000_000, (("", n),), m) for i, (n, m) in enumerate(lengths)]
    workload = inference_lab_config(requests, LIMITS)["workload"]
    assert workload["arrival_rate"] == 2.0
    assert workload["num_requests"] == 3
    assert workload["input_len_dist"]["mean"] == pytest.approx(6.9078, abs=1e-4)  # ln 1000
    assert workload["input_len_dist"]["std_dev"] == pytest.approx(1.8800, abs=1e-4)  # ln 10 * sqrt(2 / 3)
    assert workload["output_len_dist"]["std_dev"] == pytest.approx(0.0, abs=1e-12)


def test_all_are_given_the_same_kv_memory():
    requests = [WorkloadRequest(i, i * 10**9, (("", 5),), 5) for i in range(2)]
    hardware = inference_lab_config(requests, LIMITS)["hardware"]
    assert hardware["kv_cache_capacity"] == 100 * 16 * 131_072  # tokens, and bytes of KV for each of Llama 3 8B


def test_a_request_of_blis_has_its_arrival_and_lengths_in_their_columns():
    row = dict(zip(Blis.COLUMNS, blis_row(WorkloadRequest(7, 1_500_000, (("", 40),), 9)), strict=True))
    assert (row["request_id"], row["input_tokens"], row["output_tokens"]) == (7, 40, 9)
    assert row["arrival_time_us"] == row["send_time_us"] == 1500
    assert row["status"] == "ok"


def test_cpu_time_is_that_of_the_child_alone():
    began = "import time; e = time.process_time() + {}\nwhile time.process_time() < e: pass\nprint('done')"
    out, long_s = timed([sys.executable, "-S", "-c", began.format(0.3)])
    _, short_s = timed([sys.executable, "-S", "-c", began.format(0.0)])
    assert out == "done\n"
    assert long_s - short_s > 0.2


def test_a_peer_that_fails_says_why():
    with pytest.raises(PeerFailed, match="ended with 3: no such model"):
        timed([sys.executable, "-c", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"])
