"""DeepSeek-V4: weights, the three kinds of KV, what is computed, and the commands that answer for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.operations import Gemm, Operation, StepSizes, floor_ns, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.cli import cli
from tokentwin.serving.deployments.attention import CompressedAttention
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import most_held, with_states
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import draft_module, stage_models
from tokentwin.serving.deployments.weight_types import stored
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.workload import WorkloadRequest

FLASH = find_model("DeepSeek-V4-Flash")
SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_n_heads": 3,
    "index_head_dim": 8,
    "index_topk": 16,
    "hc_mult": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 512,
}
ENGINE = ["--gpu", "H200", "--model", "DeepSeek-V4-Flash"]
NOT_COUNTED = ("position_bias", "sinks", ".base", ".scale", "hc_head", "compressor.kv_norm", "indexer.kv_norm")


def operations(sizes: StepSizes, **fields: Any) -> dict[str, Operation]:
    return {one.name: one for one in step_operations(FLASH, Deployment(kv_cache_dtype="fp8", **fields), sizes)}


def test_parameters_are_those_that_transformers_makes() -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip("this transformers does not know it")
    config = transformers.DeepseekV4Config(**SMALL)
    with torch.device("meta"):
        made = transformers.DeepseekV4ForCausalLM(config).named_parameters()
    counted = sum(weights.numel() for name, weights in made if not any(part in name for part in NOT_COUNTED))
    spec = spec_from_hf_config(SMALL)
    assert spec.parameters == pytest.approx(counted, abs=spec.num_layers)  # indexers are an average of layers
    saved = {**config.to_dict(), "architectures": SMALL["architectures"]}
    assert "compress_ratios" not in saved
    saved = json.loads(json.dumps(saved))  # its names become text, as they are in a file
    assert spec_from_hf_config(saved).latent == spec.latent


def test_a_token_leaves_entries_and_a_request_a_window() -> None:
    """By hand from Flash's config.json: 21 layers have an entry for 4 tokens, 20 have one for 128, 2 have none."""
    assert FLASH.kv_bytes_per_token(2) == round(21 * (2 * 512 + 128 + 4) / 4 + 20 * 2 * 512 / 128)
    in_fp8 = 448 + 2 * 64 + 8
    assert FLASH.kv_bytes_per_token(1) == round(21 * (in_fp8 + 132) / 4 + 20 * in_fp8 / 128) == 3850
    assert isinstance(FLASH.latent, CompressedAttention)
    states = 21 * 4 * (2 * 2 * (512 + 128)) * (8 + 3) + 20 * 4 * (2 * 512) * (128 + 7)
    assert FLASH.latent.request_bytes(1) == 43 * in_fp8 * (127 + 64) + states


@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "DeepSeek-V4-Pro"])
@pytest.mark.parametrize("kept_in", ["auto", "fp8"])
def test_a_request_holds_blocks_for_its_window(name: str, kept_in: Any) -> None:
    spec, asked = find_model(name), Deployment(model=name, kv_cache_dtype=kept_in, tensor_parallel_size=8)
    assert isinstance(spec.latent, CompressedAttention)
    known = with_states(spec, asked)
    assert with_states(spec, known) == known and known.scheduler.enable_prefix_caching
    block = kv_capacity(spec, find_gpu("B300"), asked).block
    width = 1 if kept_in == "fp8" else 2
    assert block == pytest.approx(256 * spec.latent.cache_bytes(width, spec.num_layers), rel=1e-4)
    constant = (most_held(known.scheduler, 1024) - 4) * block
    assert constant - block < spec.latent.request_bytes(width) <= constant


def test_prefixes_are_shared_beside_the_windows() -> None:
    config = SchedulerConfig(block_size=8, num_blocks=33, state_blocks=3, async_scheduling=False)
    scheduler = VllmScheduler(config)
    for id in (0, 1):
        scheduler.add(WorkloadRequest(id, 0, (("system", 20),), 4))
        plan = scheduler.schedule()
        assert plan.prefill_tokens == (4 if id else 20)
        assert scheduler.pool.total - scheduler.pool.free == 3 + 3 + id * (3 + 1)
        scheduler.commit(plan)


def test_a_query_sees_its_window_and_chosen_entries() -> None:
    near, far = (operations(uniform_step(16, context, 0, 0, 0)) for context in (4_000, 40_000))
    seen = 16 * 64 * 2 * (512 + 512)
    assert near["decode attention (window)"].flops == far["decode attention (window)"].flops == seen * 128
    assert far["decode attention (1 for 4)"].flops == seen * (128 + 512)
    assert far["decode attention (1 for 128)"].flops == seen * (128 + 40_001 / 128)
    assert far["decode index"].flops == 2 * 16 * 40_001 / 4 * 64 * 128
    prompt = operations(uniform_step(0, 0, 1, 1000, 30_000))
    assert prompt["prefill attention (1 for 4)"].flops == 64 * 2 * 1024 * 1000 * (128 + 512)


