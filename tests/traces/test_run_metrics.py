"""Metrics of a recording: examples by hand, identities, queueing theory, and naive recounts."""

import math
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import METRICS, parse_slo
from tokentwin.traces.metrics.run_metrics import DISTRIBUTIONS, SERVED_METRICS, RunMetrics
from tokentwin.traces.metrics.saturation import Trend
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.schema import arrow_schema
from tokentwin.traces.tables import Distribution

MS = 1_000_000
S = 1_000 * MS


def requests_table(rows):
    """Return rows of `requests`; columns that a row leaves out have usual values."""
    usual = {
        "status": "finished",
        "prompt_tokens": 10,
        "prefix_hit_tokens": 0,
        "preemptions": 0,
        "preempted_ns": 0,
        "recomputed_tokens": 0,
    }
    full = [{"request_id": i, **usual, "send_ns": row.get("arrival_ns"), **row} for i, row in enumerate(rows)]
    return pa.Table.from_pylist(full, schema=arrow_schema("requests"))


def steps_table(rows):
    return pa.Table.from_pylist(rows, schema=arrow_schema("steps"))


def finished(arrival, scheduled, first, finish, tokens, **more):
    """Return a finished request, given its times in milliseconds."""
    times = {"arrival_ns": arrival, "scheduled_ns": scheduled, "first_token_ns": first, "finish_ns": finish}
    return {**{name: ms * MS for name, ms in times.items()}, "output_tokens": tokens, **more}


ONE = finished(100, 150, 350, 1250, 10, send_ns=107 * MS, preempted_ns=200 * MS, preemptions=1, transfer_ns=40 * MS)


def test_one_request_by_hand():
    m = RunMetrics(requests_table([ONE]))
    names = [name for name in DISTRIBUTIONS if name.endswith("_ms") or name == "tok_s_user"]
    values = {name: m.distribution(name).p50 for name in names if name not in SERVED_METRICS}
    assert values.pop("itl_ms") != 0
    assert math.isnan(values.pop("step_ms"))
    assert values == {
        "ttft_ms": 250,
        "tpot_ms": 100,
        "tpot_inclusive_ms": 115,
        "e2e_ms": 1150,
        "queue_ms": 50,
        "prefill_ms": 200,
        "decode_ms": 900,
        "preempted_ms": 200,
        "transfer_ms": 40,
        "send_delay_ms": 7,
        "tok_s_user": 10,
    }
    scalars = m.scalars()
    assert scalars["output_throughput"] == pytest.approx(10 / 1.15)
    assert scalars["input_throughput"] == pytest.approx(10 / 1.15)
    assert scalars["total_throughput"] == pytest.approx(20 / 1.15)
    assert scalars["concurrency"] == 1.0
    assert scalars["preemptions"] == 1
    assert scalars["saturation"] is None


def test_what_an_api_server_and_a_client_add_by_hand():
    times = {"received_ns": 97, "last_text_ns": 1252, "last_sent_ns": 1256, "client_ns": 11}
    served = finished(100, 150, 350, 1250, 10, **{name: ms * MS for name, ms in times.items()})
    m = RunMetrics(requests_table([served, finished(0, 1, 5, 5, 1)]))
    assert {name: m.distribution(name).max for name in SERVED_METRICS} == {
        "tokenise_ms": 3,
        "detokenise_ms": 2,
        "stream_ms": 4,
        "client_ms": 11,
    }
    assert all(m.distribution(name).count == 1 for name in SERVED_METRICS)


def test_a_clients_recording_says_nothing_of_waiting_or_preemptions():
    rows = [finished(at, at, at + 40, at + 50, 10, preemptions=None) for at in range(0, 1000, 10)]
    m = RunMetrics(requests_table([{**row, "scheduled_ns": None} for row in rows]))
    assert m.saturation.verdict == "STABLE"
    assert m.scalars()["preemptions"] is None


def test_a_single_token_has_no_tpot():
    m = RunMetrics(requests_table([finished(0, 1, 5, 5, 1)]))
    assert m.distribution("tpot_ms").count == 0
    assert m.distribution("tpot_inclusive_ms").p50 == 5
    assert math.isnan(m.distribution("tpot_ms").p99)


