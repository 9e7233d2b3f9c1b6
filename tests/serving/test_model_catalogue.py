"""The model catalogue: published parameter counts, the many names of a model, and the verb."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokentwin.commands.model import model
from tokentwin.serving.deployments.model_catalogue import (
    _entries,
    _names,
    _piped,
    find_model,
    models,
    published_parameters,
)
from tokentwin.serving.errors import UserError

ROUNDED = {  # cards that round more, or count more than a decoder
    "Kimi-K2": 0.03,  # 1T
    "Kimi-K2.5": 0.03,
    "GLM-4.5": 0.01,
    "MiniMax-M3": 0.006,  # without what chooses the tokens of its sparse attention
    "Nemotron-H-56B": 0.01,
    "Gemma-4-31B": 0.02,  # two shapes of attention, priced as one
    # encoders, without their learnt positions and without the layer after the last one
    "bge-small-en-v1.5": 0.013,
    "bge-base-en-v1.5": 0.006,
    "bge-large-en-v1.5": 0.006,
    "e5-base-v2": 0.006,
    "e5-large-v2": 0.006,
    "bge-m3": 0.018,
}
# Keys and values: 2 x layers x KV heads x head size x 2 bytes
KV_BYTES = {"Llama-3.1-8B": 131_072, "CodeLlama-34B": 196_608, "Qwen3-32B": 262_144, "gpt-oss-120b": 73_728}
# Latent vectors: layers x (512 + 64) x 2 bytes
# Hybrid: only every fourth layer has any
KV_BYTES |= {"Qwen3.5-397B-A17B": 15 * 2 * 2 * 256 * 2, "Kimi-K3": 24 * (512 + 64) * 2}
KV_BYTES |= {"DeepSeek-V3": 70_272, "DeepSeek-V2-Lite": 31_104, "Kimi-K2": 70_272}


def unit(published: float) -> float:
    """Half of the last digit of a published number."""
    return 0.5 * 10.0 ** -len(f"{published}".partition(".")[2].rstrip("0"))


def test_the_catalogue_has_many_models_each_with_a_source() -> None:
    assert len(models()) >= 160
    for name, entry in _entries().items():
        assert set(entry) >= {"id", "source", "billions"} and entry["id"].count("/") == 1, name
        assert re.search(r"20\d\d-\d\d", entry["source"]), name


def test_no_two_models_have_one_name() -> None:
    owners: dict[str, list[str]] = {}
    for name in _entries():
        for one in {known.lower() for known in _names(name)}:
            owners.setdefault(one, []).append(name)
    assert {one: names for one, names in owners.items() if len(names) > 1} == {}


@pytest.mark.parametrize("name", models())
def test_parameters_are_those_published(name: str) -> None:
    spec, (total, active) = models()[name], published_parameters()[name]
    assert spec.parameters / 1e9 == pytest.approx(total, rel=ROUNDED.get(name, 0.003), abs=unit(total))
    # makers leave out the embedding of the active parameters, or the head too, or neither
    counted = [(spec.active_parameters - left * spec.vocab_size * spec.hidden_size) / 1e9 for left in range(3)]
    tolerance = max(unit(active), ROUNDED.get(name, 0.022) * active)
    assert any(abs(one - active) <= tolerance for one in counted), counted


@pytest.mark.parametrize("name", models())
def test_every_name_of_a_model_finds_it(name: str) -> None:
    for known in (*_names(name), _entries()[name]["id"].upper()):
        assert find_model(known).name == name


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
        ("qwen/qwq-32b", "Qwen2.5-32B", "none"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "Qwen2.5-32B", "none"),
        ("RedHatAI/DeepSeek-R1-Distill-Llama-70B-quantized.w4a16", "Llama-3.1-70B", "int4"),
        ("Qwen/Qwen3-4B-Instruct-2507-FP8", "Qwen3-4B", "fp8_block"),
        ("Qwen/Qwen3-14B-AWQ", "Qwen3-14B", "int4"),
        ("google/gemma-3-27b-it", "Gemma-3-27B", "none"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking-FP8", "Qwen3-Next-80B-A3B", "fp8_block"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "Qwen3-Coder-480B-A35B", "fp8_block"),
        ("RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-FP8-dynamic", "Mistral-Small-3.2-24B", "fp8"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B", "none"),
        ("zai-org/GLM-4.6-FP8", "GLM-4.5", "fp8"),
        ("zai-org/GLM-5.2", "GLM-5.2", "none"),
        ("nvidia/GLM-5.2-NVFP4", "GLM-5.2", "nvfp4"),
        ("nvidia/Llama-4-Scout-17B-16E-Instruct-FP8", "Llama-4-Scout", "fp8"),
        ("moonshotai/Kimi-K2-Thinking", "Kimi-K2.5", "int4"),
        ("moonshotai/Kimi-K2-Base", "Kimi-K2", "fp8_block"),
        ("moonshotai/Kimi-K3", "Kimi-K3", "mxfp4"),
        ("Qwen/Qwen3.8-27B", "Qwen3.5-27B", "none"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "Nemotron-3-Nano", "nvfp4"),
        ("cognitivecomputations/DeepSeek-R1-AWQ", "DeepSeek-V3", "int4"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b", "none"),
        ("amd/Llama-3.1-70B-Instruct-FP8-KV", "Llama-3.1-70B", "fp8"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1-FP8", "Nemotron-Super-49B", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "Qwen2.5-72B", "int4"),
    ],
)
def test_a_model_goes_by_many_names(called: str, name: str, stored: str) -> None:
    spec = find_model(called)
    assert (spec.name, spec.checkpoint_quantization) == (name, stored)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpt-os-20", ", but gpt-oss-20b"),
        ("Qwen/Qwen3-33B-AWQ", ", but Qwen3"),
        ("Mistral-7B-v0.9", ", but Mistral-7B-v0."),
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
        (["Qwen3-32B-AWQ", "--quantization", "fp8"], "quantization: 'fp8': is not how Qwen3-32B-AWQ is stored (int4)"),
    ],
)
def test_the_verb_refuses_in_one_line(arguments: list[str], says: str) -> None:
    failed = CliRunner().invoke(model, ["inspect", *arguments]).exception
    assert isinstance(failed, UserError)
    assert says in str(failed)


@pytest.mark.parametrize(
    ("name", "first", "needs"),
    [
        ("GLM-4.6", "GLM-4.6 (the shapes of GLM-4.5): ", "  smallest TP 8  on GB10 *, H200"),
        ("qwen3-coder-480b-a35b", "Qwen3-Coder-480B-A35B: ", "needs 894.4 GiB for weights, and 253,952 bytes for"),
        ("meta-llama/Llama-3.1-70B-Instruct", "Llama-3.1-70B-Instruct (the shapes of Llama-3.1-70B)", "1  on B200"),
    ],
)
def test_a_model_that_does_not_fit_says_what_it_needs(name: str, first: str, needs: str) -> None:
    shown = CliRunner().invoke(model, ["inspect", name])
    assert shown.exit_code == 0 and shown.output.startswith(first), shown.output
    assert needs in shown.output
    assert shown.output.endswith(f"{name} does not fit: there is no room for KV blocks\n")


def test_a_configuration_is_piped() -> None:
    config = {key: value for key, value in _entries()["Qwen3-8B"].items() if key not in ("id", "billions", "source")}
    _piped.cache_clear()
    shown = CliRunner().invoke(model, ["inspect", "-"], input=json.dumps(config))
    assert shown.exit_code == 0, shown.output
    assert "piped: qwen3, 8.191 B parameters" in shown.output
    _piped.cache_clear()
    failed = CliRunner().invoke(model, ["inspect", "-"], input="no").exception
    assert "is not JSON on standard input" in str(failed)
    _piped.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which the environment names."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def downloaded(cache: Path, name: str, revision: str, **changes: object) -> None:
    config = {**_entries()["Qwen3-8B"], **changes}
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "snapshots" / revision / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["acme/Own-9B", "own-9b", "ACME/own-9B"])
def test_a_model_that_was_downloaded_is_found_by_its_name(cache: Path, name: str) -> None:
    downloaded(cache, "acme/Own-9B", "1a2b", num_hidden_layers=40)
    downloaded(cache, "other/Own-9B-long", "1a2b")
    assert find_model(name).num_layers == 40


def test_the_main_branch_is_taken_of_several_snapshots(cache: Path) -> None:
    downloaded(cache, "acme/Own-9B", "new", num_hidden_layers=40)
    downloaded(cache, "acme/Own-9B", "old", num_hidden_layers=30)
    (cache / "models--acme--Own-9B" / "refs").mkdir()
    (cache / "models--acme--Own-9B" / "refs" / "main").write_text("new")
    assert find_model("acme/Own-9B").num_layers == 40


@pytest.mark.parametrize("name", ["other/Own-9B", "a/b/Own-9B", "Own-9", "acme/"])
def test_another_name_is_not_found_in_the_cache(cache: Path, name: str) -> None:
    downloaded(cache, "acme/Own-9B", "1a2b")
    with pytest.raises(UserError, match="is not a known model"):
        find_model(name)
