"""Context parallelism: the share of each group in a step, KV, tables against operations, refusals, published times."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.context_parallel import share_of_step
from tokentwin.calibration.operations import StepSizes, uniform_step
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity, stage_weight_bytes
from tokentwin.serving.deployments.kv_layout import kv_tokens, with_states
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan


def engine(model: str, gpu: str, tp: int = 1, **more: Any) -> Deployment:
    stated = parse(Deployment, {"model": model, "device": "cuda", "tensor_parallel_size": tp, **more}, "engine")
    return with_states(find_model(model), with_engine_defaults(stated, find_gpu(gpu))[0])


def pieces(group: int, groups: int, tokens: int) -> list[range]:
    """Return the positions of the two pieces of a chunk that vLLM gives to a group (`PCPManager`)."""
    size = tokens // (2 * groups)
    return [range(at * size, (at + 1) * size) for at in (group, 2 * groups - 1 - group)]


@given(groups=st.integers(2, 8), size=st.integers(1, 40), past=st.integers(0, 300), prompts=st.integers(1, 3))
def test_every_group_computes_what_its_pieces_attend_to(groups: int, size: int, past: int, prompts: int) -> None:
    tokens = 2 * groups * size
    whole = uniform_step(0, 0, prompts, tokens, past)
    share = share_of_step(Deployment(prefill_context_parallel_size=groups), whole)
    for group in range(groups):
        own = pieces(group, groups, tokens)
        assert share.prefill_tokens == prompts * sum(map(len, own))
        assert share.prefill_rows == prompts * len(own)
        assert share.prefill_context == pytest.approx(prompts * sum(past + piece.start for piece in own))
        pairs = prompts * sum(past + at + 1 for piece in own for at in piece)
        assert share.prefill_pairs == pytest.approx(pairs)


@given(groups=st.integers(1, 8), rows=st.integers(0, 40), context=st.integers(1, 1000))
def test_decode_rows_go_round_the_groups(groups: int, rows: int, context: int) -> None:
    share = share_of_step(Deployment(prefill_context_parallel_size=groups), uniform_step(rows, context, 0, 0, 0))
    most = len(range(0, rows, groups))
    assert (share.decode_rows, share.decode_context) == (most, pytest.approx(most * context))


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "sizes"),
    [
        ("DeepSeek-V3", "H200", 8, {"decode_context_parallel_size": 8}),
        ("Qwen3-235B-A22B", "H200", 8, {"decode_context_parallel_size": 2}),
        ("Llama-3.1-8B", "H100", 1, {"prefill_context_parallel_size": 4}),
        ("Mixtral-8x7B", "H100", 4, {"prefill_context_parallel_size": 2}),
    ],
)
def test_kv_and_weights(model: str, gpu: str, tp: int, sizes: dict[str, int]) -> None:
    """Devices that share blocks have room for as many more tokens; groups that share prompts all hold the same."""
    spec, device = find_model(model), find_gpu(gpu)
    plain, shared = engine(model, gpu, tp), engine(model, gpu, tp, **sizes)
    (size,) = sizes.values()
    (before,), (after,) = (stage_weight_bytes(spec, one) for one in (plain, shared))
    blocks = [kv_capacity(spec, device, one).num_blocks for one in (plain, shared)]
    fitted = [one.rescheduled(num_blocks=many) for one, many in zip((plain, shared), blocks, strict=True)]
    tokens = [kv_tokens(one.scheduler) for one in fitted]
    if "decode_context_parallel_size" in sizes:
        assert before == after and shared.gpus == plain.gpus
        assert tokens[1] == pytest.approx(size * tokens[0], rel=0.001)
    else:
        experts = spec.num_experts * spec.expert_parameters * spec.moe_layers / tp * 2
        assert before - after == pytest.approx(experts * (1 - 1 / size)) and shared.gpus == size * plain.gpus
        assert tokens[1] > 0.95 * tokens[0]  # of which buffers of collectives take some


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "sizes"),
    [
        ("DeepSeek-V3", "H200", 8, {"decode_context_parallel_size": 4}),
        ("Qwen3-235B-A22B", "H200", 8, {"decode_context_parallel_size": 2}),
        ("Llama-3.1-70B", "H100", 4, {"prefill_context_parallel_size": 4}),
        ("DeepSeek-V3", "H200", 8, {"prefill_context_parallel_size": 2}),
    ],
)
def test_the_simulator_times_the_steps_that_explain_shows(model: str, gpu: str, tp: int, sizes: dict[str, int]) -> None:
    cost = predicted_cost(gpu, engine(model, gpu, tp, **sizes))
    for rows, context, prompts, past in ((96, 2047, 0, 0), (0, 0, 1, 4095), (48, 1023, 1, 0)):
        step = uniform_step(rows, context, prompts, 2048, past)
        plan = StepPlan.from_amounts(decode_squares=rows * context**2, **_amounts(step))
        assert cost.step_ns(plan) == pytest.approx(explain(cost, step).step_ns, rel=0.03)


def _amounts(step: StepSizes) -> dict[str, int]:
    return {name: int(value) for name, value in asdict(step).items() if name != "decode_spread"}


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"model": "Llama-3.1-8B", "tp": 8, "decode_context_parallel_size": 2}, "must divide 1, the number"),
        ({"model": "Qwen3-235B-A22B", "tp": 8, "decode_context_parallel_size": 4}, "must divide 2, the number"),
        ({"model": "DeepSeek-V3", "tp": 8, "decode_context_parallel_size": 3}, "must divide 8, the number"),
        ({"model": "GLM-5", "tp": 8, "decode_context_parallel_size": 2}, "indexer"),
        ({"model": "gpt-oss-120b", "prefill_context_parallel_size": 2}, "has a sliding window"),
        ({"model": "Qwen3.5-27B", "prefill_context_parallel_size": 2}, "has constant states"),
        ({"model": "DeepSeek-V3", "tp": 8, "prefill_context_parallel_size": 2, "decode_context_parallel_size": 8},
         "cannot be combined with decode_context_parallel_size"),
        ({"model": "DeepSeek-V3", "prefill_context_parallel_size": 2, "data_parallel_size": 2},
         "cannot be combined with data_parallel_size"),
        ({"model": "Llama-3.1-8B", "prefill_context_parallel_size": 2, "lora": {}}, "cannot be combined with lora"),
        ({"model": "DeepSeek-V3", "tp": 8, "decode_context_parallel_size": 8, "scheduler": {"block_size": 4}},
         "must be a multiple of decode_context_parallel_size 8"),
    ],
)  # fmt: skip
def test_what_is_not_simulated_is_refused(stated: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        engine(gpu="H200", **stated)


@pytest.mark.parametrize(
    ("tokens", "groups", "seconds"), [(131_072, 1, 60), (131_072, 16, 3.8), (1_048_576, 1, 1200), (1_048_576, 16, 77)]
)
def test_published_prompts_on_many_nodes_lie_in_the_band(tokens: int, groups: int, seconds: float) -> None:
    """Llama-3-405B in fp8 on nodes of eight H100 (Yang et al., arXiv:2411.01783, abstract and section 1)."""
    limits = {"max_num_batched_tokens": tokens, "max_model_len": tokens}
    stated = engine("Llama-3.1-405B-FP8", "H100", 8, prefill_context_parallel_size=groups, scheduler=limits)
    step = explain(predicted_cost("H100", stated), uniform_step(0, 0, 1, tokens, 0))
    low, high = (step.step_ns * factor / 1e9 for factor in step.interval)
    assert low <= seconds <= high