@given(st.integers(0, 256), st.integers(1, 30_000), st.integers(0, 2), st.integers(2, 3000), st.sampled_from([1, 2, 8]))
def test_more_work_costs_more(rows: int, context: int, prompts: int, chunk: int, tp: int) -> None:
    def work(*sizes: int) -> np.ndarray[Any, Any]:
        priced = operations(uniform_step(*sizes), tensor_parallel_size=tp).values()
        return np.array([sum(one.count * np.array([one.flops, one.bytes]) for one in priced)])

    least = work(rows, context, prompts, chunk, 0)
    more = [(1, 0, 0, 0, 0), (0, 64, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 64, 0), (0, 0, 0, 0, 64)]
    for bigger in more:
        assert np.all(work(*np.add((rows, context, prompts, chunk, 0), bigger).tolist()) >= least)


@pytest.mark.parametrize("gpu", ["H200", "B300", "L4"])
def test_no_operation_is_faster_than_the_roofline(gpu: str) -> None:
    device = find_gpu(gpu)
    kernels = load_kernels(device)
    for operation in operations(uniform_step(16, 9000, 2, 500, 5000), tensor_parallel_size=4).values():
        assert np.all(np.asarray(kernels.time(operation).ns) >= floor_ns(device, operation) * (1 - 1e-9))


@pytest.mark.parametrize(
    ("name", "width"),
    [("DeepSeek-V4-Flash", 17 / 32), ("nvidia/DeepSeek-V4-Flash-NVFP4", 9 / 16), ("DeepSeek-V4-Flash-FP8", 1)],
)
def test_editions_differ_in_their_experts(name: str, width: float) -> None:
    spec = find_model(name)
    (experts,), (queries,) = (stored(spec, Deployment(), of, 43) for of in ("experts", "qkv"))
    assert (experts.width, queries.width) == (width, 1)


def test_gemms_read_the_weights_there_are() -> None:
    """Attention's of all layers, but for norms; embeddings and experts are elsewhere."""
    step = operations(uniform_step(1, 100, 0, 0, 0))
    attention = [step[name] for name in step if name.endswith(("down", "up", "out", "queries", "for 4)", "for 128)"))]
    read = sum(
        one.count * one.n * one.k * getattr(one, "heads", 1)
        for one in attention
        if isinstance(one, Gemm) and "shared" not in one.name
    )
    mixing = 2 * 43 * 24 * 4 * 4096
    kept = 43 * FLASH.attention_parameters + FLASH.plain_parameters - mixing
    assert read == pytest.approx(kept, rel=1e-4)


def test_stages_and_the_draft_module_have_their_layers() -> None:
    stages = stage_models(FLASH, 3)
    kinds = [stage.latent.compress_ratios for stage in stages if isinstance(stage.latent, CompressedAttention)]
    assert isinstance(FLASH.latent, CompressedAttention) and sum(kinds, ()) == FLASH.latent.compress_ratios
    module = draft_module(FLASH)
    assert isinstance(module.latent, CompressedAttention) and module.latent.compress_ratios == (0,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"o_lora_rank": None}, "o_lora_rank.*is missing"),
        ({"compress_ratios": [0, 4]}, "must name 4 layers"),
        ({"compress_ratios": [0, 4, 8, 4]}, "must be 0, 4 or 128"),
    ],
)
def test_other_compression_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        spec_from_hf_config({**SMALL, **changes})


def run(*arguments: str) -> str:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False).output


def made_trace(path: Path) -> str:
    lengths = ["--prompt", "500", "--output", "8", "--arrivals", "poisson:rate=4"]
    run("trace", "synth", str(path), "--requests", "12", *lengths)
    return str(path)


def test_commands_answer(tmp_path: Path) -> None:
    inspected = run("model", "inspect", ENGINE[3], "--gpu", "H200", "--tp", "4", "--kv-cache-dtype", "fp8")
    assert "19 more blocks of each request" in inspected
    assert '"compressor (1 for 128)"' in run("explain", *ENGINE, "--tensor-parallel-size", "4", "--format", "json")
    trace = made_trace(tmp_path / "t.jsonl")
    out = run("simulate", trace, *ENGINE, "--tensor-parallel-size", "4", "--no-band", "-o", str(tmp_path / "run"))
    assert "12 finished" in out and "extrapolated" in out


@pytest.mark.deep
def test_plan_answers(tmp_path: Path) -> None:
    slos = ["--slo", "ttft_ms p99<=5000", "--tp", "4", "--format", "json"]
    assert '"recommended"' in run("plan", made_trace(tmp_path / "t.jsonl"), *ENGINE, *slos)
