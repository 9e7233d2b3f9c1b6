"""The dashboard's figures and reductions, without Streamlit."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("plotly")

from tokentwin.calibration.validation.report import RunRow
from tokentwin.dashboard.palette import REAL, SIMULATED
from tokentwin.dashboard.run_page import charts as run_charts
from tokentwin.dashboard.run_page import step_series
from tokentwin.dashboard.run_page.fleet_over_time import FleetOverTime, live_replicas, outstanding
from tokentwin.dashboard.run_page.step_series import StepSeries
from tokentwin.dashboard.series import bucket_means, envelope
from tokentwin.dashboard.slos import bounds_of
from tokentwin.dashboard.trust_page import charts as trust_charts
from tokentwin.traces.tables import ecdf

MS = 1_000_000
SCALE = {"ttft_ms": 200.0, "tpot_ms": 10.0, "e2e_ms": 900.0}
METRICS = tuple(SCALE)


def latencies(seed, count=500):
    rng = np.random.default_rng(seed)
    return {name: rng.exponential(scale, count) for name, scale in SCALE.items()}


def axis_titles(figure):
    layout = figure.to_plotly_json()["layout"]
    return [
        axis["title"]["text"] for name, axis in layout.items() if "axis" in name and axis.get("title", {}).get("text")
    ]


# Reductions


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=2000))
def test_a_reduced_ecdf_lies_on_the_whole_one(values):
    x, y = ecdf(np.array(values), points=100)
    assert len(x) <= 100 and y[-1] == 100 and x[-1] == max(values)
    whole = np.sort(values)
    np.testing.assert_array_equal(x, whole[np.rint(y * len(values) / 100).astype(int) - 1])


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=3000), st.integers(1, 60))
def test_downsampling_keeps_the_highest_and_the_lowest(values, buckets):
    times, series = np.arange(len(values), dtype=float), np.array(values, dtype=float)
    x, y = envelope(times, series, buckets)
    assert len(x) <= max(2 * buckets + 1, 2) or len(values) <= 2 * buckets
    assert (y.max(), y.min()) == (series.max(), series.min())
    assert (np.diff(x) > 0).all()
    assert (y == series[x.astype(int)]).all()


def test_bucket_means_weigh_every_value_once():
    times, values = np.arange(10_000, dtype=float), np.random.default_rng(0).random(10_000)
    x, y = bucket_means(times, values, 100)
    assert len(x) == 100
    assert y.mean() == pytest.approx(values.mean(), rel=1e-3)


def test_in_a_bucket_without_values_the_last_one_holds():
    times = np.array([*range(100), 900, 901])
    x, y = bucket_means(times, np.where(times == 99, 7, 1), 10)
    assert x[0] == 0 and list(y[2:9]) == [7] * 7 and y[9] == 1


def steps(rows):
    names = ("replica", "start_ns", "end_ns", "waiting")
    return pa.table({name: [row[i] for row in rows] for i, name in enumerate(names)})


def test_replicas_are_summed_and_idle_ones_are_at_zero():
    table = steps([(0, 0, 10, 3), (1, 5, 15, 4), (0, 10, 20, 2), (0, 1000, 1010, 1)])
    times, (values,) = StepSeries(table, ["waiting"]).over_time(["waiting"])
    assert dict(zip(times, values, strict=True)) == {0: 3, 5: 7, 10: 6, 15: 2, 20: 0, 1000: 1, 1010: 0}


def value_at(rows, time):
    """Return the sum over replicas at a time: each replica's value in its latest step, or 0 while it is idle."""
    usual = float(np.median([end - start for _, start, end, _ in rows]))
    total = 0
    for replica in {row[0] for row in rows}:
        mine = sorted(row for row in rows if row[0] == replica)
        begun = [row for row in mine if row[1] <= time]
        if begun:
            _, _, end, value = begun[-1]
            later = [row[1] for row in mine if row[1] > time]
            idles = not later or later[0] - end > 10 * usual
            total += 0 if idles and time >= end else value
    return total


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=8),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_held_is_what_every_replica_holds(replicas, random):
    rows = []
    for replica, made in enumerate(replicas):
        now = 0
        for gap, length, value in made:
            now += gap
            rows.append((replica, now, now + length, value))
            now += length
    random.shuffle(rows)
    times, (values,) = StepSeries(steps(rows), ["waiting"]).over_time(["waiting"])
    assert list(times) == sorted(set(times))
    assert [value_at(rows, time) for time in times] == list(values)


