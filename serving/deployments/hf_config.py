"""Reading the `config.json` of a Hugging Face model as a `ModelSpec`.

Files of transformers 4 and 5 are read, and only the fields that affect the shapes of the model or its outputs.
`FAMILIES` lists the architectures whose cost follows from the spec. `architectures.py` reads others into the same
fields; such a spec says what it approximates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from tokentwin.serving.deployments.architectures import read
from tokentwin.serving.deployments.attention import HEAVY, SPARSE, CompressedAttention, LatentAttention, LinearAttention
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.deployments.model_spec import ModelSpec, RopeScaling
from tokentwin.serving.deployments.weight_types import checkpoint_fields, kept_layers, kept_modules
from tokentwin.serving.errors import UserError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "GptOssForCausalLM": "gpt_oss",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "Dots1ForCausalLM": "dots1",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4ForCausalLM": "glm4",
    "GemmaForCausalLM": "gemma",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "internlm3",
    "Exaone4ForCausalLM": "exaone4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "MiMoForCausalLM": "mimo",
    "Ministral3ForCausalLM": "ministral3",
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
}
_SPARSE = ("deepseek_v32", "glm_moe_dsa")
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v4", "glm4_moe_lite", *_SPARSE)
_INDEX_SIZES = ("index_n_heads", "index_head_dim", "index_topk")
_COMPRESSED_SIZES = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "sliding_window", "o_groups", "o_lora_rank")
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": SPARSE, "heavily_compressed_attention": HEAVY}
_INDEXED = ("deepseek_sparse_attention", "indexed_attention")  # names of transformers 4 and 5
_HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_TEXT_OF = {  # architectures with other towers, whose text model is another; those not here have it in their name
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiK3ForConditionalGeneration": "KimiLinearForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3ForCausalLM",
}
_TEXT_BY_TYPE = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "llama": "LlamaForCausalLM"}
_TOWERS = ("text_config", "llm_config")  # fields that hold the text model
_DEFAULTS: dict[str, dict[str, Any]] = {  # of transformers, where published files of a family are silent
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}
_LINEAR = "linear_attention"
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# In these families the weights of a token's experts are not scaled to sum 1, unless norm_topk_prob is set.
_SHARES_AS_THEY_ARE = ("qwen2_moe", "qwen3_moe", "dots1", "olmoe", *_LATENT)
_MIXTURES = (
    "mixtral",
    "qwen3_next",
    "qwen3_5_moe",
    "gpt_oss",
    "minimax_m2",
    "glm4_moe",
    "granite_moe",
    "phimoe",
    *_SHARES_AS_THEY_ARE,
)
_QK_NORM = (
    "qwen3",
    "qwen3_moe",
    "minimax_m2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "dots1",
    "olmo2",
    "olmo3",
    "olmoe",
    "exaone4",
    *_HYBRID,
)
_SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_BIAS_OF_QKV = (*_QKV_BIAS, "glm4", "glm4_moe", "mimo", "seed_oss")  # attention_bias: not of the output projection
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "cohere", "cohere2")
# transformers' default: every N-th layer has full attention
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4}
_SLIDES_WHEN_IT_CAN = (
    "mistral",
    "ministral3",
    "mixtral",
    "phi3",
    "starcoder2",
)  # Qwen uses its window only with use_sliding_window


class _Rope(BaseModel, allow_inf_nan=False):
    """The `rope_parameters` of transformers 5 or `rope_scaling` of 4. Old files use `type` instead of `rope_type`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"

    def scaling(self, where: str) -> RopeScaling | None:
        if self.kind != "llama3":
            return None
        fields = {
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_positions": self.original_max_position_embeddings,
        }
        return parse(RopeScaling, fields, where=f"{where}.rope_scaling")


