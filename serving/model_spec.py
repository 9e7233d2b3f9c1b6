"""A dense decoder model, as a Hugging Face `config.json` describes it.

What a config asks for and this engine does not do is refused by name: a model that is nearly right is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, model_validator

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

    @model_validator(mode="after")
    def _bands_are_apart(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be above low_freq_factor")
        return self


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
    head_dim: int = Field(ge=2, multiple_of=2)
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

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        return self

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
    def from_hf_config(cls, config: object, name: str = "model") -> ModelSpec:
        """From a `config.json` as transformers 4 or 5 writes it. Raises UserError for what is not supported."""
        if not isinstance(config, Mapping):
            raise UserError(f"{name}.config", config, "is not a JSON object; give a Hugging Face config.json")
        named = config.get("architectures")
        architecture = named[0] if isinstance(named, list) and named else named
        family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
        if family is None:
            raise UserError(f"{name}.architectures", architecture, f"is not one of {', '.join(_FAMILIES)}")
        for key in _REQUIRED:
            if config.get(key) is None:
                raise UserError(f"{name}.{key}", "missing", "is needed in config.json")
        return _spec(parse(_HfConfig, config, where=name), name, family)


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


class _Rope(BaseModel):
    """`rope_parameters` of transformers 5 or `rope_scaling` of 4, whose `rope_type` was once called `type`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def scaling(self, where: str) -> RopeScaling | None:
        kind = self.rope_type or self.type or "default"
        if kind == "default":
            return None
        if kind != "llama3":
            raise UserError(f"{where}.rope_type", kind, "is not supported; default and llama3 are")
        fields = {
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_positions": self.original_max_position_embeddings,
        }
        return parse(RopeScaling, fields, where=f"{where}.rope_scaling")


class _HfConfig(BaseModel):
    """The part of a `config.json` that shapes a dense decoder, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int = Field(ge=1)
    num_hidden_layers: int
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = None
    intermediate_size: int
    max_position_embeddings: int = Field(ge=1)
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    rope_interleaved: bool = False
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    rms_norm_eps: float = 1e-6
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: object = None


def _spec(config: _HfConfig, name: str, family: str) -> ModelSpec:
    given = [rope.model_dump(exclude_none=True) for rope in (config.rope_scaling, config.rope_parameters) if rope]
    rope = _Rope(**{"rope_theta": config.rope_theta, **{key: value for each in given for key, value in each.items()}})
    _refuse_unsupported(config, rope, name, family)
    heads, eos = config.num_attention_heads, config.eos_token_id
    kv_heads = config.num_key_value_heads or heads
    if heads % kv_heads:
        raise UserError(f"{name}.num_key_value_heads", kv_heads, f"does not divide num_attention_heads, {heads}")
    fields = {
        "name": name,
        "family": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": config.head_dim or config.hidden_size // heads,
        "intermediate_size": config.intermediate_size,
        "max_positions": config.max_position_embeddings,
        "rope_theta": 10000.0 if rope.rope_theta is None else rope.rope_theta,
        "rope_scaling": rope.scaling(name),
        "rope_interleaved": config.rope_interleaved,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "tied_embeddings": bool(config.tie_word_embeddings),
        "norm_eps": config.rms_norm_eps,
        "bos_id": config.bos_token_id,
        "eos_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }
    return parse(ModelSpec, fields, where=name)


def _refuse_unsupported(config: _HfConfig, rope: _Rope, name: str, family: str) -> None:
    window, slides = config.sliding_window, config.use_sliding_window
    if family == "mistral" and "sliding_window" not in config.model_fields_set:
        window = 4096  # what transformers takes when config.json is silent
    if slides is None:
        slides = family == "mistral"  # Mistral slides whenever it has a window; Qwen asks for it
    if window is not None and slides and window < config.max_position_embeddings:
        remedy = f"a window below max_position_embeddings is not supported; lower that to {window}, or use null"
        raise UserError(f"{name}.sliding_window", window, remedy)
    if config.quantization_config:
        raise UserError(
            f"{name}.quantization_config", config.quantization_config, "is not supported; use unquantised weights"
        )
    if config.hidden_act != "silu":
        raise UserError(f"{name}.hidden_act", config.hidden_act, "only silu is supported")
    if config.mlp_bias:
        raise UserError(f"{name}.mlp_bias", True, "is not supported")
    if config.attention_bias and family != "qwen2":
        raise UserError(f"{name}.attention_bias", True, "biases are supported only in the QKV of Qwen2")
    for rotated in (config.partial_rotary_factor, rope.partial_rotary_factor):
        if rotated is not None and rotated != 1:
            raise UserError(f"{name}.partial_rotary_factor", rotated, "only whole heads are rotated; 1 is supported")
