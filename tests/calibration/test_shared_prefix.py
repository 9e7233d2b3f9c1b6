"""Steps that read the prefix of all their requests once, as old releases of vLLM do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.steps.shared_prefix import read_once, readable_prefix
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest, common_prefix

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"  # 32 query and 8 KV heads
PREFIX = 2048


def deployment(engine: str = "vllm 0.11", **scheduler: Any) -> Deployment:
    settings: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 256, "num_blocks": 20_000} | scheduler
    return Deployment.model_validate({"model": LLAMA, "engine": engine, "scheduler": settings})


def decode(rows: int, context: int) -> StepPlan:
    return StepPlan.from_amounts(
        decode_rows=rows, decode_context=rows * context, decode_squares=rows * context**2, sampled_rows=rows
    )


@pytest.mark.parametrize(
    ("engine", "gpu", "scheduler", "tokens"),
    [
        ("vllm 0.11", "H100", {}, PREFIX),
        ("vllm 0.17.1", "A100-80G", {"block_size": 48}, PREFIX // 48 * 48),
        ("vllm 0.18", "H100", {}, 0),
        ("vllm", "H100", {}, 0),
        ("sglang 0.5.6", "H100", {}, 0),
        ("vllm 0.11", "B200", {}, 0),
        ("vllm 0.11", "H100", {"enable_prefix_caching": False}, 0),
    ],
)
def test_only_old_releases_of_vllm_with_flash_attention_read_a_prefix_once(engine, gpu, scheduler, tokens):
    assert readable_prefix(PREFIX, find_model(LLAMA), deployment(engine, **scheduler), find_gpu(gpu)) == tokens


def test_a_short_prefix_or_a_sliding_window_is_read_by_every_row() -> None:
    assert readable_prefix(271, find_model(LLAMA), deployment(), find_gpu("H100")) == 256
    assert readable_prefix(255, find_model(LLAMA), deployment(), find_gpu("H100")) == 0
    assert readable_prefix(PREFIX, find_model("openai/gpt-oss-120b"), deployment(), find_gpu("H100")) == 0


def waves_differ(rows: int, prefix: int, heads: int, kv_heads: int, processors: int) -> bool:
    """Compare the two ways as vLLM's rule is published, in plain integers."""

    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    tiles = cdiv(prefix, 128)
    cascade = cdiv(heads * cdiv(rows, 128), processors) * tiles
    return cascade < cdiv(rows * kv_heads * cdiv(heads // kv_heads, 128) * tiles, processors)


@given(st.integers(8, 1024), st.integers(16, 512).map(lambda blocks: 16 * blocks), st.sampled_from([1, 2, 4, 8]))
def test_the_rule_is_vllms(rows: int, prefix: int, tp: int) -> None:
    model, gpu = find_model(LLAMA), find_gpu("H100")
    split = deployment().model_copy(update={"tensor_parallel_size": tp})
    expected = waves_differ(rows, prefix, 32 // tp, 8 // tp, gpu.sm_count)
    assert bool(read_once(rows, prefix, model, split, gpu)) == expected
    assert not read_once(7, prefix, model, split, gpu)


def test_a_step_reads_the_prefix_once_and_the_rest_of_every_row() -> None:
    cost = predicted_cost("H100", deployment())
    shared = cost.with_shared_prefix(PREFIX + 5)  # the last 5 tokens fill no block
    for rows, context in ((64, 3000), (192, 2200), (256, 8000)):
        read = PREFIX // rows + context - PREFIX  # per row
        assert shared.step_ns(decode(rows, context)) == pytest.approx(cost.step_ns(decode(rows, read)), rel=0.01)
    assert shared.step_ns(decode(4, 3000)) == cost.step_ns(decode(4, 3000))
    assert shared.scaled(1.1, 1.0).step_ns(decode(192, 3000)) < cost.scaled(1.1, 1.0).step_ns(decode(192, 3000))
    assert predicted_cost("H100", deployment("vllm 0.19")).with_shared_prefix(PREFIX).shared_prefix == 0


@pytest.mark.parametrize(("engine", "faster"), [("vllm 0.11", True), ("vllm 0.19", False)])
def test_a_simulation_takes_the_prefix_from_its_workload(engine: str, faster: bool) -> None:
    requests = [WorkloadRequest(n, 0, (("system", 4096), ("", 100)), 64) for n in range(128)]
    alone = [WorkloadRequest(n, 0, ((f"system {n % 2}", 4096), ("", 100)), 64) for n in range(128)]
    last = [
        max(price_scenario(Workload(some), None, "H100", deployment(engine)).requests()["finish_ns"].to_pylist())
        for some in (requests, alone)
    ]
    assert (last[0] < 0.85 * last[1]) == faster


def test_the_common_prefix_of_prompts() -> None:
    def prefix(*prompts: tuple[tuple[str, int], ...], skip: int | None = None) -> int:
        return common_prefix(
            WorkloadRequest(n, 0, prompt, 1, skip_reading_prefix_cache=n == skip) for n, prompt in enumerate(prompts)
        )

    system = ("system", 100)
    assert prefix((system, ("a", 5)), (system, ("b", 5))) == 100
    assert prefix((system, ("a", 5)), (system, ("a", 3)), (system, ("a", 4), ("b", 1))) == 103
    assert prefix((system, ("a", 5)), (("system", 40), ("a", 5))) == 40
    assert prefix((system, ("", 5)), (system, ("", 5))) == 100
    assert prefix((("", 5), system), (("", 5), system)) == 0
    assert prefix((system,), (system,), skip=0) == prefix((system,), (system,), skip=1) == 0
    assert prefix() == prefix((system,)) == 0
