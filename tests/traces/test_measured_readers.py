"""Readers of measured runs: units, clocks, and workloads rebuilt from what each format tells."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE
from tokentwin.traces.measured.formats import FORMATS, measured_format
from tokentwin.traces.measured.prometheus import Window
from tokentwin.traces.measured.run import MeasuredRun, Observed, figures_of_requests

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the measured runs are not here: no ../shared/data")


def read(data: Path, **settings: Any) -> list[MeasuredRun]:
    return measured_format(settings, "measured").read(data)


# Figures


def test_figures_of_requests_have_the_registry_s_definitions() -> None:
    second = 10**9
    requests = [
        Observed(0, 10, 5, 0, 1 * second, 3 * second),  # TTFT 1 s, TPOT 0.5 s, E2E 3 s
        Observed(1, 10, 1, 1 * second, 4 * second, 4 * second),  # one token: no TPOT
    ]
    figures = figures_of_requests(requests, offered_per_s=0.5)
    assert figures["ttft_ms.mean"] == pytest.approx(2000) and figures["tpot_ms.mean"] == pytest.approx(500)
    assert figures["e2e_ms.p50"] == pytest.approx(3000) and figures["makespan_s"] == pytest.approx(4)
    assert figures["request_throughput"] == pytest.approx(0.5) and figures["output_throughput"] == pytest.approx(1.5)
    assert figures["saturated"] == 0.0
    assert figures_of_requests(requests, offered_per_s=0.6)["saturated"] == 1.0


# GuideLLM, by the server's spans

SPANS = """arrival_s,prompt_tokens,output_tokens,max_tokens,ttft_s,e2e_s,phase,phase_kind
0.0,30,3,3,0.5,0.7,0,synchronous
1.0,24,2,2,0.2,0.3,0,synchronous
5.5,40,2,2,0.4,0.6,1,constant@2rps
5.0,40,2,2,0.4,0.6,1,constant@2rps
"""


def test_spans_give_a_run_for_each_phase_with_a_prefix_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "spans.csv").write_text(SPANS)
    alone, constant = read(tmp_path, format="guidellm-spans", file="spans.csv", shared_prefix_tokens=16)
    assert (alone.name, constant.name) == ("0 synchronous", "1 constant@2rps")
    assert alone.workload.concurrency == 1 and constant.workload.concurrency is None
    assert [r.arrival_ns for r in constant.workload.requests] == [0, 500_000_000]
    prefixes = [{r.prompt[0] for r in run.workload.requests} for run in (alone, constant)]
    assert all(len(names) == 1 for names in prefixes) and prefixes[0] != prefixes[1]
    assert [r.prompt_len for r in alone.workload.requests] == [30, 24]
    assert alone.figures["ttft_ms.mean"] == pytest.approx(350) and alone.figures["tpot_ms.p99"] == pytest.approx(100)


def test_spans_without_phases_are_one_run_sent_by_the_clock(tmp_path: Path) -> None:
    lines = [line.rsplit(",", 2)[0] for line in SPANS.splitlines()]
    (tmp_path / "spans.csv").write_text("\n".join(lines) + "\n")
    (run,) = read(tmp_path, format="guidellm-spans", file="spans.csv")
    assert run.name == "all" and run.workload.concurrency is None
    assert [r.arrival_ns for r in run.workload.requests] == [0, 10**9, 5 * 10**9, 5_500_000_000]


def test_spans_with_a_first_token_after_the_last_are_refused(tmp_path: Path) -> None:
    (tmp_path / "spans.csv").write_text(SPANS.replace("0.5,0.7", "0.8,0.7"))
    with pytest.raises(UserError, match=r"spans.csv:2: ttft_s.*longer than e2e_s"):
        read(tmp_path, format="guidellm-spans", file="spans.csv")


# Reports of load generators


def aiperf_row(start_ms: int, ttft_ms: float | None, e2e_ms: float, error: Any = None, **about: Any) -> dict[str, Any]:
    metrics = {"time_to_first_token": ttft_ms, "request_latency": e2e_ms}
    metrics |= {"input_sequence_length": 30, "output_sequence_length": 3}
    metadata = {"request_start_ns": 1_700_000_000_000_000_000 + start_ms * 10**6, "benchmark_phase": "profiling"}
    values = {name: {"value": value, "unit": ""} for name, value in metrics.items() if value is not None}
    return {"metadata": {**metadata, "was_cancelled": False, **about}, "metrics": values, "error": error}


def aiperf_phases(**profiling: Any) -> list[dict[str, Any]]:
    return [{"kind": "warmup", "type": "concurrency", "concurrency": 1}, {"kind": "profiling", **profiling}]


def aiperf(folder: Path, rows: Any, phases: Any) -> MeasuredRun:
    (folder / "profile_export.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "profile_export_aiperf.json").write_text(json.dumps({"input_config": {"phases": phases}}))
    (run,) = read(folder, format="aiperf", folder=".", shared_prefix_tokens=16)
    return run


def test_aiperf_reports_what_it_sent_and_when(tmp_path: Path) -> None:
    first, second = aiperf_row(100, 20.5, 40.5), aiperf_row(350, 40.5, 50.5)
    others = aiperf_row(0, 1, 1, benchmark_phase="warmup"), aiperf_row(400, 1, 1, error={"code": 500})
    paced = aiperf_phases(type="poisson", rate=4.0)
    run = aiperf(tmp_path, [second, first, *others], paced)
    assert [request.arrival_ns for request in run.workload.requests] == [0, 250_000_000]
    assert [request.prompt_len for request in run.workload.requests] == [30, 30] and run.workload.shares_prefixes
    assert run.figures["ttft_ms.mean"] == 30.5 and run.figures["tpot_ms.mean"] == 7.5 and run.by_client
    assert (run.workload.concurrency, run.offered_per_s) == (None, 4.0)
    assert run.caution == "1 requests failed and are left out"
    closed = aiperf(tmp_path, [first, second], aiperf_phases(type="concurrency", concurrency=2))
    assert closed.workload.concurrency == 2 and {r.arrival_ns for r in closed.workload.requests} == {0}
    with pytest.raises(UserError, match=r"jsonl:1: time_to_first_token: is missing; run aiperf with --streaming"):
        aiperf(tmp_path, [aiperf_row(0, None, 40)], paced)
    with pytest.raises(UserError, match=r"jsonl:1: time_to_first_token.*must not exceed request_latency"):
        aiperf(tmp_path, [aiperf_row(0, 41, 40)], paced)


def guidellm_benchmark(errored: int = 0, **strategy: Any) -> dict[str, Any]:
    successful = [
        {"request_start_time": 1_700_000_000 + start_s, "prompt_tokens": 30, "output_tokens": 3,
         "time_to_first_token_ms": ttft_ms, "request_latency": latency_s}
        for start_s, ttft_ms, latency_s in ((1.25, 40, 0.05), (1, 20, 0.04))
    ]  # fmt: skip
    requests = {"successful": successful, "errored": [{}] * errored, "incomplete": []}
    return {"config": {"strategy": strategy}, "requests": requests}


def guidellm(folder: Path, *benchmarks: Any) -> list[MeasuredRun]:
    (folder / "report.json").write_text(json.dumps({"benchmarks": benchmarks}))
    return read(folder, format="guidellm", file="report.json")


def test_guidellm_reports_a_run_for_each_benchmark(tmp_path: Path) -> None:
    alone, several, paced = guidellm(
        tmp_path,
        guidellm_benchmark(type_="synchronous"),
        guidellm_benchmark(errored=1, type_="concurrent", streams=2),
        guidellm_benchmark(type_="poisson", rate=4.0, max_concurrency=8),
    )
    assert [run.name for run in (alone, several, paced)] == ["0 synchronous", "1 concurrent", "2 poisson"]
    assert [run.workload.concurrency for run in (alone, several, paced)] == [1, 2, None]
    assert [r.arrival_ns for r in paced.workload.requests] == [0, 250_000_000] and paced.offered_per_s == 4.0
    assert several.caution.startswith("1 requests ") and not alone.caution
    assert paced.figures["ttft_ms.mean"] == 30 and paced.figures["tpot_ms.mean"] == 7.5 and paced.by_client


# inference-perf


def stage(**over: Any) -> dict[str, Any]:
    statistics = {"mean": 0.5, "median": 0.4, "p90": 0.9, "p99": 1.0}
    return {
        "load_summary": {"requested_rate": 4.0},
        "successes": {
            "count": 8,
            "latency": {
                "request_latency": statistics,
                "time_to_first_token": {k: v / 10 for k, v in statistics.items()},
            },
            "throughput": {"requests_per_sec": 3.9},
            "prompt_len": {"mean": 30.4},
        },
        "failures": {"count": 0},
        **over,
    }


def test_inference_perf_rebuilds_a_constant_rate_and_its_shared_prompts(tmp_path: Path) -> None:
    for number in (10, 2):
        (tmp_path / f"stage_{number}_lifecycle_metrics.json").write_text(json.dumps(stage()))
    (tmp_path / "stage_2_prometheus_metrics.json").write_text("{}")
    runs = read(
        tmp_path, format="inference-perf", folder=".", output_tokens=6, max_in_flight=3,
        shared_prefixes=2, users=2, shared_prefix_tokens=20,
    )  # fmt: skip
    assert [run.name for run in runs] == ["stage 2", "stage 10"]
    run = runs[0]
    requests = list(run.workload.requests)
    assert [r.arrival_ns for r in requests][:3] == [0, 250_000_000, 500_000_000] and len(requests) == 8
    assert run.workload.concurrency == 3 and {r.output_len for r in requests} == {6}
    assert requests[0].prompt == (("system 0", 20), ("user 0 of 0", 10)) == requests[4].prompt
    assert run.figures["ttft_ms.p50"] == pytest.approx(40) and run.figures["e2e_ms.mean"] == pytest.approx(500)
    assert run.figures["tpot_ms.mean"] == pytest.approx((500 - 50) / 5)
    assert run.figures["saturated"] == 0.0


def test_inference_perf_names_the_field_that_is_missing(tmp_path: Path) -> None:
    broken = stage()
    del broken["successes"]["latency"]["time_to_first_token"]["p90"]
    (tmp_path / "stage_0_lifecycle_metrics.json").write_text(json.dumps(broken))
    with pytest.raises(UserError, match=r"time_to_first_token.p90: must be a number"):
        read(tmp_path, format="inference-perf", folder=".", output_tokens=6)


# vllm bench serve


def bench(**over: Any) -> dict[str, Any]:
    return {
        "model_id": "m", "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": None, "duration": 4.0,
        "completed": 2, "total_input_tokens": 30, "total_output_tokens": 6, "request_throughput": 0.5,
        "output_throughput": 1.5, "mean_ttft_ms": 150.0, "input_lens": [10, 20, 5], "output_lens": [4, 2, 0],
        "ttfts": [0.1, 0.2, 0.0], "itls": [[0.1, 0.1, 0.2], [0.3], []], "start_times": [7.5, 7.0, 9.0], **over,
    }  # fmt: skip


def test_bench_serve_takes_requests_as_they_were_sent(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(bench()))
    (run,) = read(tmp_path, format="bench-serve", files=["b.json"], shared_prefix_tokens=8)
    requests = list(run.workload.requests)
    assert [(r.id, r.arrival_ns, r.prompt_len, r.output_len) for r in requests] == [
        (1, 0, 20, 2),
        (0, 500_000_000, 10, 4),
    ]
    assert requests[0].prompt == (("prefix", 8), (PRIVATE, 12))
    assert run.figures["ttft_ms.mean"] == pytest.approx(150) and run.figures["e2e_ms.p99"] == pytest.approx(500)
    assert run.figures["tpot_ms.mean"] == pytest.approx((400 / 3 + 300) / 2)
    assert (run.offered_per_s, run.figures["makespan_s"]) == (2.0, 4.0)
    assert run.caution == "1 requests failed and are left out"


def test_bench_serve_without_details_has_mean_lengths_and_drawn_arrivals(tmp_path: Path) -> None:
    detailed = ("input_lens", "output_lens", "ttfts", "itls", "start_times")
    short = {k: v for k, v in bench(completed=3, max_concurrency=2).items() if k not in detailed}
    (tmp_path / "b.json").write_text(json.dumps(short))
    (run,) = read(tmp_path, format="bench-serve", files=["b.json"])
    requests = list(run.workload.requests)
    assert [(r.prompt_len, r.output_len) for r in requests] == [(10, 2)] * 3
    assert requests[0].arrival_ns == 0 < requests[1].arrival_ns and run.workload.concurrency == 2
    assert run.figures["ttft_ms.mean"] == 150.0 and "drawn" in run.caution
    assert [run] == read(tmp_path, format="bench-serve", files=["b.json"]), "the same seed, the same arrivals"


def test_bench_serve_replays_a_closed_loop_by_its_slots_not_by_its_times(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(bench(request_rate="inf", max_concurrency=2)))
    (run,) = read(tmp_path, format="bench-serve", files=["b.json"])
    assert [(r.id, r.arrival_ns) for r in run.workload.requests] == [(1, 0), (0, 0)]
    assert run.workload.concurrency == 2


def test_bench_serve_at_an_infinite_rate_sends_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(bench(request_rate="inf", start_times=None)))
    (run,) = read(tmp_path, format="bench-serve", files=["b.json"])
    assert {r.arrival_ns for r in run.workload.requests} == {0} and run.offered_per_s is None


JUNK = st.sampled_from([None, "x", -1, 0, [], {}, [None], True, 1e400, "inf", [[]], 10**400])


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of every value in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths_in(inner, (*path, key))


def write_and_read(kind: str, folder: Path, document: Any) -> None:
    match kind:
        case "bench-serve":
            (folder / "measured.json").write_text(json.dumps(document))
            read(folder, format="bench-serve", files=["measured.json"])
        case "inference-perf":
            (folder / "stage_0_lifecycle_metrics.json").write_text(json.dumps(document))
            read(folder, format="inference-perf", folder=".", output_tokens=6)
        case "guidellm":
            guidellm(folder, document)
        case "aiperf":
            aiperf(folder, [document["row"]], document["phases"])


RESULTS: dict[str, Callable[[], Any]] = {
    "bench-serve": lambda: bench(),
    "inference-perf": lambda: stage(),
    "guidellm": lambda: guidellm_benchmark(type_="concurrent", streams=2, rate=4.0),
    "aiperf": lambda: {"row": aiperf_row(0, 20, 40), "phases": aiperf_phases(type="poisson", rate=4.0)},
}


@given(st.data())
def test_junk_anywhere_in_a_result_is_read_or_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(RESULTS)))
    document = RESULTS[kind]()
    *way, last = data.draw(st.sampled_from(list(paths_in(document))))
    inner: Any = document
    for key in way:
        inner = inner[key]
    inner[last] = data.draw(JUNK)
    try:
        write_and_read(kind, tmp_path, document)
    except UserError as error:
        names = ("measured.json", "stage_0_lifecycle", "report.json", "profile_export")
        assert "\n" not in str(error) and any(name in str(error) for name in names)


# Prometheus


def scrape(path: Path, times: int) -> None:
    """Return a snapshot of two engines: `times` x 4 requests of 100 prompt (a quarter cached) and 20 output tokens."""
    lines = []
    for engine in "01":
        label = f'engine="{engine}",model_name="a {{b}}"'
        for name, buckets, total in (
            ("vllm:request_prompt_tokens", {"50": 0, "150": 2, "+Inf": 2}, 200),
            ("vllm:request_generation_tokens", {"10": 0, "50": 2, "+Inf": 2}, 40),
            ("vllm:time_to_first_token_seconds", {"0.1": 1, "0.4": 2, "+Inf": 2}, 0.3),
            ("vllm:request_time_per_output_token_seconds", {"0.1": 2, "+Inf": 2}, 0.04),
            ("vllm:e2e_request_latency_seconds", {"5": 2, "+Inf": 2}, 1.2),
        ):
            lines.append(f"# TYPE {name} histogram")
            lines += [f'{name}_bucket{{le="{le}",{label}}} {times * n:.1f}' for le, n in buckets.items()]
            lines.append(f"{name}_sum{{{label}}} {times * total}")
        for name, value in (("generation_tokens", 40), ("prefix_cache_hits", 50), ("prefix_cache_queries", 200)):
            lines.append(f"vllm:{name}_total{{{label}}} {times * value} 1700000000000")
    path.write_text("\n".join(lines) + "\n")


def test_two_scrapes_make_a_window(tmp_path: Path) -> None:
    scrape(tmp_path / "before", 3)
    scrape(tmp_path / "after", 8)
    (run,) = read(tmp_path, format="prometheus", before="before", after="after", window_s=10)
    requests = list(run.workload.requests)
    assert len(requests) == 20 and run.figures["request_throughput"] == 2.0
    assert run.figures["ttft_ms.mean"] == pytest.approx(150) and run.figures["tpot_ms.mean"] == pytest.approx(20)
    assert run.figures["e2e_ms.mean"] == pytest.approx(600) and run.figures["output_throughput"] == pytest.approx(40)
    assert sum(r.prompt_len for r in requests) / 20 == pytest.approx(100, rel=0.02)
    assert sum(r.output_len for r in requests) / 20 == pytest.approx(20, rel=0.03)
    shared = sum(tokens for r in requests for name, tokens in r.prompt if name == "prefix")
    assert shared / sum(r.prompt_len for r in requests) == pytest.approx(0.25, abs=0.01)
    arrivals = [r.arrival_ns for r in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0
    histogram = Window.between(tmp_path / "before", tmp_path / "after").histogram("vllm:time_to_first_token_seconds")
    assert (histogram.bounds, histogram.counts) == ((0.1, 0.4, math.inf), (10.0, 10.0, 0.0))


def test_swapped_or_foreign_snapshots_are_refused(tmp_path: Path) -> None:
    scrape(tmp_path / "before", 3)
    scrape(tmp_path / "after", 8)
    with pytest.raises(UserError, match="decreased between the snapshots"):
        read(tmp_path, format="prometheus", before="after", after="before", window_s=10)
    (tmp_path / "after").write_text("up 1\n")
    with pytest.raises(UserError, match=r"request_prompt_tokens.*must be a histogram"):
        read(tmp_path, format="prometheus", before="before", after="after", window_s=10)
    (tmp_path / "after").write_text("<html>\n")
    with pytest.raises(UserError, match=r"after:1.*is not a Prometheus sample"):
        read(tmp_path, format="prometheus", before="before", after="after", window_s=10)


# By name


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_refuses_an_unknown_field(name: str) -> None:
    with pytest.raises(UserError, match=r"measured\.nonsense|measured\.\w+"):
        measured_format({"format": name, "nonsense": 1}, "measured")


def test_an_unknown_format_is_one_line() -> None:
    with pytest.raises(UserError, match=r"measured.format: 'tsv': must be aiperf, bench-serve, csv, guidellm"):
        measured_format({"format": "tsv"}, "measured")