class _HfConfig(BaseModel, allow_inf_nan=False):
    """The fields of a `config.json` that shape a decoder, under Hugging Face's names.

    The bounds are far above those of any existing model, so that they only catch mistakes.
    """

    vocab_size: int = Field(ge=1, le=100_000_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    num_hidden_layers: int = Field(ge=1, le=10_000)
    num_attention_heads: int = Field(ge=1, le=100_000)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, le=100_000)
    intermediate_size: int | None = Field(None, ge=1, le=100_000_000)
    max_position_embeddings: int = Field(ge=1, le=1_000_000_000)
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    rope_interleaved: bool = False
    partial_rotary_factor: float | None = None
    rotary_dim: int | None = None
    sliding_window: int | None = Field(None, ge=0)
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    sliding_window_pattern: int | None = Field(None, ge=1)
    layer_types: list[str] | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    attention_bias: bool | None = None
    use_qk_norm: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    rms_norm_eps: float = Field(1e-6, gt=0, le=1)
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int | None = Field(None, le=100_000)
    num_local_experts: int | None = Field(None, le=100_000)
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool = False
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    shared_intermediate_size: int | None = None
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: list[int] | None = None
    kv_lora_rank: int | None = Field(None, le=1_000_000)
    q_lora_rank: int | None = Field(None, le=1_000_000)
    qk_nope_head_dim: int | None = Field(None, le=100_000)
    qk_rope_head_dim: int | None = Field(None, le=100_000)
    v_head_dim: int | None = Field(None, le=100_000)
    linear_num_key_heads: int | None = Field(None, le=100_000)
    linear_num_value_heads: int | None = Field(None, le=100_000)
    linear_key_head_dim: int | None = Field(None, le=100_000)
    linear_value_head_dim: int | None = Field(None, le=100_000)
    linear_conv_kernel_dim: int | None = Field(None, le=100_000)
    mamba_ssm_dtype: str | None = None
    full_attention_interval: int = Field(4, ge=1)  # hybrid attention: every N-th layer has full attention
    index_n_heads: int | None = Field(None, le=100_000)
    index_head_dim: int | None = Field(None, le=100_000)
    index_topk: int | None = Field(None, le=1_000_000_000)
    compress_ratios: list[int] | None = None
    o_groups: int | None = Field(None, ge=1, le=100_000)
    o_lora_rank: int | None = Field(None, le=1_000_000)
    hc_mult: int = Field(1, ge=1, le=1000)
    expert_dtype: str | None = None
    num_nextn_predict_layers: int | None = Field(None, ge=0, le=10_000)
    mtp_num_hidden_layers: int | None = Field(None, ge=0, le=10_000)
    n_routed_experts: int | None = Field(None, le=100_000)
    n_shared_experts: int | None = Field(None, ge=0, le=100_000)
    n_group: int | None = Field(None, ge=1)
    topk_group: int | None = Field(None, ge=1)
    routed_scaling_factor: float = Field(1.0, gt=0)
    first_k_dense_replace: int = Field(0, ge=0)
    moe_layer_freq: int = Field(1, ge=1)
    mlp_layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    is_causal: bool = True
    pooling: Literal["", "last", "mean", "cls"] = ""  # of the model's 1_Pooling/config.json


def spec_from_hf_config(config: object, name: str = "model") -> ModelSpec:
    """Return the spec, called `name`, that a `config.json` of transformers 4 or 5 describes.

    An architecture that is not in `FAMILIES` is approximated by the nearest that is, and the spec says so. Raises
    UserError for a field that is missing or wrong, or whose value has no cost model.
    """
    if not isinstance(config, Mapping):
        raise UserError(f"{name}.config", config, "must be a JSON object; give a Hugging Face config.json")
    config, architecture = _text_model(config)
    if not isinstance(architecture, str):
        remedy = "is not modelled; name the architecture of a model built like yours (LlamaForCausalLM, ...)"
        raise UserError(f"{name}.architectures", architecture, remedy)
    family, approximated = FAMILIES.get(architecture, ""), ""
    if not family or (config.get("kv_lora_rank") and family not in _LATENT):
        config, family, approximated = read(config, architecture, name)
    if (config.get("index_topk_freq") or 1) != 1:
        approximated = "its indexers, which some layers share, are priced in every layer"
    config = {**_DEFAULTS.get(family, {}), **config}
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):  # such as LLLG
        config["sliding_window_pattern"] = len(pattern)
    if config.get("rms_norm_eps", 1) is None:  # where LayerNorm has another field
        config = {key: value for key, value in config.items() if key != "rms_norm_eps"}
    required = [key for key, field in _HfConfig.model_fields.items() if field.is_required()]
    if not config.get("moe_intermediate_size"):  # an MoE model without dense layers needs no intermediate_size
        required.insert(4, "intermediate_size")
    for key in required:
        if config.get(key) is None:
            raise UserError(f"{name}.{key}", None, "is missing; add it to config.json")
    return _spec(parse(_HfConfig, config, where=name, typed=True), name, family, approximated)


