"""ModelSpec: what Hugging Face configs of transformers 4 and 5 mean, and what cannot be priced or run."""

from collections.abc import Sequence
from typing import Any

import pytest

from tokentwin.realengine.runnable import check_runnable
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.model_spec import ModelSpec, RopeScaling
from tokentwin.serving.errors import UserError

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
    return spec_from_hf_config({**BASE, **changes})


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
    "rope", [{}, {"rope_scaling": None}, {"rope_parameters": None}, {"rope_parameters": {"rope_type": "default"}}]
)
def test_rope_is_plain_unless_scaled(rope: dict[str, Any]) -> None:
    assert (spec(**rope).rope_theta, spec(**rope).rope_scaling) == (10000.0, None)


def test_absent_fields_take_the_defaults_of_transformers() -> None:
    config = {key: value for key, value in BASE.items() if key in _NEEDED}
    plain = spec_from_hf_config(config)
    assert (plain.num_kv_heads, plain.head_dim, plain.tied_embeddings, plain.eos_ids) == (32, 128, False, ())


@pytest.mark.parametrize("field", _NEEDED)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(UserError, match=field) as caught:
        spec_from_hf_config({key: value for key, value in BASE.items() if key != field})
    assert "\n" not in str(caught.value)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
PACKED = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}}}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}},
}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 32,
}


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "kv_lora_rank", "a deepseek_v3 model needs it"),
        ({**LATENT, "v_head_dim": None}, "v_head_dim", "is missing"),
        ({**LATENT, "n_routed_experts": None}, "n_routed_experts", "is missing"),
        ({**LATENT, "qk_rope_head_dim": 63}, "qk_rope_head_dim", "multiple of 2"),
        ({**LATENT, "n_group": 7, "topk_group": 2}, "", "expert_groups must divide 64 experts"),
        ({**LATENT, "n_group": 32, "topk_group": 1}, "", "must hold 4 experts"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim", "is missing"),
        ({"architectures": ["DeepseekV41ForCausalLM"], "kv_lora_rank": 512}, "qk_nope_head_dim", "is missing"),
        ({"architectures": ["MambaForCausalLM"], "mamba_d_state": 16}, "architectures", "has layers with states"),
        ({"architectures": 3}, "architectures", "is not modelled"),
        ({"architectures": None}, "architectures", "model.architectures: is not modelled"),
        ({"architectures": []}, "architectures", "name the architecture of a model built like yours"),
        ({"architectures": [[]]}, "architectures", "is not modelled"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "an object"),
        ({"rope_parameters": [1]}, "rope_parameters", "an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor", "a number"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling", "must be above"),
        ({"partial_rotary_factor": 0}, "rotary_share", "more than 0"),
        ({"rope_theta": 0}, "rope_theta", "more than 0"),
        ({"sliding_window": "wide"}, "sliding_window", "a whole number"),
        ({"sliding_window": -1}, "sliding_window", "at least 0"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types",
            "'linear_attention': has no cost model",
        ),
        ({"quantization_config": "fp8"}, "quantization_config", "an object"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.bits", "must be 4 or 8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config.bits", "3: must be 4"),
        (
            {"quantization_config": {**GPTQ, "group_size": 100}},
            "quantization_config.group_size",
            "100: must be a multiple of 16",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.group_size", "multiple"),
        ({"quantization_config": {**GPTQ, "dynamic": {"-:.*": {}}}}, "quantization_config.dynamic", "sets bits for"),
        (
            {"quantization_config": {**GPTQ, "checkpoint_format": "marlin"}},
            "quantization_config.checkpoint_format",
            "use a checkpoint in",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
            "quantization_config.version",
            "another order",
        ),
        ({"quantization_config": W8A8}, "quantization_config.input_activations", "only weights"),
        ({"quantization_config": {**W8A8, "format": "marlin-24"}}, "quantization_config", "has no cost model"),
        (
            {"quantization_config": {**W8A8, "config_groups": {}}},
            "quantization_config.config_groups",
            "must all store weights alike",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
            "quantization_config",
            "W4A8",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "quantization_config: has no cost model"),
        ({**MIXTURE, "num_experts": None}, "num_experts", "is missing"),
        (
            {**MIXTURE, "num_experts_per_tok": None},
            "num_experts_per_tok",
            "is missing; add it to config.json, because a qwen3_moe model needs it",
        ),
        ({**MIXTURE, "num_experts_per_tok": 65}, "", "experts need experts_per_token from 1 to 64"),
        ({**MIXTURE, "decoder_sparse_step": 0}, "decoder_sparse_step", "at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads", "at least 1"),
        ({"num_attention_heads": "many"}, "num_attention_heads", "a whole number"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "must divide num_attention_heads, which is 32"),
        ({"head_dim": 65}, "head_dim", "multiple of 2"),
        ({"num_hidden_layers": -1}, "num_hidden_layers", "at least"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers", "at most 10000"),
        ({"hidden_size": 10**12}, "hidden_size", "at most"),
        ({"eos_token_id": "end"}, "eos_token_id", "a whole number"),
    ],
)
def test_what_cannot_be_priced_is_refused_in_one_line(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        spec(**changes)
    message = str(caught.value)
    assert message.startswith(f"model.{field}" if field else "model")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"architectures": ["Phi3ForCausalLM"]}, "architectures", "'phi3': works only in the simulator"),
        (LATENT, "architectures", "'deepseek_v3': works only in the simulator"),
        ({**MIXTURE, "shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size", "a shared expert"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "default and llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type", "'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type", "'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor", "0.25"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1}, "sliding_window", "at least 2"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config", "weights in 16 bits"),
        ({"hidden_act": "gelu"}, "hidden_act", "silu"),
        ({"mlp_bias": True}, "mlp_bias", "MLPs without biases"),
        ({"attention_bias": True}, "attention_bias", "only in the QKV of Qwen2"),
    ],
)
def test_what_only_the_simulator_does_the_engine_refuses_in_one_line(changes, field, says):
    simulated = spec(**changes)
    with pytest.raises(UserError) as caught:
        check_runnable(simulated)
    message = str(caught.value)
    assert message.startswith(f"model.{field}")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Dots1"])
def test_the_engine_runs_plain_models_of_its_families(family: str) -> None:
    experts = MIXTURE if "Moe" in family or family in ("Mixtral", "Dots1") else {}
    check_runnable(spec(**{**experts, "architectures": [f"{family}ForCausalLM"], "sliding_window": None}))


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({"architectures": ["MistralForCausalLM"]}, 4096, range(32)),  # what transformers takes for silence
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, 512, range(32)),
        ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 30}, 512, (30, 31)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 512}, 512, range(0, 32, 2)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "sliding_window_pattern": 16}, 512,
         [layer for layer in range(32) if layer not in (15, 31)]),
    ],
)  # fmt: skip
def test_which_layers_have_the_window(changes: dict[str, Any], window: int, layers: Sequence[int]) -> None:
    windowed = spec(**{"architectures": ["Qwen2ForCausalLM"], **changes})
    assert (windowed.sliding_window, windowed.sliding_at) == (window, tuple(layers))