def test_itl_is_pooled_and_never_spans_two_requests():
    table = requests_table(
        [
            finished(0, 0, 10, 30, 3, token_times_ns=[10 * MS, 14 * MS, 30 * MS]),
            finished(0, 0, 90, 90, 1, token_times_ns=[90 * MS]),
            {"arrival_ns": 0, "status": "rejected"},
            finished(0, 0, 7, 7, 0, token_times_ns=[]),
            {"arrival_ns": 0, "status": "unfinished", "token_times_ns": [0, 99 * MS]},
            finished(0, 0, 50, 51, 2, token_times_ns=[50 * MS, 51 * MS]),
        ]
    )
    assert RunMetrics(table).values("itl_ms").tolist() == [4, 16, 1]
    pieces = pa.concat_tables([table.slice(0, 2), table.slice(2, 3), table.slice(5)])
    assert RunMetrics(pieces).values("itl_ms").tolist() == [4, 16, 1]


def test_goodput_keeps_what_failed_in_the_denominator():
    rows = [
        finished(0, 0, 100, 1000, 10),
        finished(0, 0, 300, 1000, 10),
        finished(0, 0, 100, 100, 1),
        {"arrival_ns": 0, "status": "rejected", "output_tokens": 0},
        {"arrival_ns": 0, "status": "aborted", "output_tokens": 3},
    ]
    m = RunMetrics(requests_table(rows), slo=parse_slo("ttft:200 tpot:100"))
    assert m.meets_slo().tolist() == [True, False, True, False, False]
    assert m.scalars()["slo_attainment"] == 0.4
    assert m.scalars()["request_goodput"] == pytest.approx(2.0)
    assert m.statuses() == {"finished": 3, "rejected": 1, "aborted": 1}


def test_without_slos_there_is_no_goodput():
    scalars = RunMetrics(requests_table([ONE])).scalars()
    assert scalars["slo_attainment"] is None and scalars["request_goodput"] is None


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:fast", "ttft:-1", "ttft:0", "ttft:inf", "ttft:nan", "speed:3", "", "ttft:1 ttft:2"]
)
def test_a_bad_slo_is_one_line(text):
    with pytest.raises(UserError, match="slo"):
        parse_slo(text)


def test_slos_are_written_as_in_vllm():
    assert parse_slo("ttft:200 tpot:50,e2el:3000") == {"ttft_ms": 200, "tpot_ms": 50, "e2e_ms": 3000}


def test_memory_weighs_each_step_by_its_duration():
    steps = steps_table(
        [
            {
                "start_ns": 0,
                "end_ns": 30,
                "used_blocks": 50,
                "waiting_blocks": 100,
                "prefill_tokens": 8,
                "decode_rows": 2,
            },
            {
                "start_ns": 30,
                "end_ns": 40,
                "used_blocks": 90,
                "waiting_blocks": 0,
                "prefill_tokens": 0,
                "decode_rows": 3,
            },
        ]
    )
    m = RunMetrics(requests_table([ONE]), steps, {"num_blocks": 100, "replicas": 1})
    assert m.scalars()["kv_usage"] == pytest.approx(0.6)
    assert m.scalars()["kv_usage_peak"] == 0.9
    assert m.scalars()["kv_pressure_peak"] == 1.5
    assert m.values("batch_tokens").tolist() == [10, 3]
    assert m.step_mean("batch_tokens") == pytest.approx(8.25)


def test_prefix_hits_count_admitted_prompts_only():
    rows = [
        finished(0, 0, 1, 2, 2, prompt_tokens=30, prefix_hit_tokens=16),
        {"arrival_ns": 0, "status": "rejected", "prompt_tokens": 999},
    ]
    assert RunMetrics(requests_table(rows)).scalars()["prefix_hit_rate"] == pytest.approx(16 / 30)


def test_an_empty_recording_has_no_numbers_and_no_errors():
    m = RunMetrics(requests_table([]), steps_table([]), {"num_blocks": 10})
    assert all(d.count == 0 for d in m.distributions().values())
    assert set(m.scalars().values()) <= {None, 0}
    nothing_finished = RunMetrics(requests_table([{"arrival_ns": 5, "status": "unfinished"}]), slo={"ttft_ms": 1})
    assert nothing_finished.scalars()["request_throughput"] is None
    assert nothing_finished.scalars()["slo_attainment"] == 0.0


def test_every_name_is_in_the_registry():
    assert set(DISTRIBUTIONS) <= set(METRICS)
    assert {n.removesuffix("_peak") for n in RunMetrics(requests_table([ONE])).scalars()} <= set(METRICS)
    with pytest.raises(UserError, match="is not a known"):
        RunMetrics(requests_table([ONE])).values("speed")
    with pytest.raises(UserError, match="is not a known"):
        RunMetrics(requests_table([ONE])).values("busy")


