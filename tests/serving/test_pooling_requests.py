"""Pooling requests in the scheduler: they end with their prompt, and are planned as requests of one token."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.serving.test_policies import decisions, tight, traffic
from tests.serving.test_scheduler_properties import LOOPS
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import with_kv_groups
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.no_pool import NoPool
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Status
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import WorkloadRequest


def pooling(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    return [replace(request, output_len=0, max_tokens=None) for request in requests]


@examples(0.5)
@given(st.integers(0, 2**32), LOOPS, st.sampled_from(["vllm", "prefill-first", "sarathi", "priority-ageing", "edf"]))
def test_it_is_planned_as_a_request_of_one_token(seed: int, loop: tuple[int, bool], policy: str) -> None:
    """A single token is never computed, so both need the same blocks; both end with the step that ends the prompt."""
    chance = random.Random(seed)
    depth, overlapped = loop
    config = tight(chance, async_scheduling=overlapped, long_prefill_token_threshold=chance.choice([0, 3]))
    asked = [one for one in traffic(chance, 15) if one.prompt_len < config.max_model_len]
    single = [replace(request, output_len=1, max_tokens=None) for request in pooling(asked)]
    assert decisions(policy, config, pooling(asked), depth) == decisions(policy, config, single, depth)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_it_beside_others(policy: str) -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, block_size=4, num_blocks=60, max_model_len=128)
    mixed = [one if one.id % 2 else replace(one, output_len=0) for one in traffic(random.Random(1), 20)]
    served = {id for _, rows, _ in decisions(policy, config, mixed) for id, _ in rows}  # type: ignore[misc]
    assert served == {one.id for one in mixed if one.prompt_len + one.output_len <= 128}


def test_a_step_that_ends_prompts_samples_for_nobody() -> None:
    scheduler = VllmScheduler(SchedulerConfig(max_num_batched_tokens=8))
    one, two = (scheduler.add(WorkloadRequest(id, 0, (("", 6),), 0)) for id in range(2))
    plan = scheduler.schedule()
    assert (plan.prefill_tokens, plan.sampled_rows) == (8, 0)
    assert scheduler.commit(plan) == [one] and (one.status, one.outputs) == (Status.FINISHED, 0)
    plan = scheduler.schedule()
    assert scheduler.commit(plan) == [two] and not scheduler.requests
    assert scheduler.pool.free == scheduler.pool.total


def test_the_prompt_may_be_as_long_as_the_model_allows() -> None:
    scheduler = VllmScheduler(SchedulerConfig(max_model_len=64))
    assert scheduler.add(WorkloadRequest(0, 0, (("", 64),), 0)).status is Status.WAITING
    assert scheduler.add(WorkloadRequest(1, 0, (("", 65),), 0)).status is Status.REJECTED
    assert scheduler.add(WorkloadRequest(2, 0, (("", 64),), 1)).status is Status.REJECTED


ENCODER = {"kv_reservation": "none", "enable_chunked_prefill": False, "enable_prefix_caching": False}


def test_an_encoder_holds_no_blocks_and_gives_no_tokens() -> None:
    scheduler = VllmScheduler(SchedulerConfig(num_blocks=2, max_model_len=512, max_num_batched_tokens=1024, **ENCODER))
    assert isinstance(scheduler.pool, NoPool)
    asked = [scheduler.add(WorkloadRequest(id, 0, (("", 500),), 0)) for id in range(5)]
    seen = []
    while (plan := scheduler.schedule()).tokens:
        assert scheduler.pool.free == scheduler.pool.total == 1
        seen.append(plan.prefill_rows)
        scheduler.commit(plan)
    assert seen == [2, 2, 1] and all(one.status is Status.FINISHED for one in asked)
    refused = scheduler.add(WorkloadRequest(9, 0, (("", 5),), 3))
    assert refused.status is Status.REJECTED and "gives no output tokens" in refused.reason


@pytest.mark.parametrize(
    ("model", "gpu", "settings"),
    [
        ("bge-large-en-v1.5", "L4", (512, 2048, False, False, "none")),
        ("bge-m3", "L4", (8192, 8192, False, False, "none")),
        ("bge-m3", "H200", (8192, 8192, False, False, "none")),
        ("gte-Qwen2-7B-instruct", "H100", (8192, 8192, False, False, "none")),
        ("Qwen3-Embedding-0.6B", "L4", (8192, 2048, True, True, "paged")),
    ],
)
def test_settings_follow_from_the_model_as_in_vllm(model: str, gpu: str, settings: tuple) -> None:
    """Length, token budget, chunked prefill, prefix caching and KV; async scheduling is off for all of them."""
    config = with_kv_groups(with_engine_defaults(Deployment(model=model), find_gpu(gpu))[0]).scheduler
    assert settings[:1] + settings[2:] == (
        config.max_model_len, config.enable_chunked_prefill, config.enable_prefix_caching, config.kv_reservation
    )  # fmt: skip
    assert config.max_num_batched_tokens >= settings[1] and not config.async_scheduling
    assert with_kv_groups(Deployment(model=model, scheduler=config)).scheduler == config


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ({"max_model_len": 1024}, "max_model_len: 1024: must be at most 512"),
        ({"max_num_batched_tokens": 100}, "max_num_batched_tokens: 100: must be at least max_model_len 512"),
        ({"long_prefill_token_threshold": 9}, "reads a prompt in one step"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(scheduler: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        with_kv_groups(Deployment(model="bge-large-en-v1.5", scheduler=SchedulerConfig(**scheduler)))
    with pytest.raises(UserError, match="needs enable_chunked_prefill false"):
        parse(SchedulerConfig, {**ENCODER, "enable_chunked_prefill": True}, "scheduler")


def test_an_encoder_needs_memory_for_weights_and_activations_only() -> None:
    spec, deployment = find_model("bge-large-en-v1.5"), with_kv_groups(Deployment(model="bge-large-en-v1.5"))
    capacity = kv_capacity(spec, find_gpu("L4"), deployment)
    assert (capacity.block, capacity.num_blocks, capacity.sampler) == (0, 2, 0)
    assert capacity.weights == pytest.approx(2 * 334e6, rel=0.01)
    capacity.check(deployment)
