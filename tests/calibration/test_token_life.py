"""The life of a token: shapes and bytes against the model's own counts."""

import json

import pytest
from click.testing import CliRunner

from tokentwin.calibration.operations import uniform_step
from tokentwin.calibration.steps.explanation import token_life
from tokentwin.cli import cli
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_catalogue import find_model


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3.5-27B"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_every_stage_has_its_bytes(model: str, cache: str) -> None:
    spec = find_model(model)
    life = token_life(spec, Deployment(model=model, kv_cache_dtype=cache), uniform_step(7, 100, 2, 50, 10))
    by_name = {stage.name: stage for stage in life}
    kept = next(stage for name, stage in by_name.items() if "kept as KV" in name)
    indexed = spec.num_layers * spec.latent.index_bytes if spec.latent else 0
    assert kept.bytes == 107 * (spec.kv_bytes_per_token(1 if cache == "fp8" else 2) - indexed)
    assert by_name["token ids"].shape == (107,) and by_name["sampled ids"].shape == (9,)
    assert by_name["logits"].bytes == 9 * spec.vocab_size * 2
    assert ("layer: gate and up" in by_name) == (spec.moe_layers < spec.num_layers)
    assert [life[0].name, life[-1].name] == ["token ids", "sampled ids"]


def test_a_device_has_its_share() -> None:
    sizes, spec = uniform_step(8, 100, 0, 0, 0), find_model("Llama-3.1-70B")
    one, eight = (token_life(spec, Deployment(tensor_parallel_size=tp), sizes) for tp in (1, 8))
    for whole, part in zip(one, eight, strict=True):
        split = part.name in ("layer: queries", "layer: keys and values, kept as KV", "layer: attention", "logits")
        split |= part.name == "layer: gate and up"
        assert part.bytes * (8 if split else 1) == whole.bytes


@pytest.mark.parametrize(
    ("parallel", "rows", "inter"), [(True, 64 * 8 * 16 // 16, 2048), (False, 64 * 8 * 16, 2048 // 16)]
)
def test_ranks_that_share_experts_bring_all_their_tokens(parallel: bool, rows: int, inter: int) -> None:
    wide = Deployment(model="DeepSeek-V3", data_parallel_size=16, enable_expert_parallel=parallel)
    life = token_life(find_model("DeepSeek-V3"), wide, uniform_step(64, 100, 0, 0, 0))
    (experts,) = (stage for stage in life if "experts' gate" in stage.name)
    assert experts.shape == (rows, 2, inter)


def test_explain_shows_it() -> None:
    arguments = ["explain", "--model", "Llama-3.1-8B", "--rows", "4"]
    assert "probabilities" in CliRunner().invoke(cli, arguments, catch_exceptions=False).output
    explained = json.loads(CliRunner().invoke(cli, [*arguments, "--format", "json"], catch_exceptions=False).output)
    assert explained["token_life"][1] == {
        "name": "embeddings", "shape": [4, 4096], "dtype": "bfloat16", "times": 1, "bytes": 32768
    }  # fmt: skip