@pytest.mark.parametrize("window", [None, (0.0, 0.1), (0.02, 0.09), (0.0333333335, 1.0), (0.5, 0.6)])
@pytest.mark.parametrize("replicas", [1, 7])
def test_piece_by_piece_is_what_the_whole_reduces_to(monkeypatch, window, replicas):
    rng = np.random.default_rng(replicas)
    start = np.sort(rng.integers(0, 100_000_000, 5000) // 1000 * 1000)
    table = pa.table(
        {
            "replica": np.arange(5000) % replicas,
            "start_ns": start,
            "end_ns": start + rng.integers(1, 40_000, 5000),
            "waiting": rng.integers(0, 9, 5000).astype(np.int32),
        }
    ).take(pa.array(rng.permutation(5000)))
    times, (values,) = StepSeries(table, ["waiting"]).over_time(["waiting"])
    low, high = (times[0], times[-1]) if window is None else (window[0] * 1e9, window[1] * 1e9)
    inside = (times >= low) & (times <= high)
    before = values[times < low][-1:]
    x, y = np.append([low] * len(before), times[inside]), np.append(before, values[inside])
    monkeypatch.setattr(step_series, "_PIECE", 300)
    ((reduced_x, reduced_y),) = StepSeries(table, ["waiting"]).lows_and_highs(["waiting"], window, 60)
    expected_x, expected_y = envelope(x, y, 60)
    assert reduced_x.tolist() == expected_x.tolist() and reduced_y.tolist() == expected_y.tolist()


# Trust


def test_cdfs_draw_every_repeat_orange_and_the_simulation_blue():
    figure = trust_charts.cdfs([latencies(1), latencies(2)], latencies(3), METRICS)
    colours = [trace.line.color for trace in figure.data]
    assert colours == [REAL] * 6 + [SIMULATED] * 3
    assert [trace.name for trace in figure.data if trace.showlegend] == ["real, 2 repeats", "simulated"]
    assert axis_titles(figure) == ["TTFT (ms)", "requests (%)", "TPOT (ms)", "E2E (ms)"]
    slow = {name: 20_000.0 + np.arange(50.0) for name in METRICS}
    in_seconds = trust_charts.cdfs([latencies(1)], slow, METRICS)  # one axis for both lines
    assert axis_titles(in_seconds)[0] == "TTFT (s)" and max(in_seconds.data[3].x) == pytest.approx(20.049)


def test_errors_stand_on_the_floor():
    rows = [
        RunRow(metric="ttft_ms", stat="p50", real=10, simulated=11, error_pct=10.0, floor_pct=3.0),
        RunRow(metric="ttft_ms", stat="p99", real=20, simulated=19, error_pct=-5.0, floor_pct=None),
        RunRow(metric="output_throughput", stat="value", real=1, simulated=1, error_pct=0.0, floor_pct=1.0),
        RunRow(metric="tpot_ms", stat="p50", error_pct=float("nan")),
    ]
    figure = trust_charts.errors(rows)
    assert [list(trace.y) for trace in figure.data[:2]] == [[10.0, -5.0], [0.0]]
    assert [(shape.y0, shape.y1) for shape in figure.layout.shapes] == [(-3.0, 3.0), (-1.0, 1.0)]
    assert {"TTFT", "throughput", "error (%)"} <= set(axis_titles(figure))


def test_residuals_have_a_panel_for_each_regime():
    regime = np.array(["mixed", "decode", "decode", "odd", "decode"])
    measured = np.array([10.0, 5.0, 5.0, 8.0, 0.0]) * MS
    figure = trust_charts.residuals(regime, measured, measured * 1.1)
    assert [t for t in axis_titles(figure) if "measured step" in t] == [
        "decode: measured step time (ms)",
        "mixed: measured step time (ms)",
        "odd: measured step time (ms)",
    ]
    np.testing.assert_allclose(figure.data[0].y, [10, 10])


def test_nothing_to_show_is_said():
    for figure in (
        trust_charts.cdfs([], None, METRICS),
        trust_charts.cdfs([{"ttft_ms": np.array([np.nan])}], None, METRICS),
        trust_charts.errors([]),
        trust_charts.residuals(np.array([]), np.array([]), np.array([])),
    ):
        assert figure.layout.annotations[0].text


# Run


ONE = FleetOverTime(live_replicas([], 1), 100.0)


def step_table(count=5000):
    rng = np.random.default_rng(0)
    start = np.arange(count) * 10 * MS
    return pa.table(
        {
            "replica": np.zeros(count, np.int32),
            "start_ns": start,
            "end_ns": start + 9 * MS,
            "waiting": rng.integers(0, 9, count),
            "running": rng.integers(0, 9, count),
            "used_blocks": rng.integers(0, 100, count),
            "prefill_tokens": rng.integers(0, 512, count),
            "decode_rows": rng.integers(0, 9, count),
        }
    )


def test_the_timeline_shares_one_axis_and_is_reduced():
    figure = run_charts.timeline(StepSeries.from_steps(step_table()), ONE, SIMULATED, buckets=200)
    assert len(figure.data) == 5
    assert max(len(trace.x) for trace in figure.data) <= 401
    assert figure.layout.xaxis.matches == figure.layout.xaxis3.matches == "x4"
    assert len(axis_titles(figure)) == 5
    assert max(figure.data[2].y) <= 100


def life(replica, ready_s, ended_s):
    times = {"ready_ns": ready_s, "ended_ns": ended_s}
    return {"replica": replica} | {name: at if at is None else round(at * 1e9) for name, at in times.items()}


def at_second(trace, second):
    """Return the value of a timeline's trace at that second."""
    return trace.y[np.searchsorted(trace.x, second, side="right") - 1]


@pytest.mark.parametrize("window", [None, (45.0, 95.0)])
@pytest.mark.parametrize("count", [5000, 50])
def test_an_outage_is_seen_on_the_timeline(window, count):
    """Two replicas; one ends at 50 s, the other at 60 s, a third is there from 80 s on, and requests keep coming."""
    steps = step_table(count)
    start = np.linspace(0, 100e9, count).astype(np.int64)
    replica = np.where(start > 80e9, 2, np.where(start < 50e9, np.arange(count) % 2, 0))
    there = (start < 60e9) | (start > 80e9)
    rows = {**steps.to_pydict(), "replica": replica, "start_ns": start, "end_ns": start + 100_000 * MS // count}
    rows |= {"used_blocks": np.full(count, 40), "prefill_tokens": np.full(count, 8), "decode_rows": np.full(count, 1)}
    lives = [life(0, 0, 60), life(1, 0, 50), life(2, 80, None), life(3, None, None)]
    arrivals = np.arange(0, 100e9, 1e9)
    leaves = np.sort(np.where(arrivals + 2e9 < 60e9, arrivals + 2e9, np.maximum(arrivals, 80e9) + 2e9))
    fleet = FleetOverTime(live_replicas(lives, 9), 100.0, outstanding(arrivals, leaves))
    figure = run_charts.timeline(
        StepSeries.from_steps(pa.table(rows).filter(pa.array(there))), fleet, SIMULATED, window
    )
    of = {trace.name: trace for trace in figure.data}
    for name in ("waiting", "running", "KV use", "prefill tokens", "decode tokens", "live replicas"):
        assert at_second(of[name], 70.5) == 0, name
    assert at_second(of["outstanding requests of the fleet"], 70.5) == 13
    assert [at_second(of["live replicas"], at) for at in (49, 55)] == [2, 1]
    assert at_second(of["KV use"], 55) == 40  # of the one that lives
    assert figure.layout.yaxis5.title.text.startswith("live")


def test_what_holds_is_drawn_to_the_end_of_a_window_without_steps():
    table = step_table(50).filter(pa.array([True] * 10 + [False] * 30 + [True] * 10))
    figure = run_charts.timeline(StepSeries.from_steps(table), ONE, SIMULATED, window_s=(0.2, 0.3))
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data[:2]] == [
        ("waiting", [0.2, 0.3], [0, 0]),
        ("running", [0.2, 0.3], [0, 0]),
    ]


def test_draft_tokens_are_part_of_the_batch():
    steps = step_table(50).append_column("draft_tokens", pa.array([5] * 49 + [None], pa.int32()))
    figure = run_charts.timeline(StepSeries.from_steps(steps), ONE, SIMULATED)
    stacked = [trace for trace in figure.data if trace.stackgroup]
    assert [trace.name for trace in stacked] == ["draft tokens", "decode tokens", "prefill tokens"]
    whole = np.array(steps["prefill_tokens"]) + np.array(steps["decode_rows"]) + np.array([5] * 49 + [0])
    assert [sum(column) for column in zip(*(trace.y for trace in stacked), strict=True)][:50] == whole.tolist()


def test_what_each_step_used_of_the_gpus_is_a_panel_of_its_own():
    steps = step_table(3000)
    start, shares = np.asarray(steps["start_ns"]), np.linspace(0, 1, 3000)
    used = {"MFU": (start, shares), "MBU": (start, np.where(shares > 0.5, shares, np.nan))}
    figure = run_charts.timeline(
        StepSeries.from_steps(steps), ONE, SIMULATED, (start[600] / 1e9, start[2999] / 1e9), used=used
    )
    mfu, mbu = figure.data[-2:]
    assert (mfu.name, mbu.name, figure.layout.yaxis5.title.text) == ("MFU", "MBU", "MFU, MBU<br>(%)")
    assert len(mfu.x) == len(mbu.x) == 700 and min(mfu.y) == pytest.approx(20, abs=0.1)
    assert min(mbu.y) > 50 and max(mbu.y) == 100 == max(mfu.y)
    assert len(run_charts.timeline(StepSeries.from_steps(steps), ONE, SIMULATED).data) == 5


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=40))
def test_outstanding_are_those_that_came_and_did_not_leave(stays):
    arrivals, ends = np.sort([a for a, _ in stays]), np.sort([a + length for a, length in stays])
    times, counts = outstanding(arrivals, ends)
    assert (np.diff(times) > 0).all()
    for at, count in zip(times, counts, strict=True):
        assert count == sum(a <= at < a + length for a, length in stays)


