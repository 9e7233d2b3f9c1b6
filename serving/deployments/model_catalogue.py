"""Finding models by name: in a catalogue of well-known models, or from a Hugging Face `config.json`.

Files of transformers 4 and 5 are read, and only the fields that affect the shapes of the model or its outputs.
`FAMILIES` lists the architectures whose cost follows from the spec. Others, such as state space models, are refused by
name, because an approximate spec would give wrong results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from serving.data_file import bundled, read_json_file
from serving.deployments.attention import HEAVY, SPARSE, CompressedAttention, LatentAttention, LinearAttention
from serving.deployments.config import parse
from serving.deployments.model_spec import ModelSpec, RopeScaling
from serving.deployments.weight_types import ATTENTION, checkpoint_fields, kept_layers, kept_modules
from serving.errors import UserError

_CATALOGUE = Path(__file__).with_name("models.yaml")
_NEAREST = 3  # number of names suggested for an unknown name
_LONGEST_NAME = 80  # only this many characters of an unknown name are compared
_EDITION = re.compile(
    r"-(instruct|chat|base|it|hf|thinking|fp8|nvfp4|fp4-v2|fp4|dynamic|awq|gptq|int4|int8|quantized[.]w[48]a16|w[48]a16|\d{4})(?=-|$)"
)
_PACKED = {  # integer editions: bits, inputs that share a scale (0: all), whether they have zero points
    "awq": (4, 128, True),
    "w8a16": (8, 0, False),
    "w4a16": (4, 128, False),
    "gptq-int8": (8, 128, False),
    "gptq": (4, 128, False),
}
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
}
_SPARSE = ("deepseek_v32", "glm_moe_dsa")
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v4", "glm4_moe_lite", *_SPARSE)
_INDEX_SIZES = ("index_n_heads", "index_head_dim", "index_topk")
_COMPRESSED_SIZES = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "sliding_window", "o_groups", "o_lora_rank")
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": SPARSE, "heavily_compressed_attention": HEAVY}
_HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_TEXT_OF = {  # architectures with other towers, whose text model is read from `text_config`
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
}
_LINEAR = "linear_attention"
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# In these families the weights of a token's experts are not scaled to sum 1, unless norm_topk_prob is set.
_SHARES_AS_THEY_ARE = ("qwen2_moe", "qwen3_moe", "dots1", *_LATENT)
_MIXTURES = ("mixtral", "qwen3_next", "qwen3_5_moe", "gpt_oss", "minimax_m2", *_SHARES_AS_THEY_ARE)
_QK_NORM = ("qwen3", "qwen3_moe", "minimax_m2", "gemma3", "dots1", *_HYBRID)
_SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_TIED_BY_DEFAULT = ("gemma2", "gemma3")
_FULL_EVERY = {"gemma2": 2, "gemma3": 6}  # transformers' default: every N-th layer has full attention
_SLIDES_WHEN_IT_CAN = ("mistral", "mixtral", "phi3")  # Qwen uses its window only with use_sliding_window


def find_model(name_or_path: str) -> ModelSpec:
    """Return the model with this name in the catalogue, or the model of the `config.json` (or its folder) at this path.

    A name may be a Hugging Face id, in any case. The organisation is ignored, and so are editions that do not change
    shapes (Instruct, Base, hf, a date). `-FP8` is the model stored in fp8, `-NVFP4` or `-FP4` the model in NVFP4. For
    `-AWQ`, `-GPTQ-Int4`, `-GPTQ-Int8`, `w4a16` and `w8a16` the usual format of such editions is assumed. Raises
    UserError that suggests similar names.
    """
    path = Path(name_or_path).expanduser()
    is_folder = _is_folder(path)
    if is_folder or path.suffix == ".json":
        path = path / "config.json" if is_folder else path
        return spec_from_hf_config(read_json_file(path, "model"), path.resolve().parent.name or "model")
    name = name_or_path.rsplit("/", 1)[-1].lower()
    known = _by_key().get(_key(name))
    if known is None:
        remedy = f"is not a known model{_near(name)}; see `tokentwin model list`, or give a config.json or its folder"
        raise UserError("model", name_or_path, remedy)
    spec, entry = _catalogued(known), _entries()[known]
    if spec.checkpoint_experts:  # editions differ only in their experts
        if "-nvfp4" in name:
            return spec.model_copy(update={"checkpoint_experts": "nvfp4"})
        return spec.model_copy(update={"checkpoint_experts": ""}) if "fp8" in name else spec
    if "-fp4" in name or "-nvfp4" in name:
        projections = entry.get("nvfp4", ATTENTION if spec.num_experts else ())
        kept = tuple((projection, tuple(range(spec.num_layers))) for projection in projections)
        fields: dict[str, Any] = {"checkpoint_quantization": "nvfp4", "checkpoint_kept": kept}
        return spec.model_copy(update=fields)
    if spec.checkpoint_quantization != "none":
        return spec
    if "fp8" in name:
        return spec.model_copy(update={"checkpoint_quantization": entry.get("fp8", "fp8")})
    stored = next((packed for edition, packed in _PACKED.items() if edition in name), None)
    if stored is None:
        return spec
    bits, group, zeros = stored
    named = ("checkpoint_quantization", "checkpoint_group_size", "checkpoint_zero_points")
    return spec.model_copy(update=dict(zip(named, (f"int{bits}", group, zeros), strict=True)))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long for a path
        return False


def _near(name: str) -> str:
    """Return a clause that suggests known names similar to an unknown name; empty if there are none."""
    lowered = {known.lower(): known for known in models()}
    near = [lowered[one] for one in get_close_matches(name[:_LONGEST_NAME], lowered, _NEAREST, cutoff=0.4)]
    return f", but {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))} is" if near else ""


def hub_id(name: str) -> str:
    """Return the Hugging Face id of a name of the catalogue; any other name is returned unchanged."""
    entry = _entries().get(name)
    return entry["id"] if entry else name


@cache
def models() -> dict[str, ModelSpec]:
    """Return the catalogue of models, by name."""
    return {name: _catalogued(name) for name in _entries()}


@cache
def _catalogued(name: str) -> ModelSpec:
    return spec_from_hf_config(_entries()[name], name)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = bundled(_CATALOGUE)
    return entries


@cache
def _by_key() -> dict[str, str]:
    """Return a mapping from the key of every name of a model (its id and other names) to its name in the catalogue."""
    return {
        _key(known): name for name, entry in _entries().items() for known in (name, entry["id"], *entry.get("also", ()))
    }


def _key(name: str) -> str:
    """Return the part of a name that all editions of a model share."""
    return _EDITION.sub("", name.rsplit("/", 1)[-1].lower()).removeprefix("meta-")


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


def spec_from_hf_config(config: object, name: str = "model") -> ModelSpec:
    """Return the spec, called `name`, that a `config.json` of transformers 4 or 5 describes.

    Raises UserError for a field that is missing or wrong, or whose value has no cost model.
    """
    if not isinstance(config, Mapping):
        raise UserError(f"{name}.config", config, "must be a JSON object; give a Hugging Face config.json")
    architecture = _architecture(config)
    text = config.get("text_config")
    if isinstance(architecture, str) and architecture in _TEXT_OF and isinstance(text, Mapping):
        shared = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
        config, architecture = {**shared, **text}, _TEXT_OF[architecture]
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if isinstance(architecture, str) and config.get("kv_lora_rank") and family not in _LATENT:
        latent = ", ".join(name for name, family in FAMILIES.items() if family in _LATENT)
        remedy = f"uses a latent attention that is not modelled; only that of {latent} is"
        raise UserError(f"{name}.architectures", architecture, remedy)
    if family is None:
        near = get_close_matches(str(architecture)[:80], FAMILIES, 3) or ["LlamaForCausalLM"]
        remedy = f"is not modelled; if your model is built like one that is ({', '.join(near)}, ...), name that one"
        raise UserError(f"{name}.architectures", architecture, remedy)
    required = [key for key, field in _HfConfig.model_fields.items() if field.is_required()]
    if not config.get("moe_intermediate_size"):  # an MoE model without dense layers needs no intermediate_size
        required.insert(4, "intermediate_size")
    for key in required:
        if config.get(key) is None:
            raise UserError(f"{name}.{key}", None, "is missing; add it to config.json")
    return _spec(parse(_HfConfig, config, where=name, typed=True), name, family)


def _architecture(config: Mapping[str, Any]) -> object:
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else named


def _spec(config: _HfConfig, name: str, family: str) -> ModelSpec:
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
    latent = _latent(config, name, family) if family in _LATENT else None
    head_dim = latent.qk_head_dim if latent else config.head_dim or config.hidden_size // heads
    tied, quantized = config.tie_word_embeddings, config.quantization_config or {}
    fields: dict[str, Any] = {
        "name": name,
        "family": family,
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
        "out_bias": family not in _QKV_BIAS and bool(config.attention_bias),
        "mlp_bias": family == "gpt_oss" or bool(config.mlp_bias),
        "qk_norm": family in _QK_NORM,
        "tied_embeddings": family in _TIED_BY_DEFAULT if tied is None else tied,
        "norm_eps": config.rms_norm_eps,
        "bos_id": config.bos_token_id,
        "eos_ids": tuple(id for id in eos_ids if id is not None),
        **checkpoint_fields(config.quantization_config, name),
        "checkpoint_experts": "mxfp4" if "fp4" in (config.expert_dtype, quantized.get("expert_dtype")) else "",
        **(_mixture(config, name, family) if family in _MIXTURES else {}),
        **(_window(config, name, family) if family != "deepseek_v4" else {}),
        **(_linear(config, name, family) if family in _HYBRID else {}),
    }
    kept = kept_modules(config.quantization_config, name)
    dense, experts = fields.get("dense_at", ()), fields.get("num_experts", 0)
    shared = bool(fields.get("shared_intermediate_size"))
    fields["checkpoint_kept"] = kept_layers(
        kept, name, config.num_hidden_layers, dense, experts, shared, latent is not None, _linear_at(config, family)
    )
    return parse(ModelSpec, fields, where=name)


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
    return {"linear": parse(LinearAttention, sizes, where=name), "linear_layers": layers, "attention_gate": True}


def _linear_at(config: _HfConfig, family: str) -> list[int]:
    """Return the indices of the layers that have a constant state."""
    layers, interval = range(config.num_hidden_layers if family in _HYBRID else 0), config.full_attention_interval
    if config.layer_types is not None:
        return [layer for layer, kind in zip(layers, config.layer_types, strict=False) if kind == _LINEAR]
    return [layer for layer in layers if (layer + 1) % interval]


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
            known = ("full_attention", _LINEAR if family in _HYBRID else "sliding_attention")
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