def _text_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], object]:
    """Return the config of the text model in `config`, and the architecture of that model."""
    architecture = _architecture(config)
    text = next((config[key] for key in _TOWERS if isinstance(config.get(key), Mapping)), None)
    if not isinstance(architecture, str):
        return config, architecture
    if text is not None:
        shared = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
        inner = _TEXT_BY_TYPE.get(str(text.get("model_type"))) or _architecture(text)
        config, architecture = {**shared, **text}, _TEXT_OF.get(architecture) or inner or architecture
    return config, _TEXT_OF.get(architecture, architecture.replace("ForConditionalGeneration", "ForCausalLM"))


def _architecture(config: Mapping[str, Any]) -> Any:
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else named


def _spec(config: _HfConfig, name: str, family: str, approximated: str) -> ModelSpec:
    given: dict[str, Any] = {"rope_theta": config.rope_theta}
    for stated in (config.rope_scaling, config.rope_parameters):
        if stated is not None:
            given |= stated.model_dump(exclude_none=True)
    rope = _Rope(**given)
    heads, eos = config.num_attention_heads, config.eos_token_id
    eos_ids = eos if isinstance(eos, list) else [eos]
    kv_heads = config.num_key_value_heads or heads
    if heads % kv_heads:
        raise UserError(f"{name}.num_key_value_heads", kv_heads, f"must divide num_attention_heads, which is {heads}")
    latent = _latent(config, name, family) if family in _LATENT or config.kv_lora_rank else None
    head_dim = latent.qk_head_dim if latent else config.head_dim or config.hidden_size // heads
    if not config.is_causal:
        approximated = _joined(
            approximated, "tokens that attend to all others are priced as a causal prompt twice as long"
        )
    if config.pooling:
        approximated = _joined(approximated, "measured runs were of generation, not of pooling")
    tied, quantized = config.tie_word_embeddings, config.quantization_config or {}
    fields: dict[str, Any] = {
        "name": name,
        "family": family,
        "approximated": approximated,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.intermediate_size or config.moe_intermediate_size,
        "max_positions": config.max_position_embeddings,
        "rope_theta": 10000.0 if rope.rope_theta is None else rope.rope_theta,
        "rope_scaling": rope.scaling(name),
        "other_rope": None if rope.kind in ("default", "llama3") else rope.kind,
        "rope_interleaved": config.rope_interleaved,
        "rotary_share": latent.qk_rope_head_dim / head_dim if latent else _rotary_share(config, rope, head_dim),
        "latent": latent,
        "residual_streams": config.hc_mult,
        "draft_layers": config.num_nextn_predict_layers or config.mtp_num_hidden_layers or 0,
        "activation": config.hidden_activation or config.hidden_act or "silu",
        "qkv_bias": family in _QKV_BIAS or bool(config.attention_bias),
        "out_bias": family not in _BIAS_OF_QKV and bool(config.attention_bias),
        "mlp_bias": family == "gpt_oss" or bool(config.mlp_bias),
        "qk_norm": family in _QK_NORM or bool(config.use_qk_norm),
        "tied_embeddings": family in _TIED_BY_DEFAULT if tied is None else tied,
        "norm_eps": config.rms_norm_eps,
        "bos_id": config.bos_token_id,
        "eos_ids": tuple(id for id in eos_ids if id is not None),
        "pooling": config.pooling or ("" if config.is_causal else "mean"),
        "bidirectional": not config.is_causal,
        **checkpoint_fields(config.quantization_config, name),
        "checkpoint_experts": "mxfp4" if "fp4" in (config.expert_dtype, quantized.get("expert_dtype")) else "",
        **(_mixture(config, name, family) if family in _MIXTURES or _foreign_experts(config, family) else {}),
        **(_window(config, name, family) if family != "deepseek_v4" else {}),
        **(_linear(config, name, family) if _is_hybrid(config, family) else {}),
    }
    if family not in FAMILIES.values():  # its modules have names of their own
        return parse(ModelSpec, fields, where=name)
    kept = kept_modules(config.quantization_config, name)
    dense, experts = fields.get("dense_at", ()), fields.get("num_experts", 0)
    shared = bool(fields.get("shared_intermediate_size"))
    fields["checkpoint_kept"] = kept_layers(
        kept, name, config.num_hidden_layers, dense, experts, shared, latent is not None, _linear_at(config, family)
    )
    return parse(ModelSpec, fields, where=name)