def test_a_time_window_narrows_the_timeline():
    figure = run_charts.timeline(StepSeries.from_steps(step_table()), ONE, REAL, window_s=(10.0, 11.0))
    assert list(figure.layout.xaxis4.range) == [10.0, 11.0]
    for trace in figure.data:
        assert len(trace.x) > 50
        assert min(trace.x) >= 10 and max(trace.x) <= 11


def request(**more):
    stamps = {"arrival_ns": 100, "scheduled_ns": 150, "first_token_ns": 350, "finish_ns": 1350}
    tokens = [(350 + 10 * i) * MS for i in range(101)]
    return {"request_id": 7, **{k: v * MS for k, v in stamps.items()}, "token_times_ns": tokens, **more}


def test_a_waterfall_adds_up():
    figure = run_charts.waterfall(request(), SIMULATED, preempted=[(400 * MS, 450 * MS)])
    phases = {trace.y[0]: trace for trace in figure.data}
    assert [phases[p].x[0] for p in run_charts.PHASES] == [50, 200, 1000]
    assert [phases[p].base[0] for p in run_charts.PHASES] == [0, 50, 250]
    assert (phases["preempted"].base[0], phases["preempted"].x[0]) == (300, 50)
    assert len(phases["tokens"].x) == 101
    assert axis_titles(figure) == ["time since intended arrival (ms)"]


