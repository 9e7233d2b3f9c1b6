"""KV capacity: the arithmetic, and its one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from serving.errors import UserError
from serving.gpu_spec import GPUS, find_gpu
from serving.model_spec import ModelSpec
from tokentwin.commands.model import model

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def test_llama_8b_has_its_known_sizes() -> None:
    """8.03 B parameters, 16.06 GB in bf16, and 131,072 KV bytes a token."""
    spec = ModelSpec.from_hf_config(LLAMA_8B)
    assert spec.parameters == 8_030_261_248
    assert spec.kv_bytes_per_token(2) == 131_072
    blocks = find_gpu("H100").kv_blocks(spec, 16)
    assert blocks == (72 * 10**9 - 2 * spec.parameters) // (16 * 131_072)


def test_blocks_grow_with_memory_and_shrink_with_weights() -> None:
    spec = ModelSpec.from_hf_config(LLAMA_8B)
    by_memory = sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
    blocks = [gpu.kv_blocks(spec, 16) for gpu in by_memory]
    assert blocks == sorted(blocks)
    with pytest.raises(UserError, match="no KV block fits"):
        find_gpu("L40S").kv_blocks(spec.model_copy(update={"num_layers": 320}), 16)


def test_inspect_prints_and_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    done = CliRunner().invoke(model, ["inspect", str(tmp_path), "--gpu", "H200"])
    assert "8.03 B parameters" in done.output
    for arguments in (["inspect", str(tmp_path), "--gpu", "H300"], ["inspect", str(tmp_path / "none.json")]):
        assert isinstance(CliRunner().invoke(model, arguments).exception, UserError)