def _joined(*clauses: str) -> str:
    return "; ".join(filter(None, clauses))


def _foreign_experts(config: _HfConfig, family: str) -> bool:
    """Return whether a model that is not of one of `FAMILIES` has experts."""
    return family not in FAMILIES.values() and bool(config.num_experts)


def _is_hybrid(config: _HfConfig, family: str) -> bool:
    """Return whether some layers have a constant state."""
    stated = config.linear_key_head_dim is not None and _LINEAR in (config.layer_types or ())
    return family in _HYBRID or (stated and family not in FAMILIES.values())


def _latent(config: _HfConfig, name: str, family: str) -> LatentAttention:
    if family == "deepseek_v4":
        return _compressed(config, name)
    needed = (*_LATENT_SIZES, *_INDEX_SIZES) if family in _SPARSE else _LATENT_SIZES
    sizes = _sizes(config, name, family, needed)
    return parse(LatentAttention, {"q_lora_rank": config.q_lora_rank or 0, **sizes}, where=name)


def _compressed(config: _HfConfig, name: str) -> CompressedAttention:
    """Return the attention that a DeepSeek-V4 `config.json` describes.

    Published files have `compress_ratios`; files written by transformers 5 have `layer_types`.
    """
    if config.qk_rope_head_dim is None and config.head_dim and config.partial_rotary_factor:
        config = config.model_copy(update={"qk_rope_head_dim": int(config.head_dim * config.partial_rotary_factor)})
    sizes = _sizes(config, name, "deepseek_v4", (*_COMPRESSED_SIZES, *_INDEX_SIZES))
    whole, kinds = sizes.pop("head_dim"), config.layer_types or []
    ratios = config.compress_ratios or [_RATIOS.get(kind, -1) for kind in kinds]
    if len(ratios) < config.num_hidden_layers:
        raise UserError(f"{name}.compress_ratios", ratios, f"must name {config.num_hidden_layers} layers")
    apart = whole - sizes["qk_rope_head_dim"]
    sizes |= {"kv_lora_rank": apart, "qk_nope_head_dim": apart, "v_head_dim": whole}
    return parse(CompressedAttention, {**sizes, "compress_ratios": ratios[: config.num_hidden_layers]}, where=name)


def _sizes(config: _HfConfig, name: str, family: str, needed: Sequence[str]) -> dict[str, Any]:
    """Return the values of the fields `needed`. Raises UserError if one is missing."""
    for size in needed:
        if getattr(config, size) is None:
            remedy = f"is missing; add it to config.json, because a {family} model needs it"
            raise UserError(f"{name}.{size}", None, remedy)
    return {size: getattr(config, size) for size in needed}


def _linear(config: _HfConfig, name: str, family: str) -> dict[str, Any]:
    sizes = _sizes(
        config, name, family, [size for size, field in LinearAttention.model_fields.items() if field.is_required()]
    )
    sizes["mamba_ssm_dtype"] = config.mamba_ssm_dtype
    layers = len(_linear_at(config, family))
    return {
        "linear": parse(LinearAttention, sizes, where=name),
        "linear_layers": layers,
        "attention_gate": family in _HYBRID,
    }


def _linear_at(config: _HfConfig, family: str) -> list[int]:
    """Return the indices of the layers that have a constant state."""
    layers = range(config.num_hidden_layers if _is_hybrid(config, family) else 0)
    if config.layer_types is not None:
        return [layer for layer, kind in zip(layers, config.layer_types, strict=False) if kind == _LINEAR]
    return [layer for layer in layers if (layer + 1) % config.full_attention_interval]


