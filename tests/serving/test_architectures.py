"""Architectures beside the known ones: what their shapes become, and that the spec says what is approximated."""

from typing import Any

import pytest

from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import check_linear_heads
from tokentwin.serving.errors import UserError

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


JAMBA = {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": 64}


def test_jamba_states_its_layers_by_a_period() -> None:
    jamba = spec("JambaForCausalLM", **JAMBA, num_experts=4, num_experts_per_tok=2, expert_layer_period=2)
    assert jamba.linear is not None
    assert (jamba.num_layers, jamba.linear_layers, jamba.dense_at) == (8, 6, (1, 3, 5, 7))
    assert jamba.linear.state == 16 * 2 * 1024
    assert "state spaces (Mamba)" in jamba.approximated
    assert predicted_cost("H100", Deployment(model="Jamba-v0.1", device="cuda", tensor_parallel_size=4)).untaught


def test_a_layer_with_attention_and_a_state_space_becomes_two() -> None:
    falcon = spec("FalconH1ForCausalLM", mamba_d_ssm=1024, mamba_d_state=64, mamba_n_heads=16, mamba_n_groups=1)
    assert (falcon.num_layers, falcon.linear_layers, falcon.intermediate_size) == (16, 8, 1024)
    kinds = ["mamba", "hybrid"] * 4
    zamba = spec("Zamba2ForCausalLM", mamba_d_state=64, n_mamba_heads=16, layers_block_type=kinds)
    assert (zamba.num_layers, zamba.linear_layers, zamba.kv_layers) == (12, 8, 4)


# Sizes of public config.json files, with the published number of parameters in billions
FALCON = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024}
MPT = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "expansion_ratio": 4, "vocab_size": 50432}
BLOOM = {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880, "seq_length": 2048}
DBRX = {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352} | {
    "attn_config": {"kv_n_heads": 8}, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
STARCODER = {"n_embd": 6144, "n_layer": 40, "n_head": 48, "n_positions": 8192, "vocab_size": 49152, "n_inner": 24576}
GPT_NEO = {"hidden_size": 2560, "num_layers": 32, "num_heads": 20, "vocab_size": 50257, "max_position_embeddings": 2048}
QWEN = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32} | {
    "vocab_size": 151936, "seq_length": 8192,
}  # fmt: skip
ARCTIC = {"hidden_size": 7168, "intermediate_size": 4864, "num_hidden_layers": 35, "num_attention_heads": 56} | {
    "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 2, "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
GROK_2 = {"hidden_size": 8192, "intermediate_size": 32768, "moe_intermediate_size": 16384, "num_hidden_layers": 64} | {
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "residual_moe": True, "hidden_act": "gelu", "vocab_size": 131072, "max_position_embeddings": 131072,
}  # fmt: skip
LFM2 = {"hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32} | {
    "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536,
    "max_position_embeddings": 128000,
}  # fmt: skip
MINIMAX = {"hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80, "num_attention_heads": 64} | {
    "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32, "num_experts_per_tok": 2,
    "attn_type_list": ([0] * 7 + [1]) * 10, "vocab_size": 200064, "max_position_embeddings": 10240000,
}  # fmt: skip
STEP3 = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64} | {
    "num_attention_groups": 1, "head_dim": 256, "moe_num_experts": 48, "moe_top_k": 3, "moe_intermediate_size": 5120,
    "share_expert_dim": 5120, "moe_layers_enum": ",".join(map(str, range(4, 60))), "vocab_size": 128815,
    "max_seq_len": 65536,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "config", "billions"),
    [
        ("FalconForCausalLM", {**FALCON, "model_type": "falcon", "multi_query": True}, 6.92),
        ("MPTForCausalLM", {**MPT, "model_type": "mpt", "attn_config": {"alibi": True}}, 6.65),
        ("BloomForCausalLM", {**BLOOM, "model_type": "bloom"}, 176.2),
        ("DbrxForCausalLM", {**DBRX, "model_type": "dbrx"}, 131.6),
        ("GPTBigCodeForCausalLM", {**STARCODER, "model_type": "gpt_bigcode", "multi_query": True}, 15.5),
        ("GPTNeoForCausalLM", {**GPT_NEO, "model_type": "gpt_neo", "activation_function": "gelu_new"}, 2.65),
        ("QWenLMHeadModel", QWEN, 7.72),
        ("ArcticForCausalLM", ARCTIC, 480),
        ("Grok1ForCausalLM", GROK_2, 270),
        ("Lfm2ForCausalLM", LFM2, 1.17),
        ("MiniMaxText01ForCausalLM", MINIMAX, 456),
        ("Step3TextForCausalLM", STEP3, 316),
    ],
)
def test_rarer_architectures_have_the_published_number_of_parameters(
    architecture: str, config: dict[str, Any], billions: float
) -> None:
    model = spec_from_hf_config({"architectures": [architecture], **config})
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert model.approximated


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
        ("JambaForCausalLM", {"mamba_d_state": 16}, "has layers with states (mamba_d_state), but does not say which"),
        ("JambaForCausalLM", {"attn_layer_period": 2, "mamba_expand": 2}, "has layers with states (mamba_expand)"),
        ("JambaForCausalLM", {"attn_layer_period": "two", "mamba_d_state": 16}, "cannot be read"),
        (
            "JambaForCausalLM",
            {"attn_layer_period": 2, "mamba_d_state": 16, "intermediate_size": float("inf")},
            "cannot be read",
        ),
        ("Mamba2ForCausalLM", {"model_type": "mamba2"}, "has no layers with attention"),
        ("BartForCausalLM", {"is_encoder_decoder": True}, "has an encoder and a decoder"),
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
