"""The model catalogue: published parameter counts, the many names of a model, and the verb."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from serving.deployments.model_catalogue import find_model, models
from serving.errors import UserError
from tokentwin.commands.model import model

# Billions, as model cards state them, rounded: all weights, and those that a token meets
PUBLISHED = {
    "Llama-3.1-8B": (8.03, 8.03),
    "Llama-3.1-70B": (70.6, 70.6),
    "Llama-3.1-405B": (405.9, 405.9),
    "SmolLM2-135M": (0.1345, 0.1345),
    "Llama-3.2-1B": (1.236, 1.236),
    "Llama-3.2-3B": (3.21, 3.21),
    "Llama-2-7B": (6.74, 6.74),
    "Llama-2-13B": (13.02, 13.02),
    "Llama-2-70B": (68.98, 68.98),
    "CodeLlama-34B": (33.7, 33.7),
    "Mistral-7B-v0.3": (7.25, 7.25),
    "Mixtral-8x7B": (46.7, 12.9),
    "Qwen2.5-7B": (7.61, 7.61),
    "Qwen2.5-32B": (32.8, 32.8),
    "Qwen2.5-72B": (72.7, 72.7),
    "Qwen3-0.6B": (0.596, 0.596),
    "Qwen3-8B": (8.19, 8.19),
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "MiniMax-M2.5": (229, 10),
    "Phi-4": (14.7, 14.7),
    "Gemma-2-9B": (9.24, 9.24),
    "DeepSeek-V3": (671, 37),
    "DeepSeek-V2-Lite": (15.7, 2.4),
    "DeepSeek-V3.2": (671.9, 37.5),  # transformers' count; the rest as DeepSeek-V3
    "DeepSeek-V4-Flash": (284, 13.27),  # its card says 13, without the embedding
    "DeepSeek-V4-Pro": (1573, 48.9),  # its card says 1.6T and 49
    "GLM-5": (744, 40.8),  # 744 B by its card, which says 40 for the active ones
    "Kimi-K2": (1000, 32),
    "Kimi-K2.5": (1000, 32),
    "Qwen3.5-27B": (26.9, 26.9),
    "Qwen3.5-35B-A3B": (34.7, 3.46),  # Qwen3.5: counted by transformers, text model alone; cards round
    "Qwen3.5-122B-A10B": (122.1, 9.77),
    "Qwen3.5-397B-A17B": (396.3, 17.3),
}
ROUNDED = {"Kimi-K2": 0.03, "Kimi-K2.5": 0.03}  # their cards say 1T
# Keys and values: 2 x layers x KV heads x head size x 2 bytes
KV_BYTES = {"Llama-3.1-8B": 131_072, "CodeLlama-34B": 196_608, "Qwen3-32B": 262_144, "gpt-oss-120b": 73_728}
# Latent vectors: layers x (512 + 64) x 2 bytes
# Hybrid: only every fourth layer has any
KV_BYTES |= {"Qwen3.5-397B-A17B": 15 * 2 * 2 * 256 * 2}
KV_BYTES |= {"DeepSeek-V3": 70_272, "DeepSeek-V2-Lite": 31_104, "Kimi-K2": 70_272}


def test_every_model_of_the_catalogue_is_held_to_a_published_count() -> None:
    assert set(PUBLISHED) == set(models())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    spec, (total, active) = find_model(name), PUBLISHED[name]
    left_out = {
        "gpt_oss": 1,
        "minimax_m2": 2,
        "deepseek_v2": 1,
        "deepseek_v3": 1,
        "deepseek_v32": 1,
        "deepseek_v4": 1,
        "glm_moe_dsa": 1,
    }.get(spec.family, 0)  # makers who leave out the embedding, or the head too
    counted = spec.active_parameters - left_out * spec.vocab_size * spec.hidden_size
    assert spec.parameters / 1e9 == pytest.approx(total, rel=ROUNDED.get(name, 0.003))
    assert counted / 1e9 == pytest.approx(active, rel=0.022)


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_per_token(name: str) -> None:
    assert find_model(name).kv_bytes_per_token(2) == KV_BYTES[name]


@pytest.mark.parametrize(
    ("called", "name", "stored"),
    [
        ("llama-3.1-8b", "Llama-3.1-8B", "none"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B", "none"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B", "none"),
        ("codellama/CodeLlama-34b-Instruct-hf", "CodeLlama-34B", "none"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B", "none"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen3-30B-A3B", "none"),
        ("Qwen/Qwen3-32B-FP8", "Qwen3-32B", "fp8_block"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic", "Llama-3.1-70B", "fp8"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
        ("Qwen/Qwen3-32B-AWQ", "Qwen3-32B", "int4"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "Llama-3.1-70B", "int4"),
        ("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int8", "Qwen2.5-32B", "int8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "Llama-3.1-8B", "int4"),
        ("MiniMaxAI/MiniMax-M2", "MiniMax-M2.5", "fp8_block"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-V3", "fp8_block"),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2", "fp8_block"),
        ("moonshotai/Kimi-K2.5", "Kimi-K2.5", "int4"),
        ("deepseek-ai/DeepSeek-V4-Flash-0731", "DeepSeek-V4-Flash", "fp8_block"),
        ("nvidia/DeepSeek-V4-Pro-NVFP4", "DeepSeek-V4-Pro", "fp8_block"),
        ("zhipuai/GLM-5", "GLM-5", "none"),
        ("zai-org/GLM-5-FP8", "GLM-5", "fp8_block"),
        ("nvidia/Kimi-K2.5-NVFP4", "Kimi-K2.5", "nvfp4"),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "DeepSeek-V3", "nvfp4"),
        ("nvidia/Llama-3.1-70B-Instruct-NVFP4", "Llama-3.1-70B", "nvfp4"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B", "none"),
        ("Qwen/Qwen3.6-35B-A3B", "Qwen3.5-35B-A3B", "none"),
        ("Qwen/Qwen3.5-397B-A17B-FP8", "Qwen3.5-397B-A17B", "fp8_block"),
    ],
)
def test_a_model_goes_by_many_names(called: str, name: str, stored: str) -> None:
    spec = find_model(called)
    assert (spec.name, spec.checkpoint_quantization) == (name, stored)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpt-5", ", but GLM-5, gpt-oss-20b or gpt-oss-120b is;"),
        ("Qwen/Qwen3-33B-AWQ", ", but Qwen3"),
        ("Mistral-7B-v0.1", ", but Mistral-7B-v0.3"),
        ("zzz", "model;"),
    ],
)
def test_an_unknown_name_is_told_what_is_like_it(name: str, near: str) -> None:
    with pytest.raises(UserError, match="`tokentwin model list`") as caught:
        find_model(name)
    assert near in str(caught.value) and "\n" not in str(caught.value)


def test_gpt_oss_alternates_windows_and_keeps_full_attention_in_the_rest() -> None:
    spec = find_model("gpt-oss-20b")
    assert (spec.num_layers, spec.sliding_layers, spec.sliding_window) == (24, 12, 128)


def test_a_config_is_found_as_a_file_or_a_folder(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert find_model(str(path)) == find_model(str(tmp_path))
    assert find_model(str(tmp_path)).name == tmp_path.name
    path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        find_model(str(tmp_path))
    path.write_text("[]")
    with pytest.raises(UserError, match="must be a JSON object"):
        find_model(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        find_model(str(tmp_path / "none.json"))


def test_the_verb_lists_and_inspects() -> None:
    listed = CliRunner().invoke(model, ["list"])
    assert listed.exit_code == 0
    assert "Qwen3-235B-A22B" in listed.output
    shown = CliRunner().invoke(model, ["inspect", "gpt-oss-120b", "--gpu", "h100", "--tp", "2"])
    assert shown.exit_code == 0, shown.output
    assert "116.8 B parameters, 5.71 B active, published in mxfp4" in shown.output
    assert "CUDA graphs" in shown.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "model: 'nothing'"),
        (["Qwen3-32B", "--gpu", "H300"], "gpu: 'H300'"),
        (["Qwen3-32B", "--tp", "3"], "tensor_parallel_size: 3"),
        (["Qwen3-32B", "--quantization", "int3"], "options.quantization: 'int3'"),
        (["Qwen3-32B", "--gpu", "L4"], "has no room for KV blocks beside the weights of Qwen3-32B"),
    ],
)
def test_the_verb_refuses_in_one_line(arguments: list[str], says: str) -> None:
    failed = CliRunner().invoke(model, ["inspect", *arguments]).exception
    assert isinstance(failed, UserError)
    assert says in str(failed)