def _rotary_share(config: _HfConfig, rope: _Rope, head_dim: int) -> float:
    given = [config.partial_rotary_factor, rope.partial_rotary_factor]
    dim = config.rotary_dim / head_dim if config.rotary_dim else 1.0
    return min(dim, *(share for share in given if share is not None), 1.0)


def _mixture(config: _HfConfig, name: str, family: str) -> dict[str, Any]:
    experts = config.num_experts or config.num_local_experts or config.n_routed_experts
    if not experts or not config.num_experts_per_tok:
        count = "n_routed_experts" if family in _LATENT else "num_experts"
        missing = "num_experts_per_tok" if experts else count
        remedy = f"is missing; add it to config.json, because a {family} model needs it"
        raise UserError(f"{name}.{missing}", None, remedy)
    inter = config.moe_intermediate_size or config.intermediate_size or 0
    shared = config.shared_expert_intermediate_size or config.shared_intermediate_size
    grouped = config.n_group is not None and config.topk_group is not None and config.topk_group < config.n_group
    return {
        "num_experts": experts,
        "experts_per_token": config.num_experts_per_tok,
        "norm_topk_prob": config.norm_topk_prob or family not in _SHARES_AS_THEY_ARE,
        "moe_intermediate_size": inter,
        "shared_intermediate_size": shared or inter * (config.n_shared_experts or 0),
        "shared_gate": family in _SHARED_GATE,
        "router_bias": family == "dots1",
        "routed_scaling_factor": config.routed_scaling_factor,
        "expert_groups": (config.n_group or 0) if grouped else 0,
        "groups_per_token": (config.topk_group or 0) if grouped else 0,
        "dense_at": _dense_at(config),
    }


def _dense_at(config: _HfConfig) -> tuple[int, ...]:
    """Return the indices of the dense layers of an MoE model, as a config.json of Qwen, DeepSeek or GLM states them."""
    layers = range(config.num_hidden_layers)
    if config.mlp_layer_types is not None:
        return tuple(layer for layer, kind in zip(layers, config.mlp_layer_types, strict=False) if kind == "dense")
    first, freq = config.first_k_dense_replace, config.moe_layer_freq
    sparse, dense = config.decoder_sparse_step, config.mlp_only_layers or []
    return tuple(
        layer for layer in layers if layer in dense or (layer + 1) % sparse != 0 or layer < first or layer % freq != 0
    )


def _window(config: _HfConfig, name: str, family: str) -> dict[str, Any]:
    """Return the fields of the sliding window and its layers; empty if no window is below the maximum length."""
    window = config.sliding_window
    if family == "mistral" and "sliding_window" not in config.model_fields_set:
        window = 4096  # transformers' default where config.json is silent
    sliding = _sliding_layers(config, name, family)
    if not window or window >= config.max_position_embeddings or not sliding:  # transformers writes 0 for none
        return {}
    return {"sliding_window": window, "sliding_layers": len(sliding), "sliding_at": tuple(sliding)}


def _sliding_layers(config: _HfConfig, name: str, family: str) -> Sequence[int]:
    layers = range(config.num_hidden_layers)
    if config.layer_types is not None:
        for kind in config.layer_types:
            other = _LINEAR if _is_hybrid(config, family) else "sliding_attention"
            known = ("full_attention", *(_INDEXED if family in _SPARSE else (other,)))
            if kind not in known:
                remedy = f"has no cost model in a {family} model; only {' and '.join(known)} have one"
                raise UserError(f"{name}.layer_types", kind, remedy)
        return [layer for layer, kind in zip(layers, config.layer_types, strict=False) if kind == "sliding_attention"]
    if family in _FULL_EVERY:
        every = config.sliding_window_pattern or _FULL_EVERY[family]
        return [layer for layer in layers if (layer + 1) % every]
    if family == "gpt_oss":
        return layers[::2]
    if config.use_sliding_window:
        return layers[config.max_window_layers or 0 :]
    return layers if config.use_sliding_window is None and family in _SLIDES_WHEN_IT_CAN else ()
