"""The settings that our schedulers get in vLLM, and those that are refused when vLLM starts, without vLLM."""

from types import SimpleNamespace as Object
from typing import Any

import pytest

from tokentwin.serving.errors import UserError
from tokentwin.vllmside.scheduler_settings import policy_and_settings, request_not_carried


class FullAttentionSpec:
    block_size = 16


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    block_size = 16


class SlidingWindowSpec:
    block_size = 16
    sliding_window = 64


def configuration(**changes: Any) -> Object:
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "policy": "priority", "async_scheduling": None}
    scheduler |= {"watermark": 0.1, "long_prefill_token_threshold": 64, "enable_chunked_prefill": True}
    parts: dict[str, Any] = {
        "scheduler_config": Object(**scheduler),
        "model_config": Object(max_model_len=1024, runner_type="generate"),
        "cache_config": Object(enable_prefix_caching=True),
        "parallel_config": Object(pipeline_parallel_size=1, data_parallel_size=1),
        "observability_config": Object(kv_cache_metrics=False),
        "additional_config": {},
    }
    return Object(**parts | changes)


def asked(whole: Object, *specs: type, version: str = "0.33.0", hash_block_size: int = 16) -> Any:
    groups = [Object(kv_cache_spec=spec()) for spec in specs or (FullAttentionSpec,)]
    return policy_and_settings(whole, Object(num_blocks=99, kv_cache_groups=groups), 16, hash_block_size, version)


def test_vllm_decides_what_it_has_a_setting_for() -> None:
    name, settings = asked(configuration(), MLAAttentionSpec)
    assert (name, settings.policy, settings.max_num_seqs, settings.num_blocks) == ("vllm", "priority", 8, 99)
    assert (settings.watermark, settings.long_prefill_token_threshold, settings.max_model_len) == (0.1, 64, 1024)
    assert settings.cut_at_max_model_len and not settings.async_scheduling and not settings.kv_groups


def test_settings_of_ours_come_beside_the_policys_name() -> None:
    ours = {"policy": "edf", "scheduler": {"edf_ttft_ms": {"chat": 500}}}
    name, settings = asked(configuration(additional_config={"tokentwin": ours, "other": 1}))
    assert (name, settings.edf_ttft_ms) == ("edf", {"chat": 500})


def test_a_model_with_windows_has_groups() -> None:
    _, settings = asked(configuration(), FullAttentionSpec, SlidingWindowSpec)
    assert settings.kv_groups == (0, 64)


@pytest.mark.parametrize(("version", "ends"), [("0.33.0", False), ("0.32.0+cpu", True), ("0.20.2", True)])
def test_the_release_says_what_a_request_does_that_preempts_itself(version: str, ends: bool) -> None:
    assert asked(configuration(), version=version)[1].self_preemption_ends_step is ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_config": object()}, "speculative_config: 'set': cannot be combined"),
        ({"kv_transfer_config": object()}, "kv_transfer_config: "),
        ({"ec_transfer_config": object()}, "ec_transfer_config: "),
        ({"lora_config": object()}, "lora_config: "),
        ({"kv_events_config": Object(enable_kv_cache_events=True)}, "kv_events_config.enable_kv_cache_events: True: "),
        ({"parallel_config": Object(pipeline_parallel_size=2)}, "pipeline_parallel_size: 2: "),
        ({"observability_config": Object(kv_cache_metrics=True)}, "kv_cache_metrics: True: "),
        ({"model_config": Object(runner_type="pooling", max_model_len=9)}, "runner: 'pooling': "),
        (
            {"model_config": Object(runner_type="generate", max_model_len=9, supports_multimodal_inputs=True)},
            "model: supports_multimodal_inputs: True: ",
        ),
        ({"additional_config": {"tokentwin": "fair"}}, "additional_config.tokentwin: 'fair': must be a mapping"),
        ({"additional_config": {"tokentwin": {"polcy": "fair"}}}, "additional_config.tokentwin.polcy: 'fair': is not"),
        (
            {"additional_config": {"tokentwin": {"scheduler": {"max_num_seqs": 3}}}},
            "additional_config.tokentwin.scheduler.max_num_seqs: 3: is vLLM's to set",
        ),
        (
            {"additional_config": {"tokentwin": {"scheduler": {"ageing": 3}}}},
            "additional_config.tokentwin.scheduler.ageing: 3: is not a setting",
        ),
        (
            {"additional_config": {"tokentwin": {"scheduler": {"state_blocks": 3}}}},
            "additional_config.tokentwin.scheduler.state_blocks: 3: has no meaning",
        ),
    ],
)
def test_what_cannot_be_carried_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        asked(configuration(**changes))
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_other_kv_caches_are_refused() -> None:
    with pytest.raises(UserError, match=r"^KV cache of the model: 'MambaSpec': "):
        asked(configuration(), FullAttentionSpec, MambaSpec)
    with pytest.raises(UserError, match=r"^hash_block_size: 8: "):
        asked(configuration(), hash_block_size=8)


def test_what_a_request_brings_is_named() -> None:
    plain = {"pooling_params": None, "lora_request": None, "mm_features": [], "prompt_token_ids": [1]}
    assert request_not_carried(Object(**plain)) == ""
    wanted = {"structured_output_request": object(), "lora_request": object()}
    assert request_not_carried(Object(**plain | wanted)) == "structured output, LoRA"
