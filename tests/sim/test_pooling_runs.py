"""Simulated runs of pooling requests: which figures they have, which they lack, and what is refused."""

import json
import math

import pytest

import tokentwin as twin
from tests.command import tokentwin
from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.step_operations import step_operations
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.kv_layout import with_kv_groups
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics

TRAFFIC = ("--prompt", 100, "--output", 0, "--rate", 1)
BGE = ("--gpu", "L4", "--model", "bge-large-en-v1.5")
MEASURED = ("--gpu", "H100", "--model", "bge-large-en-v1.5")  # its kernels are quicker to price


def metrics_of(requests: list[WorkloadRequest], slo: dict[str, float] | None = None, **scheduler: object) -> RunMetrics:
    sink = TableSink()
    config = SchedulerConfig(num_blocks=100, **scheduler)
    cluster = Cluster(Deployment(scheduler=config), TokenCost(1_000_000, 1000, 0), sink, tokens=True)
    cluster.run(Workload(requests, shares_prefixes=False))
    return RunMetrics(sink.requests, sink.steps, {"duration_ns": 10**9}, slo)


def test_its_only_latencies_are_queue_time_and_e2e() -> None:
    run = metrics_of([WorkloadRequest(id, 0, (("", 50),), 0) for id in range(4)])
    assert run.finished.all()
    assert {name for name, one in run.distributions().items() if one.count} >= {"e2e_ms", "queue_ms"}
    for name in ("ttft_ms", "tpot_ms", "tpot_inclusive_ms", "itl_ms", "prefill_ms", "decode_ms", "tok_s_user"):
        assert run.distribution(name).count == 0, name
    scalars = run.scalars()
    assert scalars["output_throughput"] == 0 and scalars["usd_per_mtok_out"] is None
    assert scalars["input_throughput"] == pytest.approx(50 * scalars["request_throughput"])
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in scalars.values())


def test_among_other_requests_it_meets_any_bound_on_tokens() -> None:
    mixed = [WorkloadRequest(id, 0, (("", 50),), 4 * (id % 2)) for id in range(4)]
    assert metrics_of(mixed, {"ttft_ms": 0.001}).meets_slo().tolist() == [True, True, False, False]  # as they finish
    assert metrics_of(mixed, {"e2e_ms": 1000}).scalars()["slo_attainment"] == 1


def test_attention_of_an_encoder_sees_all_pairs_and_there_is_no_head() -> None:
    spec, deployment = find_model("bge-large-en-v1.5"), with_kv_groups(Deployment(model="bge-large-en-v1.5"))
    sizes = StepSizes(prefill_rows=3, prefill_tokens=30, prefill_pairs=3 * 55)
    by_name = {one.name: one for one in step_operations(spec, deployment, sizes)}
    assert by_name["prefill attention"].pairs == 3 * 10 * 10
    assert by_name["head"].size == 0
    flops = sum(one.flops * one.count for one in by_name.values())
    layers = 2 * (spec.parameters - spec.embedding_parameters) * 30
    assert flops == pytest.approx(layers + 4 * 300 * spec.hidden_size * spec.num_layers, rel=0.01)


def test_the_command_shows_no_figure_that_is_not_there(tmp_path) -> None:
    done = tokentwin("simulate", *TRAFFIC, *BGE, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "no outputs (pooling requests)" in done.stdout and "extrapolated" in done.stdout
    assert "ttft" not in done.stdout and "nan" not in done.stdout.lower()
    told = tokentwin("simulate", *TRAFFIC, *BGE, "-o", tmp_path / "run", "--force", "--format", "json").stdout
    assert json.loads(told)["distributions"].keys() >= {"e2e_ms", "queue_ms"} and "NaN" not in told
    assert json.loads(told)["kv_usage"] == 0


def test_plan_sizes_for_a_bound_on_e2e(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tokentwin.planning.made_up._FEWEST", 100)  # requests
    monkeypatch.setattr("tokentwin.planning.made_up._LASTS_S", 100.0)
    saved = tmp_path / "plan.json"
    shown = tokentwin("plan", *TRAFFIC, *MEASURED, "--slo", "e2e_ms p95<=200", "--jobs", 1, "--save", saved)
    assert shown.returncode == 0, shown.stderr
    answer = json.loads(saved.read_text())
    best = answer["recommendation"]
    assert best["gpus"] >= 1 and best["tok_s_gpu"] is None and best["usd_per_mtok_total"] > 0
    assert "--runner pooling" in best["vllm_serve"]
    assert "no output tokens (pooling requests)" in shown.stdout and "nan" not in shown.stdout.lower()


def test_compare_has_prompt_tokens_per_second() -> None:
    done = tokentwin("compare", *TRAFFIC, *MEASURED, "--b", "max_num_seqs=2")
    assert done.returncode == 0, done.stderr
    assert "(tokens/s)" in done.stdout and "E2E" in done.stdout
    assert "TTFT" not in done.stdout and "output throughput" not in done.stdout and "nan" not in done.stdout.lower()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", *TRAFFIC, *BGE, "--slo", "ttft_ms p99<=100"), "slo: 'ttft_ms': is undefined for pooling requests"),
        (("plan", *TRAFFIC, *BGE, "--slo", "tpot_ms<=9", "--slo", "attainment>=0.9"), "bound e2e_ms"),
        (("simulate", "--prompt", 9, "--output", 5, "--rate", 9, *BGE, "-o", "x"), "has no LM head; set its outputs"),
        (("simulate", "--prompt", 9, "--output", 5, "--rate", 9, "--gpu", "L4", "--model", "Qwen3-Embedding-0.6B",
          "-o", "x"), "has no LM head"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(arguments, says, tmp_path) -> None:
    done = tokentwin(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_python_takes_the_same(tmp_path) -> None:
    traffic = {"prompt": 100, "output": 0, "rate": 20}
    run = twin.simulate(traffic, gpu="H100", out=tmp_path / "run", band=False, details=False)
    assert run.metrics.finished.all()  # Llama-3.1-8B, as a decoder that answers pooling requests
    with pytest.raises(UserError, match="bound e2e_ms"):
        twin.plan(traffic, ["ttft_ms p99<=100"], gpus=["L4"], jobs=1)


def test_throughput_is_near_a_published_measurement(tmp_path) -> None:
    """TEI takes 18.491 s and Infinity 19.562 s for 2,560 sentences of 1,150,000 tokens (Infinity's benchmark)."""
    trace = tmp_path / "sentences.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,449,0\n" * 2560)
    deployment = twin.Deployment(model="bge-large-en-v1.5")
    run = twin.simulate(trace, deployment, gpu="L4", out=tmp_path / "run", band=False, details=False)
    assert run.metrics.scalars()["input_throughput"] == pytest.approx(1_150_000 / 18.491, rel=0.1)
    assert run.metrics.scalars()["input_throughput"] == pytest.approx(1_150_000 / 19.562, rel=0.1)