@pytest.mark.parametrize(
    ("family", "given", "normalised"),
    [("Mixtral", None, True), ("Qwen3Moe", None, False), ("Qwen3Moe", True, True), ("Qwen2Moe", False, False)],
)
def test_whether_weights_of_experts_sum_to_one_is_what_transformers_takes(family, given, normalised):
    said = {} if given is None else {"norm_topk_prob": given}
    assert spec(**{**MIXTURE, **said, "architectures": [f"{family}ForCausalLM"]}).norm_topk_prob == normalised


def test_a_mixture_without_a_family_of_the_engine_is_refused_too() -> None:
    mixture = spec().model_copy(update={"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 64})
    with pytest.raises(UserError, match="num_experts"):
        check_runnable(mixture)


def test_a_mixture_counts_every_expert_once_and_a_token_meets_some() -> None:
    mixture, dense = spec(**MIXTURE), spec(architectures=["Qwen3ForCausalLM"])
    expert, router = 3 * 4096 * 768, 64 * 4096
    swapped = dense.parameters - 32 * 3 * 4096 * 14336
    assert mixture.parameters == swapped + 32 * (64 * expert + router)
    assert mixture.active_parameters == swapped + 32 * (4 * expert + router)
    assert dense.active_parameters == dense.parameters


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [0, 1, 9]}, (0, 1, 9)),
        ({"first_k_dense_replace": 3}, (0, 1, 2)),
        ({"moe_layer_freq": 2}, range(1, 32, 2)),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 31}, (0,)),
        ({"decoder_sparse_step": 2}, range(0, 32, 2)),
        ({"decoder_sparse_step": 40}, range(32)),
    ],
)
def test_which_layers_of_a_mixture_stay_dense(changes: dict[str, Any], dense: Sequence[int]) -> None:
    mixture = spec(**MIXTURE, **changes)
    assert (mixture.dense_at, mixture.moe_layers) == (tuple(dense), 32 - len(dense))