# Identities and queueing theory


def synthetic(count, rate=50.0, servers=None, service_s=0.1, seed=0):
    """Return a G/D/c queue (infinite servers if no limit is given) as the table of `requests`."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(S / rate, count)).astype(np.int64)
    service = np.full(count, int(service_s * S))
    starts = arrivals.copy()
    if servers:
        free = [0] * servers
        for i, arrival in enumerate(arrivals):
            k = free.index(min(free))
            starts[i] = max(arrival, free[k])
            free[k] = starts[i] + service[i]
    first = starts + service // 4
    columns = {
        "status": ["finished"] * count,
        "prompt_tokens": np.full(count, 100),
        "output_tokens": rng.integers(1, 50, count),
        "arrival_ns": arrivals,
        "send_ns": arrivals,
        "scheduled_ns": starts,
        "first_token_ns": first,
        "finish_ns": starts + service,
        "prefix_hit_tokens": np.zeros(count, np.int64),
        "preemptions": np.zeros(count, np.int64),
        "preempted_ns": np.zeros(count, np.int64),
        "transfer_ns": np.zeros(count, np.int64),
        "recomputed_tokens": np.zeros(count, np.int64),
    }
    return pa.table(columns)


def waiting_steps(table, every_s=0.05):
    """Return steps of a fixed length whose `waiting` follows from the requests table."""
    arrivals, starts = np.sort(table["arrival_ns"].to_numpy()), np.sort(table["scheduled_ns"].to_numpy())
    times = np.arange(0, table["finish_ns"].to_numpy().max(), int(every_s * S))
    waiting = np.searchsorted(arrivals, times, "right") - np.searchsorted(starts, times, "right")
    columns = {"start_ns": times, "end_ns": times + int(every_s * S), "waiting": waiting}
    for name in ("prefill_tokens", "decode_rows", "running", "used_blocks", "waiting_blocks"):
        columns[name] = np.zeros(len(times), np.int64)
    return pa.table(columns)


def test_queue_prefill_and_decode_are_the_whole():
    m = RunMetrics(synthetic(500, servers=4))
    parts = m.values("queue_ms") + m.values("prefill_ms") + m.values("decode_ms")
    np.testing.assert_allclose(parts, m.values("e2e_ms"), rtol=0, atol=1e-6)
    np.testing.assert_allclose(m.values("queue_ms") + m.values("prefill_ms"), m.values("ttft_ms"), atol=1e-6)


def test_littles_law():
    m = RunMetrics(synthetic(20_000, rate=50, service_s=0.1))
    s = m.scalars()
    assert s["concurrency"] == pytest.approx(s["request_throughput"] * m.distribution("e2e_ms").mean / 1e3, rel=1e-9)
    assert s["concurrency"] == pytest.approx(50 * 0.1, rel=0.05)


@given(slope=st.floats(-9, 9), error=st.floats(0, 3), freedom=st.floats(2, 14))
def test_a_trend_rises_where_its_interval_lies_above_zero(slope: float, error: float, freedom: float) -> None:
    trend = Trend(slope, error, freedom)
    assert trend.rises == (slope - trend.half > 0)


@pytest.mark.parametrize(
    ("rate", "servers", "verdict"), [(30, 10, "STABLE"), (97, 10, "BACKLOGGED"), (150, 10, "OVERLOADED")]
)
def test_saturation_of_a_queue_with_known_capacity(rate, servers, verdict):
    """Ten servers of 0.1 s serve 100 requests a second."""
    table = synthetic(6000, rate=rate, servers=servers)
    saturation = RunMetrics(table, waiting_steps(table)).saturation
    assert saturation.verdict == verdict
    assert saturation.trend.half >= 0
    assert saturation.arrival_rate == pytest.approx(rate, rel=0.05)
    if verdict == "OVERLOADED":
        assert saturation.trend.slope == pytest.approx(rate - 100, rel=0.15)


@pytest.mark.parametrize("service_s", [3, 10])
def test_a_backlog_that_merely_wanders_is_not_called_growing(service_s):
    """Requests that stay so long make the backlog of one bin like that of the next: a line rises easily."""
    verdicts = {
        RunMetrics(synthetic(3600, rate=20, service_s=service_s, seed=seed)).saturation.verdict for seed in range(60)
    }
    assert verdicts == {"STABLE"}


# Naive recounts

times = st.integers(0, 40)
rows = st.lists(
    st.tuples(times, times, times, times, st.integers(1, 4), st.sampled_from(["finished", "rejected", "unfinished"])),
    min_size=1,
    max_size=30,
)


@given(rows)
def test_concurrency_equals_a_naive_recount(rows):
    table = requests_table(
        [
            finished(a, a + q, a + q + p, a + q + p + d, n)
            if status == "finished"
            else {"arrival_ns": a * MS, "status": status}
            for a, q, p, d, n, status in rows
        ]
    )
    mean, peak = RunMetrics(table).concurrency()
    done = [(a, a + q + p + d) for a, q, p, d, _, status in rows if status == "finished"]
    if not done:
        assert (mean, peak) == (None, None)
        return
    first, last = min(a for a, *_ in rows), max(end for _, end in done)
    spans = done + [(a, max(a, last)) for a, *_, status in rows if status == "unfinished"]
    counts = [sum(a <= tick < end for a, end in spans) for tick in range(first, max(last, 81) + 1)]
    assert peak == max(counts)
    if last > first:
        assert mean == pytest.approx(sum(end - a for a, end in spans) / (last - first))


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=300))
def test_percentiles_are_nearest_rank(values):
    distribution = Distribution.from_values(np.array(values, dtype=float))
    ordered = sorted(values)
    for q in (50, 90, 95, 99):
        at = getattr(distribution, f"p{q}")
        assert at == ordered[math.ceil(q * len(values) / 100) - 1]
        assert sum(v <= at for v in values) * 100 >= q * len(values)
    assert (distribution.min, distribution.max, distribution.count) == (ordered[0], ordered[-1], len(values))
    assert distribution.std == pytest.approx(np.std(values))


def test_many_requests_take_no_more_calls_than_few():
    """Whole columns at a time: a million requests take seconds, not minutes, as nothing is called for each of them."""

    def calls(count):
        table, counted = synthetic(count, rate=5000), 0

        def one_more(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(one_more)
        try:
            m = RunMetrics(table, slo={"ttft_ms": 200, "tpot_ms": 50})
            m.scalars(), m.distributions()
        finally:
            sys.setprofile(None)
        return counted

    few, many = calls(2_000), calls(40_000)
    assert many < 1.2 * few, f"{few} calls for 2,000 requests, {many} for 40,000"


@given(st.integers(0, 2**32), st.integers(1, 300_000))
def test_the_spread_is_numpys_to_the_bit(seed: int, count: int) -> None:
    values = np.random.default_rng(seed).lognormal(1, 2, count)
    ordered, distribution = np.sort(values), Distribution.from_values(values)
    assert (distribution.mean, distribution.std) == (values.mean(), values.std())
    assert distribution.p90 == ordered[-(-9 * count // 10) - 1]
    assert Distribution.from_values(values.copy(), spent=True) == distribution


def test_of_a_long_recording_a_few_numbers_are_in_memory(tmp_path) -> None:
    """Metrics of what is read piece by piece are those of the tables, to the bit; 8 bytes of a token are held."""
    rng, requests, steps, tokens = np.random.default_rng(0), 20_000, 300_000, 50
    ends = np.cumsum(rng.integers(1, 9 * MS, steps))
    times = np.sort(rng.integers(0, ends[-1], (requests, tokens)))
    with RecordingWriter(tmp_path / "run", {"clock": "virtual", "num_blocks": 900}) as writer:
        names = ("running", "waiting", "used_blocks", "prefill_tokens", "decode_rows", "waiting_blocks")
        counts = {name: rng.integers(0, 900, steps) for name in names}
        writer.add_steps({"start_ns": ends - MS // 2, "end_ns": ends, **counts})
        writer.add_requests(
            {
                "status": np.where(rng.random(requests) < 0.9, "finished", "unfinished"),
                **dict.fromkeys(("arrival_ns", "send_ns", "scheduled_ns", "first_token_ns"), times[:, 0]),
                **dict.fromkeys(("finish_ns", "end_ns"), times[:, -1]),
                **{name: np.full(requests, tokens) for name in ("prompt_tokens", "output_tokens")},
                "token_times_ns": pa.FixedSizeListArray.from_arrays(times.ravel(), tokens).cast(pa.list_(pa.int64())),
            }
        )
    recording = Recording(tmp_path / "run")
    in_memory = RunMetrics(recording.table("requests"), recording.table("steps"), recording.run)
    expected = repr(in_memory.distributions()), repr(in_memory.scalars())
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    read = RunMetrics.from_recording(recording)
    assert (repr(read.distributions()), repr(read.scalars())) == expected
    peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before
    tracemalloc.stop()
    assert peak < 20 * requests * tokens
