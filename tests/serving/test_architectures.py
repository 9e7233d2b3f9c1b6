"""Architectures beside the known ones: what their shapes become, and that the spec says what is approximated."""

from typing import Any

import pytest

from calibration.steps.external_calibration import predicted_cost
from serving.deployments.config import Deployment
from serving.deployments.hf_config import spec_from_hf_config
from serving.deployments.model_catalogue import find_model
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import check_linear_heads
from serving.errors import UserError

PLAIN: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
}


def spec(architecture: str, **changes: Any) -> ModelSpec:
    return spec_from_hf_config({**PLAIN, "architectures": [architecture], **changes})


def test_an_unknown_decoder_is_priced_by_its_shapes() -> None:
    unknown, llama = spec("NewForCausalLM", model_type="new"), spec("LlamaForCausalLM")
    assert unknown.parameters == llama.parameters
    assert (unknown.family, llama.approximated) == ("new", "")
    assert "NewForCausalLM is priced by its shapes" in unknown.approximated


def test_an_unknown_mixture_is_priced_by_its_shapes() -> None:
    mixture = spec(
        "NewForCausalLM", moe_num_experts=16, moe_k=4, moe_intermediate_size=256, moe_layer_freq=[0] + [1] * 7
    )
    assert (mixture.num_experts, mixture.experts_per_token, mixture.dense_at) == (16, 4, (0,))


def test_unknown_latent_attention_is_that_of_deepseek_v3() -> None:
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 64}
    new, known = spec("NewForCausalLM", **sizes), spec("LlamaForCausalLM", **sizes)
    assert new.latent == known.latent
    assert new.kv_bytes_per_token(2) == 8 * (64 + 16) * 2


def test_gpt_2_has_other_names_for_its_fields() -> None:
    fields = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    gpt = spec_from_hf_config({"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", **fields})
    assert (gpt.hidden_size, gpt.num_layers, gpt.intermediate_size) == (768, 12, 2048)  # 3 x 2048 = 2 x 3072
    assert gpt.kv_bytes_per_token(2) == 2 * 12 * 768 * 2


def test_llama_4_alternates_chunks_and_mixtures() -> None:
    maverick, scout = find_model("Llama-4-Maverick"), find_model("Llama-4-Scout")
    assert (maverick.moe_layers, scout.moe_layers) == (24, 48)
    assert (scout.sliding_window, scout.sliding_layers, scout.sliding_at[:4]) == (8192, 36, (0, 1, 2, 4))
    assert "chunks of 8192 tokens" in scout.approximated


def test_a_state_space_of_nemotron_keeps_its_size() -> None:
    nano = find_model("Nemotron-3-Nano")
    assert nano.linear is not None
    assert (nano.num_layers, nano.linear_layers, nano.moe_layers) == (29, 23, 23)
    assert nano.linear.state == 64 * 64 * 128
    assert nano.linear.conv_dim == 64 * 64 + 2 * 8 * 128
    assert nano.kv_bytes_per_token(2) == 6 * 2 * 2 * 128 * 2
    assert "state spaces" in nano.approximated


def test_a_single_group_of_states_is_repeated_on_every_device() -> None:
    for tp in (1, 4):
        cost = predicted_cost("H100", Deployment(model="Granite-4.0-H-Small", device="cuda", tensor_parallel_size=tp))
        assert "state spaces" in cost.untaught
    with pytest.raises(UserError, match="must divide the 48 value heads"):
        check_linear_heads(find_model("Granite-4.0-H-Tiny"), 5)


def test_granite_4_without_state_spaces_is_a_plain_decoder() -> None:
    layers = {"layer_types": ["attention"] * 8, "shared_intermediate_size": 4096, "num_local_experts": 0}
    micro = spec("GraniteMoeHybridForCausalLM", mamba_d_state=128, **layers)
    assert (micro.linear, micro.num_experts, micro.intermediate_size, micro.approximated) == (None, 0, 4096, "")


def test_a_pruned_model_keeps_its_weights_and_kv() -> None:
    kept = {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.5}}
    skipped = {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 3.0}}
    pruned = spec("DeciLMForCausalLM", block_configs=[kept, kept, skipped, kept])
    assert (pruned.num_layers, pruned.num_kv_heads, pruned.intermediate_size) == (3, 2, round((3 * 1024 + 2048) / 3))


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        ("Gemma3ForConditionalGeneration", {"model_type": "gemma3_text", "sliding_window": 1024}),
        ("Mistral3ForConditionalGeneration", {"model_type": "mistral", "sliding_window": None}),
        ("Qwen3VLForConditionalGeneration", {"model_type": "qwen3_vl_text"}),
        ("SomethingForConditionalGeneration", {"architectures": ["LlamaForCausalLM"]}),
    ],
)
def test_the_text_model_of_a_wrapper_is_read(wrapper: str, text: dict[str, Any]) -> None:
    model = spec_from_hf_config({"architectures": [wrapper], "text_config": {**PLAIN, **text}})
    assert (model.num_layers, model.approximated) == (8, "")


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("NemotronHForCausalLM", {}, "model.hybrid_override_pattern: is missing"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": 3}, "cannot be read"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 8}, "model.mamba_n_heads: is missing"),
        ("DeciLMForCausalLM", {}, "model.block_configs: is missing"),
        ("JambaForCausalLM", {"mamba_d_state": 16}, "has layers with states (mamba_d_state)"),
        ("NewForCausalLM", {"hidden_size": None}, "model.hidden_size: is missing"),
    ],
)
def test_a_config_that_says_too_little_is_refused_in_one_line(
    architecture: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        spec(architecture, **changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
