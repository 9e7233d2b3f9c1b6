"""A plan as a job: what it leaves on the way, what surrounds it, and traffic to start from.

That its answer is the command's is in `tests/planning/test_answer_exports.py`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tokentwin.dashboard.plan_page.tasks import COARSE, fleet, plan
from tokentwin.dashboard.run_page.words import bands_of
from tokentwin.dashboard.shapes import LEAST_REQUESTS, MOST_REQUESTS, shapes
from tokentwin.planning.diagnose.recorded_run import diagnose
from tokentwin.planning.diagnose.request import DiagnoseRequest
from tokentwin.planning.jobs.files import read_json
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.traffic import Offered
from tokentwin.serving.deployments.config import parse
from tokentwin.traces.formats.trace_file import write_workload
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import synthesise

SETTINGS: dict[str, Any] = {
    "model": "Llama-3.1-8B",
    "gpus": ["H100"],
    "tensor_parallel_sizes": [1],
    "traffic": {
        "requests": 160,
        "seed": 3,
        "arrivals": {"kind": "poisson", "rate": 80},
        "prompt": {"kind": "uniform", "low": 200, "high": 2000},
        "output": {"kind": "uniform", "low": 10, "high": 60},
    },
    "slos": ["ttft_ms p99<=300", "tpot_ms p99<=25"],
    "spares": 1,
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def reports() -> list[tuple[str, float]]:
    return []


@pytest.fixture(scope="module")
def answer(out: Path, reports: list[tuple[str, float]]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda _: {0})  # one CPU, so that it starts no workers
        return plan(SETTINGS, out, lambda stage, share: reports.append((stage, share)))


def test_it_is_plain_json_and_says_how_far_it_is(answer: dict[str, Any], reports: list[tuple[str, float]]) -> None:
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    shares = [share for _, share in reports]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] <= 1 and len(set(shares)) > 10


def test_a_first_answer_is_left_on_the_way(answer: dict[str, Any], out: Path) -> None:
    said = read_json(out / COARSE)["said"]
    match = re.fullmatch(r"From quick estimates: (?:(\d+) to )?(\d+) GPUs?, \$[\d.]+(?: to \$[\d.]+)?/h, of (.+)", said)
    assert match is not None, said
    few, many, engines = match.groups()
    best = answer["recommendation"]
    assert int(few or many) <= best["gpus"] <= int(many) and best["engine"] in engines


def test_the_curves_go_through_the_answer(answer: dict[str, Any]) -> None:
    best = answer["recommendation"]
    here = next(p for p in answer["by_replicas"] if p["replicas"] == best["replicas"])
    assert here["attainment"] == best["attainment"]
    assert all(p["if_slow"] <= p["attainment"] <= p["if_fast"] for p in answer["by_replicas"])
    assert here["replicas"] - 1 in [p["replicas"] for p in answer["by_replicas"]]
    now = next(p for p in answer["by_rate"] if p["requests_per_s"] == pytest.approx(answer["requests_per_s"]))
    seen = best["observed"]
    assert [now["ttft_p99_ms"], now["tpot_p99_ms"]] == [seen[slo] for slo in SETTINGS["slos"]]


def test_slow_steps_and_the_star_of_the_frontier_are_the_same_fleet(answer: dict[str, Any]) -> None:
    """All requests are in the busiest stretch here, so the star is the recommended fleet, without its spare."""
    best = answer["recommendation"]
    for point in answer["by_rate"]:
        assert point["ttft_p99_if_slow_ms"] >= point["ttft_p99_ms"] > 0
        assert point["tpot_p99_if_slow_ms"] >= point["tpot_p99_ms"] > 0
    (star,) = (curve["planned"] for curve in answer["engine_curves"] if curve["planned"])
    assert star["tok_s_user"] == pytest.approx(best["tok_s_user"]) and star["attainment"] == best["attainment"]
    without_spare = best["tok_s_gpu"] * (best["replicas"] + SETTINGS["spares"]) / best["replicas"]
    assert star["tok_s_gpu"] == pytest.approx(without_spare)


def test_the_fleet_is_known_before_the_curves_around_it(answer: dict[str, Any], out: Path) -> None:
    early = read_json(out / COARSE)["answer"]
    assert early["by_rate"] == early["by_replicas"] == early["engine_curves"] == []
    assert {**early, **{name: answer[name] for name in ("by_rate", "by_replicas", "engine_curves")}} == answer


def test_the_slos_hold_at_the_knee_and_latency_grows_with_load(answer: dict[str, Any]) -> None:
    """The knee is where it is too likely that they break, so with steps as predicted they may hold beyond."""
    knee = answer["requests_per_s"] * (1 + answer["recommendation"]["headroom_percent"] / 100)
    met = {p["requests_per_s"] / knee: p["ttft_p99_ms"] <= 300 and p["tpot_p99_ms"] <= 25 for p in answer["by_rate"]}
    assert next(kept for load, kept in met.items() if load == pytest.approx(1))
    lightest, *_, heaviest = answer["by_rate"]
    assert heaviest["requests_per_s"] > 1.2 * knee
    assert heaviest["ttft_p99_ms"] > 1.5 * lightest["ttft_p99_ms"]
    assert heaviest["tpot_p99_ms"] > 1.5 * lightest["tpot_p99_ms"]


def test_one_fleet_of_the_plan_is_recorded_as_the_plan_saw_it(answer: dict[str, Any], tmp_path: Path) -> None:
    point = next(p for p in answer["points"] if p["replicas"] == answer["recommendation"]["replicas"])
    asked = {"plan": SETTINGS, "replicas": point["replicas"], "engine": point["engine"]}
    answer = fleet(asked, tmp_path, lambda stage, share: None)
    metrics = RunMetrics.from_recording(Recording.load(tmp_path / "run"))
    assert parse_objectives(SETTINGS["slos"]).attainment(metrics) == point["attainment"]
    assert metrics.distribution("tok_s_user").p50 == pytest.approx(point["tok_s_user"])
    recording = Recording.load(tmp_path / "run")
    assert bands_of(recording.run)["ttft_ms"]["p99"][1] >= metrics.distribution("ttft_ms").p99
    assert dict(recording.run["usd_per_gpu_hour"])["pool"] == pytest.approx(point["usd_per_hour"] / point["gpus"])
    assert metrics.scalars()["usd_per_mtok_out"] > 0
    again = diagnose(DiagnoseRequest(run=str(tmp_path / "run"), gpu="H100"))
    assert again.simulated_p99 == again.recorded_p99 and again.warning is None, "the router of the plan is the run's"
    assert answer["level"] in ("validated", "interpolated", "extrapolated") and answer["duration_s"] > 0


def test_a_recorded_trace_is_scaled_and_cut_to_its_busiest_stretch(tmp_path: Path) -> None:
    workload = parse(PlanRequest, SETTINGS, where="plan").workload()
    write_workload(workload, tmp_path / "trace.parquet")
    few = list(Offered(traffic=tmp_path / "trace.parquet", window_s=2, rate_scale=4).workload().requests)
    assert 2 <= len(few) < 240
    assert few[-1].arrival_ns - few[0].arrival_ns <= 0.5e9


@pytest.mark.parametrize("name", list(shapes()))
def test_a_shape_gives_its_lengths_at_the_rate_asked(name: str) -> None:
    shape = shapes()[name]
    spec = shape.traffic(rate=30, cv=2)
    requests = list(synthesise(spec).requests)
    assert len(requests) == min(round(60 * shape.filling_minutes(50) * 30), MOST_REQUESTS) > LEAST_REQUESTS
    assert len(requests) / (requests[-1].arrival_ns / 1e9) == pytest.approx(30, rel=0.2)
    assert len(list(synthesise(shape.traffic(rate=0.1)).requests)) == LEAST_REQUESTS


@pytest.mark.parametrize("name", list(shapes()))
def test_a_shape_lasts_several_times_its_longest_answers_but_is_never_too_much_to_plan_for(name: str) -> None:
    shape = shapes()[name]
    outputs = sorted(request.output_len for request in synthesise(shape.traffic(rate=30)).requests)
    longest_s = outputs[int(0.99 * len(outputs))] * 0.05
    assert 60 * shape.filling_minutes(50) > 2.7 * longest_s
    assert shape.filling_minutes(200) > 3 * shape.filling_minutes(50) - 3
    assert shape.traffic(rate=1e4).requests == MOST_REQUESTS
    assert shape.model_copy(update={"minutes": 60}).traffic(rate=1).requests == 3600
