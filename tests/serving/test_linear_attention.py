"""Layers with a constant state: what they weigh, what a request keeps of them, and that memory is never overdrawn."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import for_transfers, most_held, page_bytes, state_bytes, with_states
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.external import ExternalKv
from tokentwin.serving.policies.residents import kv_blocks
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.workload import PRIVATE, WorkloadRequest

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("architecture", ["Qwen3_5MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_parameters_are_those_that_transformers_makes(architecture: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = {**TEXT, "intermediate_size": 48}
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        made = model_class(model_class.config_class(**config))
    spec = spec_from_hf_config({"architectures": [architecture], **config})
    assert spec.parameters == sum(weights.numel() for weights in made.parameters())
    assert (spec.full_layers, spec.linear_layers) == (2, 6)


def test_the_text_model_is_read_beside_a_vision_tower() -> None:
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": True,
        "vision_config": {"depth": 27},
        "text_config": TEXT,
    }
    alone = {"architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": True, **TEXT}
    assert spec_from_hf_config(whole) == spec_from_hf_config(alone)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"linear_num_value_heads": None}, "linear_num_value_heads.*is missing"),
        ({"layer_types": ["linear_attention"] * 8}, "only beside layers of full attention"),
        ({"layer_types": ["sliding_attention"] * 8}, "only full_attention and linear_attention"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        spec_from_hf_config({"architectures": ["Qwen3_5MoeForCausalLM"], **TEXT, **changes})


def test_a_request_keeps_its_states_whatever_its_length() -> None:
    spec = find_model("Qwen3.5-397B-A17B")
    one = state_bytes(spec, Deployment())
    assert one == 4 * 64 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 64 * 128)  # float32 matrices, and three tokens of inputs
    assert state_bytes(spec, Deployment(tensor_parallel_size=8)) == one / 8
    drafting = SchedulerConfig.model_validate({"speculative": {"method": "ngram", "num_speculative_tokens": 3}})
    assert state_bytes(spec, Deployment(scheduler=drafting)) == 4 * one
    assert state_bytes(find_model("Qwen3-8B"), Deployment()) == 0


@given(
    st.sampled_from(["Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-397B-A17B"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(["auto", "fp8"]),
)
def test_a_block_is_no_smaller_than_a_state_and_no_longer_than_it_must_be(name, tp, block_size, kv_cache_dtype):
    spec, config = find_model(name), SchedulerConfig(block_size=block_size)
    asked = Deployment(model=name, tensor_parallel_size=tp, kv_cache_dtype=kv_cache_dtype, scheduler=config)
    started = with_states(spec, asked)
    assert started.scheduler.state_blocks == 3  # three layers of four, in groups as large as that of full attention
    assert started.scheduler.enable_prefix_caching and started.scheduler.mamba_cache_mode == "align"
    assert started.scheduler.block_size % block_size == 0
    page, least = page_bytes(spec, started), page_bytes(spec, asked)
    assert page - least < state_bytes(spec, asked) <= page
    assert with_states(spec, started) == started
    capacity = kv_capacity(spec, find_gpu("B300"), asked)
    assert capacity.block == page * spec.full_layers
    assert capacity.num_blocks == kv_capacity(spec, find_gpu("B300"), started).num_blocks


CACHES: dict[str, Any] = {"scheduler": {"enable_prefix_caching": True}}
DRAFTS: dict[str, Any] = {"scheduler": {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}}


@pytest.mark.parametrize(
    ("changes", "caches"),
    [
        ({}, True),
        ({"engine": "vllm 0.28"}, True),
        ({"engine": "vllm 0.26"}, False),  # asked to, it does
        ({"engine": "vllm 0.26", **CACHES}, True),
        ({"engine": "sglang"}, False),
        ({"policy": "trtllm"}, False),
        ({"pipeline_parallel_size": 2}, False),
        (DRAFTS, False),
        ({"scheduler": {"enable_prefix_caching": False}}, False),
    ],
)
def test_states_are_cached_as_vllm_does_by_default(changes: dict[str, Any], caches: bool) -> None:
    config = with_states(find_model("Qwen3.5-35B-A3B"), Deployment.model_validate(changes)).scheduler
    assert config.enable_prefix_caching == caches == config.caches_states
    assert not config.num_prefill_checkpoint_blocks


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": "sglang"}, "with engine sglang"),
        ({"pipeline_parallel_size": 2}, "with pipeline stages"),
        ({"scheduler": {**DRAFTS["scheduler"], **CACHES["scheduler"]}}, "with speculative decoding"),
        ({"scheduler": {"enable_chunked_prefill": False, **CACHES["scheduler"]}}, "without enable_chunked_prefill"),
    ],
)
def test_states_that_cannot_be_cached_are_refused_if_asked_for(changes: dict[str, Any], says: str) -> None:
    deployment = Deployment.model_validate({**CACHES, **changes})
    with pytest.raises(UserError, match=rf"^scheduler\.enable_prefix_caching: .* simulated {says} .*set it to false$"):
        with_states(find_model("Qwen3.5-35B-A3B"), deployment)


@pytest.mark.parametrize("name", ["Nemotron-3-Nano-30B-A3B", "granite-4.0-h-small"])
def test_state_spaces_write_a_state_within_a_step(name: str) -> None:
    assert with_states(find_model(name), Deployment()).scheduler.num_prefill_checkpoint_blocks == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_blocks": 0}, "needs state_blocks"),
        (DRAFTS["scheduler"], "no speculative"),
        ({"mamba_cache_mode": "none", "num_prefill_checkpoint_blocks": 1}, "needs mamba_cache_mode align"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SchedulerConfig(**{"state_blocks": 3, "mamba_cache_mode": "align", **changes})


def test_states_are_not_cached_beside_kv_from_outside() -> None:
    config = SchedulerConfig(state_blocks=3, mamba_cache_mode="align")
    assert config.caches_states and not for_transfers(config).caches_states
    with pytest.raises(UserError, match=r"^scheduler\.enable_prefix_caching: .*constant states; set it to false$"):
        VllmScheduler(config).connect(cast(ExternalKv, None))


@given(st.integers(1, 40), st.integers(0, 4), st.integers(1, 40), st.booleans(), st.integers(0, 1))
def test_a_request_holds_the_states_that_steps_read_and_write(blocks, rest, output, overlaps, checkpoints):
    """Of a request that is alone, in steps of at most five blocks of eight tokens."""
    config = SchedulerConfig(
        max_num_batched_tokens=40,
        block_size=8,
        num_blocks=500,
        state_blocks=2,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=checkpoints,
        async_scheduling=overlaps,
    )
    scheduler, prompt = VllmScheduler(config), 8 * blocks + rest
    request = scheduler.add(WorkloadRequest(0, 0, (("document", prompt),), output))
    planned, ends = [], set()
    while scheduler.requests:
        while len(planned) < 1 + overlaps:
            plan = scheduler.schedule()
            if not plan.tokens:
                break
            planned.append(plan)
            ends |= {row.start + row.tokens for row in plan.listed}
            held = scheduler.pool.total - scheduler.pool.free
            assert request.block_count + 2 <= held <= most_held(config, prompt + output - 1)
        scheduler.commit(planned.pop(0))
    last = (prompt - 1) // 8 * 8  # where a request with the same prompt can start
    assert checkpoints or not last or last in ends
    assert all(end % 8 == 0 for end in ends if end < last)
    again = scheduler.add(WorkloadRequest(1, 0, (("document", prompt), (PRIVATE, 9)), 1))
    assert scheduler.pool.lookup(again).blocks * 8 == last  # if the prompt ends with a block, its last state was passed


def test_devices_share_the_key_heads() -> None:
    with pytest.raises(UserError, match="must divide the 16 key heads"):
        kv_capacity(find_model("Qwen3.5-397B-A17B"), find_gpu("B200"), Deployment(tensor_parallel_size=32))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(0, 4),
    st.integers(12, 40),
    st.booleans(),
)
def test_states_are_held_from_admission_to_the_end(lengths, states, blocks, overlaps):
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=128,
        block_size=8,
        num_blocks=blocks + 1,
        state_blocks=states,
        enable_prefix_caching=False,
        async_scheduling=overlaps,
    )
    scheduler = VllmScheduler(config)
    for number, (prompt, output) in enumerate(lengths):
        request = scheduler.add(WorkloadRequest(number, 0, ((PRIVATE, prompt),), output))
        assert (request.reason == "") == (most_held(config, prompt + output - 1) <= blocks)
    pool, planned = scheduler.pool, []
    while scheduler.requests:
        while len(planned) < 1 + overlaps:
            plan = scheduler.schedule()
            assert pool.total >= pool.total - pool.free >= len(scheduler.running) * (states + 1)
            if not plan.tokens:
                break
            planned.append(plan)
        scheduler.commit(planned.pop(0))
    assert pool.free == pool.total == kv_blocks(config, False, None).free