def test_a_shared_expert_is_met_by_every_token() -> None:
    plain = spec(**{**MIXTURE, "architectures": ["Qwen2MoeForCausalLM"]})
    shared = spec(**{**MIXTURE, "architectures": ["Qwen2MoeForCausalLM"]}, shared_expert_intermediate_size=512)
    more = 32 * 3 * 4096 * 512
    assert shared.parameters - plain.parameters == shared.active_parameters - plain.active_parameters == more


def test_latent_attention_is_read_and_counted() -> None:
    latent = spec(**LATENT)
    assert latent.latent is not None and (latent.head_dim, latent.rotary_share) == (192, 1 / 3)
    per_layer = 4096 * 1536 + 1536 + 1536 * 32 * 192 + 4096 * 576 + 512 + 512 * 32 * 256 + 32 * 128 * 4096
    assert latent.attention_parameters == per_layer
    assert spec(**{**LATENT, "q_lora_rank": None}).attention_parameters == (
        per_layer - 4096 * 1536 - 1536 - 1536 * 32 * 192 + 4096 * 32 * 192
    )
    assert latent.kv_bytes_per_token(2) == 32 * 576 * 2
    assert latent.shared_intermediate_size == 2 * 768
    grouped = spec(**LATENT, n_group=8, topk_group=4)
    assert (grouped.expert_groups, grouped.groups_per_token) == (8, 4)
    assert spec(**LATENT, n_group=1, topk_group=1).expert_groups == 0


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"architectures": ["MistralForCausalLM"]}, 32),
        ({"architectures": ["Qwen2ForCausalLM"]}, 0),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 28}, 4),
        ({"architectures": ["Gemma2ForCausalLM"]}, 16),
        ({"architectures": ["Gemma3ForCausalLM"]}, 27),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 4}, 24),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"] * 8}, 8),
    ],
)
def test_layers_with_a_window_are_counted_by_family_or_as_listed(changes: dict[str, Any], layers: int) -> None:
    windowed = spec(sliding_window=1024, **changes)
    assert (windowed.sliding_layers, windowed.sliding_window) == (layers, 1024 if layers else 0)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (None, "none"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8"),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}, "fp8"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, "int8"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "int4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", **PACKED}, "int4"),
    ],
)
def test_how_a_checkpoint_is_stored_is_read(config: Any, stored: str) -> None:
    assert spec(quantization_config=config).checkpoint_quantization == stored


@pytest.mark.parametrize(
    "changes", [{}, MIXTURE, LATENT, {"sliding_window": 512, "layer_types": ["sliding_attention"] * 32}]
)
def test_a_spec_survives_json(changes: dict[str, Any]) -> None:
    assert ModelSpec.model_validate_json(spec(**changes).model_dump_json()) == spec(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 4},
        {"num_experts": 4, "experts_per_token": 5, "moe_intermediate_size": 8},
        {"sliding_window": 512},
        {"sliding_layers": 4},
        {"sliding_window": 512, "sliding_layers": 33},
    ],
)
def test_a_spec_whose_parts_disagree_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"experts_per_token|sliding"):
        ModelSpec.model_validate({**spec().model_dump(), **changes})


@pytest.mark.parametrize("config", [[], None, "llama", 3])
def test_a_config_that_is_no_object_is_refused(config: object) -> None:
    with pytest.raises(UserError, match="JSON object"):
        spec_from_hf_config(config)


def test_a_mistral_window_as_wide_as_the_positions_is_no_window() -> None:
    mistral = spec(architectures=["MistralForCausalLM"], sliding_window=4096, max_position_embeddings=4096)
    assert (mistral.family, mistral.max_positions) == ("mistral", 4096)


def test_a_silent_mistral_config_has_transformers_window() -> None:
    silent = spec(architectures=["MistralForCausalLM"])
    assert (silent.sliding_window, silent.sliding_layers) == (4096, 32)
    assert spec(architectures=["MistralForCausalLM"], sliding_window=None).sliding_window == 0
    assert spec(architectures=["MistralForCausalLM"], max_position_embeddings=4096).sliding_window == 0