def test_a_waterfall_of_a_request_that_never_ran_says_so():
    figure = run_charts.waterfall(request(scheduled_ns=None), SIMULATED)
    assert "never scheduled" in figure.layout.annotations[0].text
    unfinished = run_charts.waterfall(request(finish_ns=None, first_token_ns=None, token_times_ns=None), SIMULATED)
    assert [trace.y[0] for trace in unfinished.data] == ["queue"]


def test_preempted_intervals_run_to_the_next_step_of_the_request():
    table = pa.table(
        {
            "replica": [0, 0, 0, 1, 0],
            "plan_ns": [0, 10, 20, 25, 30],
            "start_ns": [1, 11, 21, 26, 31],
            "row_ids": [[7], [3], [3], [7], [3, 7]],
            "preempted_ids": [[], [7], [], [], []],
        }
    )
    assert run_charts.preempted_intervals(table, 7, 0) == [(10, 31)]
    assert run_charts.preempted_intervals(table, 3, 0) == []
    kept_nothing = table.set_column(3, "row_ids", pa.nulls(5, pa.list_(pa.int64())))
    assert run_charts.preempted_intervals(kept_nothing, 7, 0) == []


def test_small_figures_stand_empty_columns():
    none = np.empty(0)
    for figure in (
        run_charts.histogram(none, "itl_ms", REAL),
        run_charts.step_times(none, none, none, REAL),
        run_charts.memory_shares(none, none, none, REAL),
        run_charts.phases(none, none, none, REAL),
        run_charts.timeline(StepSeries.from_steps(step_table(0)), ONE, REAL),
    ):
        assert figure.layout.annotations[0].text


