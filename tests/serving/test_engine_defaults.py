"""What an engine does by default: the settings of its server, by engine, release and GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.engine_defaults import engine_defaults, with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import most_held
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError

NAMES = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling")


def deployment(**stated: Any) -> Deployment:
    return parse(Deployment, {"model": "Llama-3.1-8B", "device": "cuda", **stated}, where="deployment")


@pytest.mark.parametrize(
    ("gpu", "stated", "wanted"),
    [
        ("H100", {}, (1024, 8192, True)),
        ("H200", {}, (1024, 8192, True)),
        ("RTX-PRO-6000", {}, (1024, 8192, True)),
        ("A100-80G", {}, (256, 2048, True)),
        ("L40S", {}, (256, 2048, True)),
        ("B200", {}, (1024, 16384, True)),
        ("MI300X", {}, (1024, 16384, True)),
        ("B200", {"engine": "vllm 0.19.0"}, (1024, 8192, True)),
        ("H100", {"engine": "vllm 0.13"}, (1024, 8192, False)),
        ("H100", {"engine": "vllm 0.14.1"}, (1024, 8192, True)),
        ("H100", {"pipeline_parallel_size": 2}, (1024, 8192, True)),
        ("H100", {"scheduler": {"max_model_len": 4}}, (1024, 4096, True)),
        ("H100", {"scheduler": {"max_num_seqs": 2, "max_model_len": 1024}}, (1024, 2048, True)),
        ("H100", {"scheduler": {"max_num_batched_tokens": 512}}, (512, 8192, True)),
        (
            "H200",
            {"data_parallel_size": 8, "enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"},
            (256, 256, True),
        ),
        ("L4", {"policy": "sglang"}, (256, 2048, True)),
        ("L40S", {"policy": "sglang"}, (256, 4096, True)),
        ("H100", {"policy": "sglang"}, (1024, 8192, True)),
        ("B200", {"engine": "sglang 0.5.6"}, (1024, 16384, True)),
        ("L40S", {"policy": "trtllm"}, (256, 8192, True)),
    ],
)
def test_an_engine_has_its_own_defaults_on_each_gpu(gpu: str, stated: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    defaults = engine_defaults(deployment(**stated), find_gpu(gpu))
    assert tuple(defaults[name] for name in NAMES) == wanted


def test_whole_prompts_have_a_budget_for_the_longest() -> None:
    whole = deployment(scheduler={"enable_chunked_prefill": False, "max_model_len": 2048})
    assert (
        engine_defaults(whole.rescheduled(max_model_len=40_000), find_gpu("H100"))["max_num_batched_tokens"] == 40_000
    )


def test_what_is_stated_stays_and_the_rest_is_told() -> None:
    stated = deployment(scheduler={"max_num_seqs": 64})
    made, line = with_engine_defaults(stated, find_gpu("H100"))
    assert [getattr(made.scheduler, name) for name in NAMES] == [64, 8192, True]
    taken = "defaults of vllm 0.33 on H100: max_num_batched_tokens 8,192, async_scheduling true, max_model_len 131,072"
    assert line == taken
    assert with_engine_defaults(made, find_gpu("L4")) == (made, "")


@pytest.mark.parametrize(
    ("gpu", "model", "longest"),
    [
        ("H100", "Llama-3.1-8B", 131_072),  # the model's
        ("L4", "Llama-3.1-8B", 28_704),  # as much as the KV cache holds
        ("T4", "Qwen3-8B", 8192),  # has no room at all, and is refused with the usual length
        ("H100", "Llama-2-7b", 4096),
    ],
)
def test_a_request_may_have_the_models_length_or_what_the_kv_cache_holds(gpu: str, model: str, longest: int) -> None:
    spec, stated = find_gpu(gpu), deployment(model=model)
    made, _ = with_engine_defaults(stated, spec)
    assert made.scheduler.max_model_len == longest
    if gpu == "L4":
        room = kv_capacity(find_model(model), spec, made).num_blocks
        assert most_held(made.scheduler, longest) < room == most_held(made.scheduler, longest + 1)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
        {"kv_reservation": "max_model_len", "enable_prefix_caching": False},
    ],
)
def test_what_is_never_split_keeps_the_usual_length(scheduler: dict[str, Any]) -> None:
    made, _ = with_engine_defaults(deployment(scheduler=scheduler), find_gpu("H100"))
    assert made.scheduler.max_model_len == 8192


def test_without_chunks_a_step_has_room_for_the_longest_prompt_unless_it_is_stated_to_have_less() -> None:
    whole = parse(Deployment, {"scheduler": {"enable_chunked_prefill": False, "max_model_len": 9216}}, where="x")
    assert whole.scheduler.max_num_batched_tokens == 9216
    with pytest.raises(UserError, match="must be at least max_model_len when enable_chunked_prefill is off"):
        scheduler = {"enable_chunked_prefill": False, "max_model_len": 9216, "max_num_batched_tokens": 2048}
        parse(Deployment, {"scheduler": scheduler}, where="x")
