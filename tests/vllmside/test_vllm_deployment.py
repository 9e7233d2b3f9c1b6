"""vLLM's configuration as a deployment, from stand-ins of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.vllmside.record_settings import record_settings
from tokentwin.vllmside.vllm_deployment import read_deployment
from tokentwin.vllmside.vllm_interface import check_interface, release


class FullAttentionSpec(SimpleNamespace):
    """A stand-in that is recognised by its name."""


class SlidingWindowSpec(SimpleNamespace):
    """A stand-in that is recognised by its name."""


class MambaSpec(SimpleNamespace):
    """A stand-in that is recognised by its name."""


def config(**changes: Any) -> Any:
    """Return the part of a `VllmConfig` that is read, with changes named `part__name`."""
    parts: dict[str, dict[str, Any]] = {
        "scheduler_config": {
            "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_num_scheduled_tokens": None,
            "enable_chunked_prefill": True, "long_prefill_token_threshold": 0, "policy": "priority",
            "async_scheduling": True, "scheduler_reserve_full_isl": True, "watermark": 0.01,
        },
        "cache_config": {"enable_prefix_caching": True, "cache_dtype": "fp8", "prefix_cache_retention_interval": None},
        "model_config": {
            "model": "Qwen/Qwen3-32B", "max_model_len": 4096, "dtype": "torch.float16", "enforce_eager": False,
            "quantization": None, "hf_config": SimpleNamespace(), "is_moe": False,
        },
        "parallel_config": {
            "tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 3,
            "enable_expert_parallel": False,
        },
        "device_config": {"device_type": "cuda"},
    }  # fmt: skip
    whole: dict[str, Any] = {"speculative_config": None, "lora_config": None, "kv_transfer_config": None}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        (parts[part] if field else whole)[field or part] = value
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()}, **whole)


def cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    return SimpleNamespace(num_blocks=1000, kv_cache_groups=groups)


def read(kv_cache: Any = None, version: str = "0.33.0", **changes: Any) -> tuple[Deployment, Mapping[str, str]]:
    found = read_deployment(config(**changes), kv_cache or cache(), 16, version)
    text = yaml.safe_dump(found.deployment.model_dump(mode="json"))
    assert parse(Deployment, yaml.safe_load(text), where="again", typed=True) == found.deployment
    return found.deployment, found.unmodelled


def test_what_a_server_has_resolved_is_a_deployment() -> None:
    deployment, unmodelled = read()
    assert not unmodelled
    assert (deployment.model, deployment.engine, deployment.device) == ("Qwen/Qwen3-32B", "vllm 0.33.0", "cuda")
    assert (deployment.dtype, deployment.kv_cache_dtype, deployment.quantization) == ("float16", "fp8", "none")
    assert (deployment.tensor_parallel_size, deployment.pipeline_parallel_size) == (4, 2)
    assert deployment.data_parallel_size == 1  # dense engines share nothing
    scheduler = deployment.scheduler
    assert (scheduler.num_blocks, scheduler.block_size, scheduler.max_model_len) == (1000, 16, 4096)
    assert scheduler.async_scheduling and scheduler.cut_at_max_model_len and scheduler.watermark == 0.01
    assert (scheduler.max_num_seqs, scheduler.policy, scheduler.kv_groups) == (64, "priority", ())
    assert not scheduler.self_preemption_ends_step and read(version="0.32.0")[0].scheduler.self_preemption_ends_step


def test_windows_and_drafts() -> None:
    drafts = SimpleNamespace(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4)
    changes = {"parallel_config__pipeline_parallel_size": 1, "speculative_config": drafts}
    deployment, _ = read(cache(SlidingWindowSpec(sliding_window=128), FullAttentionSpec()), **changes)
    assert deployment.scheduler.kv_groups == (128, 0)
    assert deployment.scheduler.prefix_cache_retention_interval is None
    assert deployment.scheduler.speculative is not None
    assert deployment.scheduler.speculative.prompt_lookup == (2, 4)


def test_adapters_and_images() -> None:
    lora = SimpleNamespace(max_loras=2, max_lora_rank=8, max_cpu_loras=5, target_modules=["o_proj", "lm_head"])
    changes = {"parallel_config__pipeline_parallel_size": 1, "lora_config": lora}
    found = read_deployment(config(**changes), cache(), 16, "0.32.0", encoder=(900, 900))
    adapters, images = found.deployment.lora, found.deployment.multimodal
    assert adapters is not None and images is not None
    assert (adapters.max_loras, adapters.max_lora_rank, adapters.max_cpu_loras) == (2, 8, 5)
    assert found.unmodelled == {"lora_config.target_modules": "o_proj, lm_head"}
    settings = found.deployment.staged_settings
    assert settings.adapter_slots_by_step and settings.encoder_holds_queue  # as vLLM before 0.33
    assert (settings.max_num_encoder_input_tokens, settings.encoder_cache_size) == (900, 900)


def test_an_encoder_of_texts_keeps_no_kv() -> None:
    changes = {"cache_config__enable_prefix_caching": False, "scheduler_config__enable_chunked_prefill": False}
    nothing = SimpleNamespace(num_blocks=1, kv_cache_groups=[])
    scheduler = read(nothing, **changes, scheduler_config__max_num_batched_tokens=4096)[0].scheduler
    assert scheduler.kv_reservation == "none" and not scheduler.enable_prefix_caching


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_config": SimpleNamespace(method="medusa")}, {"speculative_config.method": "medusa"}),
        ({"cache_config__cache_dtype": "turboquant"}, {"cache_dtype": "turboquant"}),
        ({"model_config__quantization": "awq"}, {"quantization": "awq"}),
        ({"device_config__device_type": "xpu"}, {"device_type": "xpu"}),
    ],
)
def test_what_a_deployment_has_no_word_for_is_named(changes: dict[str, Any], named: dict[str, str]) -> None:
    assert read(**changes)[1] == named


def test_layers_with_another_kind_of_state_are_named() -> None:
    assert read(cache(MambaSpec(), FullAttentionSpec()))[1] == {"kv_cache_groups": "MambaSpec"}


def test_quantisation_is_as_stored_unless_vllm_quantises() -> None:
    assert read(model_config__quantization="fp8")[0].quantization == "fp8"
    stored = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    assert read(model_config__quantization="fp8", model_config__hf_config=stored)[0].quantization == "none"


def test_where_a_recording_goes() -> None:
    assert record_settings({"tokentwin": {"record": "a", "policy": "fair"}}, {"TOKENTWIN_RECORD": "b"}).record == "a"
    assert record_settings({}, {"TOKENTWIN_RECORD": "b"}).record == "b"
    with pytest.raises(UserError, match=r"additional_config.tokentwin.record: is missing; add"):
        record_settings({}, {})
    with pytest.raises(UserError, match="is not a setting; did you mean record"):
        record_settings({"tokentwin": {"recrd": "a"}}, {"TOKENTWIN_RECORD": "b"})


class _Scheduler:
    def schedule(self) -> None: ...


def test_versions(caplog: pytest.LogCaptureFixture) -> None:
    assert release("0.32.0+cpu") == "0.32.0"
    check_interface("0.32.1", [(_Scheduler, ["schedule"])])
    assert not caplog.messages
    check_interface("0.99.0", [(_Scheduler, ["schedule"])])
    assert "0.99.0 was never tried" in caplog.text
    with pytest.raises(UserError, match="has another scheduler"):
        check_interface("0.99.0", [(_Scheduler, ["plan"])])
