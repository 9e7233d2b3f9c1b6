"""`tokentwin plan` from the outside: candidates, exit statuses, the command it prints, and mistakes in one line."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.planning.plan_samples import traffic
from tokentwin.cli import cli
from tokentwin.options import listed
from tokentwin.planning.costs import named_prices
from tokentwin.planning.deployments import long_enough
from tokentwin.planning.plan.candidates import candidate_engines
from tokentwin.planning.plan.vllm_command import vllm_command, vllm_command_of
from tokentwin.planning.traffic import Offered, planned_traffic
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.synth import parse_spec, synthesise

LLAMA = Deployment(model="Llama-3.1-8B", device="cuda", gpu_memory_utilization=0.9)
EASY, HARD = "ttft_ms p99<=1000", "tpot_ms p50<=1"


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "shape.yaml"
    path.write_text(
        "{requests: 40, seed: 1, arrivals: {kind: poisson, rate: 60}, prompt: {kind: lognormal, mean: 300, sigma: 1,"
        " max: 1200}, output: {kind: exponential, mean: 20, max: 60}}"
    )
    return path


def plan(*arguments: object) -> Result:
    words = ["plan", *map(str, arguments), "--jobs", "1"]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


# From the outside


def test_it_recommends_a_fleet_with_everything_that_follows(shape: Path) -> None:
    result = plan(shape, "--slo", EASY, "--gpu", "H100,L40S", "--tp", "1,2", "--price", "H100=2.9", "--format", "json")
    found = json.loads(result.stdout)
    best = found["recommendation"]
    assert result.exit_code == 0
    assert best["observed"][EASY] <= 1000
    assert best["usd_per_hour"] == min(p["usd_per_hour"] for p in [best, *found["runners_up"]])
    assert {best["engine"], *(p["engine"] for p in found["runners_up"]), *(d["engine"] for d in found["dearer"])} == {
        "TP1 H100",
        "TP2 H100",
        "TP1 L40S",
        "TP2 L40S",
    }
    low, high = best["plausible_gpus"]
    assert low <= best["gpus"] <= high
    assert best["vllm_serve"].startswith("vllm serve meta-llama/Llama-3.1-8B --dtype bfloat16 ")
    h100 = next(p for p in [best, *found["runners_up"]] if p["engine"] == "TP1 H100")
    assert h100["usd_per_hour"] == pytest.approx(2.9 * h100["gpus"])


def test_the_report_says_what_is_saved(shape: Path, tmp_path: Path) -> None:
    shown = plan(shape, "--slo", EASY, "--gpu", "L40S", "--save", tmp_path / "plan.json").stdout
    assert shown.startswith(json.loads((tmp_path / "plan.json").read_text())["answer"])
    assert "why not one replica fewer: " in shown and "Frontier" in shown and "\nvllm serve " in shown


def test_infeasible_has_an_exit_status_of_its_own(shape: Path) -> None:
    result = plan(shape, "--slo", EASY, "--slo", HARD, "--gpu", "L40S")
    assert result.exit_code == 4
    assert f"TP1 L40S: {HARD}" in result.stdout.splitlines()[0]


def test_infeasible_when_the_model_fits_nowhere(shape: Path) -> None:
    result = plan(shape, "--slo", EASY, "--gpu", "L4", "--model", "Llama-3.1-70B")
    assert result.exit_code == 4
    assert "GiB of weights" in result.stdout


def test_a_size_that_splits_no_head_evenly_is_left_out_and_said_to_be(shape: Path) -> None:
    result = plan(shape, "--slo", EASY, "--gpu", "H100", "--tp", "1,3")
    assert result.exit_code == 0
    assert "TP3 H100: tensor_parallel_size: 3: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--gpu", "H100", "--slo", "speed p99<=3"), "speed"),
        (("--slo", EASY), "gpu: is missing"),
        (("--gpu", "H100", "--slo", EASY, "--tp", "two"), "tp: 'two'"),
        (("--gpu", "H100", "--slo", EASY, "--tp", ""), "tp: '': must not be empty"),
        (("--gpu", "H100", "--slo", EASY, "--calibration", "nothing"), "'nothing/calibration.json': cannot be read"),
        (("--gpu", "H100", "--slo", EASY, "--vary", "max_num_seqs=8", "--vary", "scheduler.max_num_seqs=9"), "twice"),
        (("--gpu", "H100", "--slo", EASY, "--tp", "3,5"), "tensor_parallel_size: 3: must split Llama"),
        (("--gpu", "H100", "--slo", EASY, "--price", "H100"), "price: 'H100'"),
        (("--gpu", "H100", "--slo", EASY, "--price", "H100=nan"), "price"),
        (("--gpu", "H100", "--slo", EASY, "--price", "H100=2,H100=3"), "price: 'H100=3': is the second price of H100"),
        (("--gpu", "H100", "--slo", EASY, "--price", "H200=3"), "is not the GPU of any candidate; choose from H100"),
        (("--gpu", "TPU", "--slo", EASY), "TPU"),
        (("--gpu", "H100", "--slo", EASY, "--policy", "magic"), "magic"),
        (("--gpu", "H100", "--slo", EASY, "--router", "magic"), "magic"),
        (("--gpu", "H100", "--slo", EASY, "--model", "none"), "model"),
        (("--gpu", "H100", "--slo", EASY, "--deployment", "missing.yaml"), "missing.yaml"),
    ],
)
def test_a_mistake_is_one_line_about_the_field(shape: Path, arguments: tuple[str, ...], names: str) -> None:
    with pytest.raises(UserError) as error:
        plan(shape, *arguments)
    assert names in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["requests: [", "5", "requests: 3"])
def test_traffic_that_is_no_specification_is_refused(tmp_path: Path, content: str) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(content)
    for path in (bad, tmp_path / "none.yaml", tmp_path / "none.csv"):
        with pytest.raises(UserError):
            plan(path, "--slo", EASY, "--gpu", "H100")


def test_names_of_gpus_may_have_blanks(shape: Path) -> None:
    """And are those of the catalogue, whatever a candidate, its price and its spot price are called."""
    spot = ("--spot", "rtx pro 6000=0.5, H100 SXM=1", "--interruptions-per-hour", "0.1")
    words = ("--gpu", "RTX PRO 6000,NVIDIA H100,H100", "--price", "RTX-PRO-6000=1.5 H100=9", "--slo", EASY, *spot)
    told = plan(shape, *words).stdout
    assert (
        "1 x TP1 RTX-PRO-6000 spot = 1 GPU, $0.50/h. " in told
        and "1 replica x TP1 RTX-PRO-6000 = 1 GPU, $1.50/h. " in told
    )
    assert "1 × TP1 H100 " in told and "$9.00" in told and "NVIDIA" not in told
    assert named_prices(("A100 80G=2",)) == {"A100-80G": 2.0} and listed("tp", ("1 2,4",)) == ["1", "2", "4"]


# Candidates


def test_candidates_are_every_combination_and_what_does_not_fit_says_why() -> None:
    large = LLAMA.model_copy(update={"model": "Llama-3.1-70B"}).rescheduled(max_model_len=8192)  # as `long_enough` does
    gpus = {name: find_gpu(name) for name in ("H100", "H200")}
    fitting, ruled_out = candidate_engines(large, gpus, [1, 2, 3, 4], ["vllm", "sjf"], {"H200": 1.0})
    assert [e.name for e in fitting if e.deployment.policy == "vllm"] == ["TP4 H100", "TP2 H200", "TP4 H200"]
    reasons = dict(ruled_out)
    assert "0 KV blocks" in reasons["TP2 H100"] and not any("lower" in reasons[f"TP{size} H100"] for size in (1, 2))
    assert len(fitting) + len(ruled_out) == 16
    assert "GiB of weights" in reasons["TP1 H100"]
    assert "64 heads" in reasons["TP3 H200 sjf"]
    assert {e.usd_per_hour for e in fitting if e.name.startswith("TP2 H200")} == {2.0}
    blocks = {e.name: e.deployment.scheduler.num_blocks for e in fitting}
    assert blocks["TP2 H200"] < blocks["TP4 H200"]


def test_room_is_made_for_the_longest_request_as_far_as_positions_go() -> None:
    def fitted(prompt: int) -> int:
        asked = Workload([WorkloadRequest(0, 0, ((PRIVATE, prompt),), 10)])
        return long_enough(LLAMA, asked).scheduler.max_model_len

    assert [fitted(n) for n in (100, 1014, 1015, 10**6)] == [1024, 1024, 2048, 131072]


# Traffic


def test_the_busiest_stretch_is_planned_for() -> None:
    sizes = [5, 5, 50, 60, 5, 5]
    requests = [WorkloadRequest(i, i * 10**9, ((PRIVATE, size),), 1) for i, size in enumerate(sizes)]
    busiest = planned_traffic(Workload(requests), window_s=2, rate_scale=None)
    assert [request.id for request in busiest.requests] == [2, 3]
    assert len(list(planned_traffic(Workload(requests), window_s=6, rate_scale=None).requests)) == 6
    faster = planned_traffic(Workload(requests), window_s=6, rate_scale=2)
    assert [request.arrival_ns for request in faster.requests] == [i * 10**9 // 2 for i in range(6)]


def arrival_rate(workload: Workload) -> float:
    arrivals = [request.arrival_ns for request in workload.requests]
    return (len(arrivals) - 1) / ((arrivals[-1] - arrivals[0]) / 1e9)


@pytest.mark.parametrize("size", [{"requests": 400}, {"duration_s": 60}])
def test_a_specification_is_planned_for_at_the_rate_that_it_names(size: dict[str, int]) -> None:
    length = {"kind": "fixed", "tokens": 10}
    data = {"arrivals": {"kind": "gamma", "rate": 8, "cv": 4}, "prompt": length, "output": length, **size}
    assert arrival_rate(synthesise(parse_spec(data))) != pytest.approx(8, rel=0.02)
    assert arrival_rate(Offered(traffic=parse_spec(data)).workload(at_named_rate=True)) == pytest.approx(8, rel=1e-6)
    few = Offered(traffic=parse_spec(data), limit=50)
    assert arrival_rate(few.workload(at_named_rate=True)) == pytest.approx(8, rel=1e-6)


def test_traffic_without_one_rate_is_as_drawn() -> None:
    length = {"kind": "fixed", "tokens": 10}
    sessions = {"turns": {"kind": "fixed", "tokens": 3}, "think_ms": {"kind": "fixed", "tokens": 900}}
    ramp = {"kind": "ramp", "start_rate": 1, "end_rate": 5, "over_s": 60}
    for arrivals, more in (({"kind": "poisson", "rate": 5}, {"sessions": sessions}), (ramp, {})):
        spec = parse_spec({"requests": 100, "arrivals": arrivals, "prompt": length, "output": length, **more})
        assert list(Offered(traffic=spec).workload(at_named_rate=True).requests) == list(synthesise(spec).requests)


def test_one_request_is_no_traffic() -> None:
    with pytest.raises(UserError, match="window-s"):
        planned_traffic(traffic(20), window_s=1e-6, rate_scale=None)


def test_a_closed_loop_has_no_rate_to_plan_for() -> None:
    closed = Workload(traffic(5).requests, concurrency=2)
    with pytest.raises(UserError, match="closed loop"):
        planned_traffic(closed, 3600, None)


def test_requests_of_one_instant_have_no_rate_to_plan_for() -> None:
    at_once = [WorkloadRequest(number, 5, (("", 10),), 5) for number in range(50)]
    with pytest.raises(UserError, match="has all arrivals at one instant") as caught:
        planned_traffic(Workload(at_once, "burst"), 3600, 2.0)
    assert "\n" not in str(caught.value)


# The command


def test_the_command_says_what_was_simulated_otherwise_than_by_default() -> None:
    deployment = Deployment.model_validate(
        {
            "model": "meta-llama/Llama-3.1-8B",
            "quantization": "fp8",
            "kv_cache_dtype": "fp8",
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.85,
            "scheduler": {"max_num_seqs": 64, "enable_prefix_caching": False, "async_scheduling": False},
        }
    )
    words = vllm_command(deployment).split()
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    pairs = dict(pairwise(words))
    assert pairs["--tensor-parallel-size"] == "2"
    assert pairs["--max-num-seqs"] == "64"
    assert pairs["--gpu-memory-utilization"] == "0.85"
    assert pairs["--quantization"] == pairs["--kv-cache-dtype"] == "fp8"
    assert {"--no-enable-prefix-caching", "--no-async-scheduling"} < set(words)
    assert "--num-gpu-blocks-override" in vllm_command(Deployment())
    rare = SchedulerConfig(
        max_num_active_seqs=9, max_num_scheduled_tokens=99, prefill_schedule_interval=3,
        long_prefill_token_threshold=7, long_prefill_token_threshold_adaptive=True,
    )  # fmt: skip
    assert (
        "--max-num-active-seqs 9 --max-num-scheduled-tokens 99 --long-prefill-token-threshold 7 "
        "--prefill-schedule-interval 3"
    ) in (command := vllm_command(Deployment(scheduler=rare)))
    assert command.endswith("--long-prefill-token-threshold-adaptive")


@pytest.mark.parametrize(
    ("gpu", "seqs", "tokens"),
    [("H100", 1024, 8192), ("B200", 1024, 16384), ("A100-80G", 256, 2048), ("L40S", 256, 2048)],
)
def test_candidates_are_what_vllm_serves_by_default(gpu: str, seqs: int, tokens: int) -> None:
    fitting, _ = candidate_engines(LLAMA, {gpu: find_gpu(gpu)}, [1, 2], ["vllm"], {})
    for engine in fitting:
        scheduler = engine.deployment.scheduler
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (seqs, tokens)
        assert scheduler.async_scheduling
        words = (vllm_command_of(engine) or "").split()
        assert not {"--max-num-seqs", "--max-num-batched-tokens", "--async-scheduling", "--block-size"} & set(words)
        assert ("--tensor-parallel-size" in words) == (engine.gpus > 1)


def test_what_is_stated_stays_and_is_said() -> None:
    stated = LLAMA.model_copy(update={"scheduler": SchedulerConfig(max_num_seqs=128)})
    varied = [{"async_scheduling": False, "scheduler.max_num_batched_tokens": 512}, {"pipeline_parallel_size": 2}]
    (plain, staged), _ = candidate_engines(stated, {"H100": find_gpu("H100")}, [1], ["vllm"], {}, varied)
    assert plain.deployment.scheduler.max_num_seqs == staged.deployment.scheduler.max_num_seqs == 128
    assert plain.deployment.scheduler.max_num_batched_tokens == 512
    assert staged.deployment.scheduler.max_num_batched_tokens == 8192
    assert not plain.deployment.scheduler.async_scheduling and staged.deployment.scheduler.async_scheduling
    command = vllm_command_of(plain) or ""
    assert "--max-num-seqs 128 --max-num-batched-tokens 512" in command and "--no-async-scheduling" in command
    assert "async" not in (vllm_command_of(staged) or "")


def test_a_policy_that_vllm_lacks_has_no_such_command() -> None:
    with pytest.raises(UserError, match="does not exist in vLLM"):
        vllm_command(Deployment(policy="sjf"))


def test_context_parallelism_is_vllm_s_where_it_has_it() -> None:
    shared = {"tensor_parallel_size": 4, "scheduler": {"block_size": 64}}
    both = ("prefill_context_parallel_size", 2), ("decode_context_parallel_size", 4)
    for name, size in both:
        stated = Deployment.model_validate({"model": "DeepSeek-V3", **shared, name: size})
        words = vllm_command(stated).split()
        assert words[words.index(f"--{name.replace('_', '-')}") + 1] == str(size)
        assert ("--block-size" in words) == (name == "prefill_context_parallel_size")
    with pytest.raises(UserError, match="needs latent attention in vLLM"):
        vllm_command(Deployment(model="Llama-3.1-8B", prefill_context_parallel_size=2))


def test_four_bits_have_a_command_only_where_a_checkpoint_has_them() -> None:
    with pytest.raises(UserError, match=r"int4.*name a checkpoint in GPTQ or AWQ"):
        vllm_command(Deployment(model="Llama-3.1-70B", quantization="int4"))
    assert "--quantization" not in vllm_command(Deployment(model="Qwen/Qwen3-32B-AWQ", quantization="int4"))


def test_a_70b_fits_into_one_h100_in_four_bits_and_not_in_eight() -> None:
    model = LLAMA.model_copy(update={"model": "Llama-3.1-70B"})
    varied = [{"quantization": name} for name in ("none", "fp8", "int4")]
    fitting, left_out = candidate_engines(model, {"H100": find_gpu("H100")}, [1], ["vllm"], {}, varied)
    assert [engine.deployment.quantization for engine in fitting] == ["int4"]
    assert len(left_out) == 2


# Settings that vary


def test_every_combination_of_settings_is_a_candidate_of_its_own_name(shape: Path) -> None:
    varied = ("--vary", "max_num_batched_tokens=512,8192", "--vary", "scheduler.max_num_seqs=32,64")
    result = plan(shape, "--slo", EASY, "--gpu", "H100", *varied, "--limit", "25", "--format", "json")
    found = json.loads(result.stdout)
    offers = [found["recommendation"], *found["runners_up"]]
    assert {p["engine"] for p in offers} == {
        f"TP1 H100 max_num_batched_tokens={tokens} max_num_seqs={seqs}" for tokens in (512, 8192) for seqs in (32, 64)
    }
    scheduler = offers[0]["deployment"]["scheduler"]
    said = f"max_num_batched_tokens={scheduler['max_num_batched_tokens']} max_num_seqs={scheduler['max_num_seqs']}"
    assert offers[0]["engine"].endswith(said)
    assert len({p["usd_per_hour"] for p in offers}) == 1
    assert offers[0]["attainment"] == max(p["attainment"] for p in offers)


def test_each_setting_has_a_line_of_its_own_in_eighty_columns(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    varied = ("--vary", "max_num_batched_tokens=8192", "--vary", "async_scheduling=true,false")
    shown = plan(shape, "--slo", EASY, "--gpu", "H100", *varied, "--limit", "25").stdout
    tables = shown[shown.index("Fleets that meet") : shown.index("vllm serve")].splitlines()
    assert {" max_num_batched_tokens=8192", " async_scheduling=true", " async_scheduling=false"} <= {
        line.rstrip() for line in tables
    }
    assert max(len(line) for line in tables if "=" in line) <= 80
    runners_up = "\n".join(tables[: tables.index("")])
    assert "hold" in runners_up and re.search(r"\d %  +(> )?\d+ %", runners_up)


def test_a_combination_that_is_not_allowed_is_ruled_out_and_says_why() -> None:
    unchunked = [{"enable_chunked_prefill": False, "max_num_batched_tokens": tokens} for tokens in (512, 8192)]
    fitting, ruled_out = candidate_engines(LLAMA, {"H100": find_gpu("H100")}, [1], ["vllm"], {}, unchunked)
    assert [e.varied for e in fitting] == [("enable_chunked_prefill=false", "max_num_batched_tokens=8192")]
    assert "at least max_model_len" in dict(ruled_out)["enable_chunked_prefill=false max_num_batched_tokens=512"]


@pytest.mark.parametrize(
    ("varied", "names"),
    [
        ("max_nu=3", "max_nu"),
        ("max_num_seqs=", "max_num_seqs="),
        ("max_num_seqs=8,8", "max_num_seqs=8,8"),
        ("max_num_seqs=few", "max_num_seqs"),
        ("max_num_seqs", "NAME=VALUE"),
        ("max_num_seqs=[", "YAML"),
        ("policy=vllm,sjf", "--policy"),
        ("dtype.bits=8", "dtype: must be"),
    ],
)
def test_a_setting_that_cannot_vary_is_one_line(shape: Path, varied: str, names: str) -> None:
    with pytest.raises(UserError) as error:
        plan(shape, "--gpu", "H100", "--slo", EASY, "--vary", varied)
    assert names in str(error.value) and "\n" not in str(error.value)


def test_an_answer_that_cannot_be_saved_is_refused_before_the_search(shape: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written: there is no folder"):
        plan(
            shape, "--slo", EASY, "--gpu", "H100", "--save", tmp_path / "none" / "plan.json", "--vary", "refused=later"
        )