def test_phases_go_from_the_fastest_tenth_to_the_slowest():
    rng = np.random.default_rng(0)
    queue, prefill, decode = (rng.exponential(10, 1000) for _ in range(3))
    queue[0] = np.nan
    figure = run_charts.phases(queue, prefill, decode, REAL)
    totals = np.sum([trace.y for trace in figure.data], axis=0)
    assert len(totals) == 10 and (np.diff(totals) > 0).all()


def test_every_latency_chart_of_a_run_has_a_line_at_each_bound():
    bounds = bounds_of(("TTFT p99 < 0.5 s", "e2e_ms<=4000", "tpot_ms p99<=40", "attainment>=0.9"))
    assert bounds == {"ttft_ms": {500: "SLO p99"}, "tpot_ms": {40: "SLO p99"}, "e2e_ms": {4000: "SLO"}}

    tens = np.full(20, 10.0)
    histogram = run_charts.histogram(tens, "itl_ms", REAL, bounds)
    assert (histogram.layout.shapes[-1].x0, histogram.layout.annotations[-1].text) == (40, "TPOT SLO")
    seconds = run_charts.phases(np.full(20, 1e3), np.full(20, 1e3), np.full(20, 1e3), REAL, bounds)
    assert [shape.y0 for shape in seconds.layout.shapes] == [0.5, 4.0], "in seconds, as the bars"
    request = {"request_id": 1, "arrival_ns": 0, "scheduled_ns": 10**6, "first_token_ns": 10**7, "finish_ns": 10**8}
    assert [shape.x0 for shape in run_charts.waterfall(request, REAL, (), bounds).layout.shapes] == [500, 4000]
    compared = trust_charts.cdfs([{"ttft_ms": tens}], None, ["ttft_ms"], [("ttft_ms", 500.0)])
    assert [shape.x0 for shape in compared.layout.shapes] == [500]
