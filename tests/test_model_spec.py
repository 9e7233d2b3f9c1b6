"""ModelSpec: what Hugging Face configs of transformers 4 and 5 mean, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from serving.errors import UserError
from serving.model_spec import ModelSpec, RopeScaling

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_NEEDED = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config({**BASE, **changes})


def test_llama_3_1_8b_has_the_sizes_its_makers_state() -> None:
    llama = spec(rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert llama.parameters == 8_030_261_248
    assert llama.weight_bytes(2) == 2 * 8_030_261_248
    assert llama.kv_bytes_per_token(2) == 131_072
    assert llama.head_dim == 128
    assert llama.eos_ids == (128001, 128008, 128009)
    assert (llama.rope_theta, llama.rope_scaling) == (
        500000.0,
        RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192),
    )


def test_qwen2_5_0_5b_and_qwen3_0_6b_have_the_sizes_their_makers_state() -> None:
    qwen2 = spec(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=151936,
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        tie_word_embeddings=True,
        sliding_window=4096,
        use_sliding_window=False,
    )
    assert (qwen2.parameters, qwen2.qkv_bias, qwen2.qk_norm) == (494_032_768, True, False)
    qwen3 = spec(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )
    assert (qwen3.parameters, qwen3.qkv_bias, qwen3.qk_norm) == (596_049_920, False, True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {"rope_parameters": {"rope_theta": 500000.0}, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_both_generations_of_rope_fields_mean_the_same(rope: dict[str, Any]) -> None:
    assert spec(**rope) == spec(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})


@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_scaling": None}, {"rope_parameters": None}, {"rope_parameters": {"rope_type": "default"}}],
)
def test_rope_is_plain_unless_scaled(rope: dict[str, Any]) -> None:
    assert (spec(**rope).rope_theta, spec(**rope).rope_scaling) == (10000.0, None)


def test_absent_fields_take_the_defaults_of_transformers() -> None:
    config = {key: value for key, value in BASE.items() if key in _NEEDED}
    plain = ModelSpec.from_hf_config(config)
    assert (plain.num_kv_heads, plain.head_dim, plain.tied_embeddings, plain.eos_ids) == (32, 128, False, ())


@pytest.mark.parametrize("field", _NEEDED)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(UserError, match=field) as caught:
        ModelSpec.from_hf_config({key: value for key, value in BASE.items() if key != field})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures", "'MixtralForCausalLM': is not one of Llama"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures", "is not one of"),
        ({"architectures": 3}, "architectures", "is not one of"),
        ({"architectures": [[]]}, "architectures", "is not one of"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "default and llama3 are"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type", "'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type", "'dynamic'"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "dictionary"),
        ({"rope_parameters": [1]}, "rope_parameters", "dictionary"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor", "valid number"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling", "must be above"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor", "0.25"),
        ({"rope_theta": 0}, "rope_theta", "greater than 0"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window", "lower that to 4096"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": True},
            "sliding_window",
            "use null",
        ),
        ({"sliding_window": "wide"}, "sliding_window", "valid integer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "unquantised"),
        ({"hidden_act": "gelu"}, "hidden_act", "only silu"),
        ({"mlp_bias": True}, "mlp_bias", "not supported"),
        ({"attention_bias": True}, "attention_bias", "only in the QKV of Qwen2"),
        ({"num_attention_heads": 0}, "num_attention_heads", "greater than or equal to 1"),
        ({"num_attention_heads": "many"}, "num_attention_heads", "valid integer"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "does not divide num_attention_heads, 32"),
        ({"head_dim": 65}, "head_dim", "multiple of 2"),
        ({"num_hidden_layers": -1}, "num_layers", "greater than"),
        ({"eos_token_id": "end"}, "eos_token_id", "valid integer"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        spec(**changes)
    message = str(caught.value)
    assert message.startswith(f"model.{field}")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("config", [[], None, "llama", 3])
def test_a_config_that_is_no_object_is_refused(config: object) -> None:
    with pytest.raises(UserError, match="JSON object"):
        ModelSpec.from_hf_config(config)


def test_a_mistral_window_as_wide_as_the_positions_is_no_window() -> None:
    mistral = spec(architectures=["MistralForCausalLM"], sliding_window=4096, max_position_embeddings=4096)
    assert (mistral.family, mistral.max_positions) == ("mistral", 4096)


def test_a_silent_mistral_config_has_transformers_window() -> None:
    with pytest.raises(UserError, match="4096"):
        spec(architectures=["MistralForCausalLM"])
    assert spec(architectures=["MistralForCausalLM"], sliding_window=None).family == "mistral"
    assert spec(architectures=["MistralForCausalLM"], max_position_embeddings=4096).family == "mistral"
