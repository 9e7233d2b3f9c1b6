"""A dense decoder model, as a Hugging Face `config.json` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from serving.config import parse
from serving.errors import UserError

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class RopeScaling(BaseModel):
    """Llama 3.1's stretching of long wavelengths (`rope_type: llama3`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_positions: int = Field(ge=1)


class ModelSpec(BaseModel):
    """Shapes and constants of a decoder. Sizes are elements, not bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    family: str
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    intermediate_size: int = Field(ge=1)
    max_positions: int = Field(ge=1)
    rope_theta: float = Field(gt=0)
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    norm_eps: float = Field(1e-6, gt=0)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Weights of the whole model; a tied embedding counts once."""
        head = self.head_dim
        qkv = self.num_heads * head + 2 * self.num_kv_heads * head
        layer = (
            self.hidden_size * (qkv + self.num_heads * head + 3 * self.intermediate_size)
            + 2 * self.hidden_size
            + (qkv if self.qkv_bias else 0)
            + (2 * head if self.qk_norm else 0)
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Memory of the weights."""
        return self.parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """KV cache of one token over all layers: keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str = "model") -> ModelSpec:
        """From a `config.json` as transformers 4 or 5 writes it. Raises UserError for what is not supported."""
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in _FAMILIES:
            raise UserError(f"{name}.architectures", architecture, f"is not one of {', '.join(_FAMILIES)}")
        family = _FAMILIES[architecture]
        try:
            return parse(cls, _fields(config, name, family), where=name)
        except KeyError as error:
            raise UserError(f"{name}.{error.args[0]}", "missing", "is needed in config.json") from None


def _fields(config: Mapping[str, Any], name: str, family: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    positions = config["max_position_embeddings"]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", family == "mistral") and window < positions:
        raise UserError(f"{name}.sliding_window", window, "sliding-window attention is not supported; use null")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{name}.hidden_act", config["hidden_act"], "only silu is supported")
    if config.get("mlp_bias") or (family != "qwen2" and config.get("attention_bias")):
        raise UserError(f"{name}.attention_bias", True, "biases are supported only in the QKV of Qwen2")
    eos = config.get("eos_token_id")
    return {
        "name": name,
        "family": family,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "max_positions": positions,
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_scaling": _rope_scaling(rope, name),
        "rope_interleaved": bool(config.get("rope_interleaved", False)),
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "bos_id": config.get("bos_token_id"),
        "eos_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }


def _rope_scaling(rope: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind != "llama3":
        raise UserError(f"{name}.rope_type", kind, "is not supported; default and llama3 are")
    return {
        "factor": rope["factor"],
        "low_freq_factor": rope["low_freq_factor"],
        "high_freq_factor": rope["high_freq_factor"],
        "original_max_positions": rope["original_max_position_embeddings"],
    }
