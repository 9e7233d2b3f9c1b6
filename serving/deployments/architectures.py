"""Architectures that the cost model does not know, in the fields of those that it knows.

A reader turns a `config.json` into one of a decoder with attention and gated MLPs, and says in a clause what it
approximates. Weights, KV bytes and states are kept as exactly as the shapes allow; step times are then *extrapolated*.
An architecture without a reader is read by its shapes alone. A config that says too little is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tokentwin.serving.deployments.constant_states import (
    BOTH,
    FULL,
    LAYERS,
    STATE,
    Config,
    layer_kinds,
    lightning,
    short_convolution,
    state_space,
    states,
)
from tokentwin.serving.errors import UserError

_GATED, _PLAIN = 3, 2  # matrices of an MLP with and without a gate
_SPELLINGS = {  # other names of a field, as older or rarer architectures write it
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim", "block_ff_dim"),
    "max_position_embeddings": (
        "n_positions",
        "seq_length",
        "max_sequence_length",
        "max_seq_len",
        "n_ctx",
        "model_max_length",
    ),
    "vocab_size": ("padded_vocab_size",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("top_k_experts", "moe_k", "num_experts_per_token", "moe_topk", "moe_top_k"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "first_k_dense_replace": ("moe_layer_start_index", "num_dense_layers"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "shared_expert_intermediate_size": ("share_expert_dim", "share_expert_dims"),
    "n_group": ("num_expert_group",),
    "linear_num_key_heads": ("linear_num_heads",),
    "linear_num_value_heads": ("linear_num_heads",),
    "linear_key_head_dim": ("linear_head_dim",),
    "linear_value_head_dim": ("linear_head_dim",),
}
_STATES = ("mamba", "ssm_", "rwkv", "linear_attn", "attn_type_list")  # how fields of layers with states begin
_ONLY_STATES = ("mamba", "falcon_mamba", "rwkv", "xlstm")  # how model types without any attention begin
_UNGATED = (  # activations of MLPs without a gate
    "relu2", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "xielu",
)  # fmt: skip
_OLD = ("bloom", "mpt", "gpt2", "gpt_neo", "gpt_bigcode", "opt", "xglm", "falcon", "RefinedWeb", "RefinedWebModel")
_OLD_DEFAULTS = {"tie_word_embeddings": True, "max_position_embeddings": 2048}  # where files of these types are silent
_GATED_GELU = ("Gemma", "Grok")  # how architectures whose MLPs have a gate with GELU begin
_BOTH_EVERYWHERE = "FalconH1ForCausalLM"  # attention beside a state space in every layer
_WIDTHS = (  # fields that may be a list with a value for each layer
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "n_shared_experts",
)  # fmt: skip


class Reading(NamedTuple):
    """A config in known fields, the family that it is named after, and a clause about what is approximated."""

    config: dict[str, Any]
    family: str
    approximated: str


def read(config: Config, architecture: str, name: str) -> Reading:
    """Return what the `config.json` of an unknown architecture means in known fields.

    Raises UserError if the model called `name` is no decoder, has no attention, or has states of unknown size.
    """
    plain = {**config, **_respelled(config)}
    reader = _READERS.get(architecture) or _reader(plain, architecture, name)
    try:
        return reader(plain)
    except KeyError as error:
        raise UserError(f"{name}.{error.args[0]}", None, "is missing; add it to config.json") from None
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{name}.architectures", architecture, f"cannot be read ({error}); correct it") from None


def _reader(config: Config, architecture: str, name: str) -> Callable[[dict[str, Any]], Reading]:
    """Return how a config is read whose architecture has no reader of its own. Raises UserError as `read` says."""
    if config.get("is_encoder_decoder"):
        remedy = "has an encoder and a decoder; only decoders are modelled"
        raise UserError(f"{name}.architectures", architecture, remedy)
    if str(config.get("model_type")).startswith(_ONLY_STATES):
        remedy = "has no layers with attention; only models that have some are modelled"
        raise UserError(f"{name}.architectures", architecture, remedy)
    with_state = next((key for key in config if key.startswith(_STATES)), None)
    if with_state is None:
        return partial(_by_shapes, architecture=architecture)
    if config.get("mamba_d_state") and (architecture == _BOTH_EVERYWHERE or any(map(config.get, LAYERS))):
        return partial(_hybrid, architecture=architecture)
    remedy = f"has layers with states ({with_state}), but does not say which layers, or how large their states are"
    raise UserError(f"{name}.architectures", architecture, remedy)


def _respelled(config: Config) -> dict[str, Any]:
    """Return the fields that the config has only under another name."""
    given = {
        field: next((config[other] for other in others if config.get(other) is not None), None)
        for field, others in _SPELLINGS.items()
        if config.get(field) is None
    }
    return {field: value for field, value in given.items() if value is not None}


def _by_shapes(config: dict[str, Any], architecture: str) -> Reading:
    family = str(config.get("model_type") or architecture.removesuffix("ForCausalLM").lower())
    freq = config.get("moe_layer_freq")
    if isinstance(freq, list):
        config |= {"moe_layer_freq": 1, "mlp_only_layers": [at for at, one in enumerate(freq) if not one]}
    windows = config.get("hybrid_layer_pattern") or config.get("layer_types")
    if isinstance(windows, list):
        seen = [_seen(kind, config) for kind in windows]
        config["layer_types"] = [FULL if STATE in seen and kind != STATE else kind for kind in seen]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = 1
    old = family in _OLD
    if old:
        config = {**_OLD_DEFAULTS, **config}
    if not config.get("intermediate_size") and (config.get("n_embd") or old):  # where a config of GPT is silent
        config["intermediate_size"] = 4 * config["hidden_size"]
    config |= {width: round(sum(config[width]) / len(config[width])) for width in _WIDTHS if _is_list(config, width)}
    activation = config.get("hidden_act") or config.get("activation_function")
    if old or (activation in _UNGATED and not architecture.startswith(_GATED_GELU)):
        config |= _as_gated(config)
    if config.get("residual_moe"):  # Grok: a dense MLP beside the experts
        config["shared_expert_intermediate_size"] = config["intermediate_size"]
    config["routed_scaling_factor"] = config.get("routed_scaling_factor") or 1.0
    kind = "latent attention" if config.get("kv_lora_rank") else "attention with keys and values"
    experts = "experts" if config.get("num_experts") else "gated MLPs"
    return Reading(config, family, f"{architecture} is priced by its shapes, as {kind} and {experts}")


def _is_list(config: Config, width: str) -> bool:
    values = config.get(width)
    return isinstance(values, list) and len(values) > 0 and all(isinstance(value, int) for value in values)


def _seen(kind: object, config: Config) -> str:
    """Return what a layer of this kind sees: a window, a constant state of stated size, or all tokens."""
    if kind == STATE and config.get("linear_key_head_dim"):
        return STATE
    narrow = kind == 1 or any(word in str(kind) for word in ("sliding", "chunk", "local"))
    return "sliding_attention" if narrow else FULL


def _hybrid(config: dict[str, Any], architecture: str) -> Reading:
    """Read a model whose layers have attention, a state space (Mamba), or both.

    Layers with both become two. MLPs of layers with both become narrower, so that all weights are counted; a shared
    block (Zamba) is counted wherever it is used.
    """
    both = architecture == _BOTH_EVERYWHERE
    kinds = [BOTH] * config["num_hidden_layers"] if both else layer_kinds(config)
    twice = kinds.count(BOTH)
    mlps = twice or len(kinds)  # layers with both have the only MLPs
    layers = [one for kind in kinds for one in ((FULL, STATE) if kind == BOTH else (kind,))]
    period, experts = config.get("expert_layer_period") or 1, config.get("num_experts") or 0
    config |= {
        **state_space(config),
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "head_dim": config.get("head_dim") or config.get("attention_head_dim"),
        "intermediate_size": round(config["intermediate_size"] * mlps / len(layers)),
    }
    if experts > 1:
        offset = config.get("expert_layer_offset") or 0
        dense = [layer for layer in range(len(layers)) if layer % period != offset]
        config |= {"moe_intermediate_size": config["intermediate_size"], "mlp_only_layers": dense}
    else:
        config = {key: value for key, value in config.items() if key not in _EXPERTS}
    shared = "; its shared blocks count wherever they are used" if "zamba" in architecture.lower() else ""
    return Reading(config, str(config.get("model_type") or "hybrid"), _STATE_SPACES.replace(" 2", "") + shared)


def _lightning(config: dict[str, Any]) -> Reading:
    config |= {**lightning(config), "layer_types": layer_kinds(config)}
    if _is_list(config, "shared_intermediate_size"):
        config["shared_intermediate_size"] = max(config["shared_intermediate_size"])
    return Reading(
        config, "minimax", "its lightning attention is priced as gated delta networks with states of the same size"
    )


def _lfm2(config: dict[str, Any]) -> Reading:
    if config.get("block_auto_adjust_ff_dim", True) and not config.get("num_experts"):
        wide = int((config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * config["intermediate_size"] / 3))
        multiple = config.get("block_multiple_of") or 256
        config["intermediate_size"] = -(-wide // multiple) * multiple
    config |= {
        **short_convolution(config),
        "layer_types": layer_kinds(config),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return Reading(config, "lfm2", "its short convolutions are priced as gated delta networks with small states")


def _longcat(config: dict[str, Any]) -> Reading:
    """Read a model whose layers have two attentions, two dense MLPs, and experts, some of which do nothing."""
    layers, routed = 2 * config["num_hidden_layers"], config["num_experts"]
    working = routed / (routed + (config.get("zero_expert_num") or 0))
    config |= {
        "num_hidden_layers": layers,
        "mlp_only_layers": [*range(1, layers, 2)],
        "shared_expert_intermediate_size": config["intermediate_size"],
        "num_experts_per_tok": round(config["num_experts_per_tok"] * working),
    }
    what = "a layer is priced as two, with the mean number of experts of a token, those that do nothing left out"
    return Reading(config, "longcat_flash", what)


def _nested(config: dict[str, Any]) -> Reading:
    """Read MPT and DBRX, which state the sizes of attention and MLPs apart."""
    attention, mlp = config.get("attn_config") or {}, config.get("ffn_config") or {}
    config |= {
        "num_key_value_heads": attention.get("kv_n_heads") or config["num_attention_heads"],
        "rope_theta": attention.get("rope_theta"),
        "intermediate_size": mlp.get("ffn_hidden_size") or config.get("expansion_ratio", 4) * config["hidden_size"],
        "num_experts": mlp.get("moe_num_experts"),
        "num_experts_per_tok": mlp.get("moe_top_k"),
    }
    architecture = "DbrxForCausalLM" if config["num_experts"] else "MPTForCausalLM"
    return _by_shapes({key: value for key, value in config.items() if value is not None}, architecture)


def _qwen(config: dict[str, Any]) -> Reading:
    """Read the first Qwen, whose `intermediate_size` is that of gate and up together."""
    config |= {"intermediate_size": config["intermediate_size"] // 2, "attention_bias": True}
    return Reading(config, "qwen", "QWenLMHeadModel is priced as Qwen2")


def _arctic(config: dict[str, Any]) -> Reading:
    """Read Arctic, which has a dense MLP as wide as the hidden state beside its experts."""
    config |= {"shared_expert_intermediate_size": config["hidden_size"] if config.get("use_residual", True) else None}
    return _by_shapes(config, "ArcticForCausalLM")


def _step3(config: dict[str, Any]) -> Reading:
    """Read Step3, whose queries pass a narrow projection (arXiv:2507.19427), which is left out."""
    if experts := config.get("moe_layers_enum"):
        at = {int(layer) for layer in experts.split(",")} if isinstance(experts, str) else set(experts)
        config["mlp_only_layers"] = [layer for layer in range(config["num_hidden_layers"]) if layer not in at]
    return _by_shapes(config, "Step3TextForCausalLM")


def _as_gated(config: Config) -> dict[str, Any]:
    """Return the intermediate sizes at which gated MLPs have as many weights as these MLPs without a gate."""
    sizes = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    return {size: max(round(config[size] * _PLAIN / _GATED), 1) for size in sizes if config.get(size)}


def _llama4(config: dict[str, Any]) -> Reading:
    layers, step = config["num_hidden_layers"], config.get("interleave_moe_layer_step") or 1
    every, expert = 4, config["intermediate_size"]  # every fourth layer has no rotary embedding and sees all tokens
    chunk = config.get("attention_chunk_size")
    types = ["full_attention" if (at + 1) % every == 0 else "sliding_attention" for at in range(layers)]
    config |= {
        "moe_intermediate_size": expert,
        "shared_expert_intermediate_size": expert,
        "intermediate_size": config.get("intermediate_size_mlp") or expert,
        "mlp_only_layers": [at for at in range(layers) if (at + 1) % step],
        "sliding_window": chunk,
        "layer_types": types if chunk else None,
        "rope_scaling": None,  # its bands touch, which that of Llama 3.1 cannot, and it costs no time
    }
    return Reading(config, "llama4", f"attention in chunks of {chunk} tokens is priced as a window of as many")


def _gemma4(config: dict[str, Any]) -> Reading:
    rope = config.get("rope_parameters") or {}
    if experts := config.get("num_experts"):
        config["shared_expert_intermediate_size"] = config["intermediate_size"]  # a dense MLP beside the experts
    else:
        config = {key: value for key, value in config.items() if key not in ("num_experts", "num_experts_per_tok")}
    shape = ["num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim"]
    heads, wide, dim, wide_dim = (config.get(key) for key in shape)
    config["rope_parameters"] = rope.get("full_attention", rope)
    config["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
    differs = f"{wide} x {wide_dim} KV heads of full attention are priced as the windows' {heads} x {dim}"
    return Reading(config, "gemma4_moe" if experts else "gemma4", differs)


_KINDS = {"mamba": "M", STATE: "M", "attention": "*", FULL: "*", "moe": "E", "mlp": "-"}


def _nemotron_h(config: dict[str, Any]) -> Reading:
    """Read a model whose layers are each a state space, an attention or an MLP.

    A layer of the result has an attention or a state space, and the MLP that follows it. What has no MLP gets one of
    size 1. Experts that work on a smaller hidden state (`moe_latent_size`) get a smaller intermediate size instead.
    """
    listed = config.get("layers_block_type")
    pattern = "".join(_KINDS[kind] for kind in listed) if listed else config["hybrid_override_pattern"]
    mixers = [at for at, kind in enumerate(pattern) if kind in "M*"]
    layers = ["full_attention" if pattern[at] == "*" else "linear_attention" for at in mixers]
    followed = [at + 1 < len(pattern) and pattern[at + 1] in "E-" for at in mixers]
    hidden, shared = config["hidden_size"], config.get("moe_shared_expert_intermediate_size") or 0
    config |= {
        **_as_gated(config),
        **states(config, config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"]),
        "num_hidden_layers": len(mixers),
        "layer_types": layers,
        "head_dim": config.get("head_dim") or config.get("attention_head_dim"),
        "mamba_ssm_dtype": config.get("mamba_ssm_cache_dtype"),
    }
    if "E" not in pattern:
        config["intermediate_size"] = round(config["intermediate_size"] * pattern.count("-") / len(mixers))
        return Reading(config, "nemotron_h", _STATE_SPACES)
    latent = config.get("moe_latent_size")
    if latent:
        config["moe_intermediate_size"] = round(config["moe_intermediate_size"] * latent / hidden)
    config |= {
        "intermediate_size": 1,
        "mlp_only_layers": [at for at, has in enumerate(followed) if not has],
        "shared_expert_intermediate_size": round((shared + (latent or 0)) * _PLAIN / _GATED),
    }
    return Reading(config, "nemotron_h_moe", _STATE_SPACES)


def _kimi_linear(config: dict[str, Any]) -> Reading:
    """Read a model of delta attention and latent attention (Kimi Linear, arXiv:2510.26692, and Kimi K3).

    Experts that work on a smaller hidden state (`routed_expert_hidden_size`) get a smaller intermediate size instead,
    and the projections to and from this state are counted as a part of the shared expert. The output gates of K3's
    latent attention, 0.1 % of its weights, are left out.
    """
    linear, layers, hidden = config["linear_attn_config"], config["num_hidden_layers"], config["hidden_size"]
    heads, size, states = linear["num_heads"], linear["head_dim"], set(linear["kda_layers"])
    inter, latent = config["moe_intermediate_size"], config.get("routed_expert_hidden_size")
    shared = inter * (config.get("n_shared_experts") or 0)
    if latent:
        config["moe_intermediate_size"] = round(inter * latent / hidden)
        shared += round(latent * _PLAIN / _GATED)
    stored = config.get("quantization_config") or {}
    if stored.get("format") == "mxfp4-pack-quantized":  # of experts only
        config["quantization_config"] = {"quant_method": "mxfp4"}
    config |= {
        "layer_types": ["linear_attention" if at + 1 in states else "full_attention" for at in range(layers)],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "mamba_ssm_dtype": "float32",
        "shared_expert_intermediate_size": shared,
        "max_position_embeddings": config.get("max_position_embeddings") or config["model_max_length"],
    }
    what = "its delta attention is priced as gated delta networks with states of the same size"
    return Reading(config, "kimi_linear", what)


def _deci(config: dict[str, Any]) -> Reading:
    """Read a model whose layers were pruned one by one (arXiv:2411.19146).

    The result has as many layers as there are attentions, and MLPs of the mean size.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    blocks = config["block_configs"]
    shared = [block["attention"].get("n_heads_in_group") for block in blocks]  # query heads of a KV head
    with_keys = [group for group in shared if group]
    rows = [2 * int((block["ffn"].get("ffn_mult") or 0.0) * hidden / 3) for block in blocks]
    sizes = [-(-row // _MULTIPLE) * _MULTIPLE for row in rows]
    config |= {
        "num_hidden_layers": len(with_keys),
        "num_key_value_heads": heads // max(set(with_keys), key=with_keys.count),
        "intermediate_size": round(sum(sizes) / len(with_keys)),
    }
    return Reading(config, "deci", "its pruned layers are priced as layers of the mean size")


_EXPERTS = ("num_experts", "num_local_experts", "num_experts_per_tok")
_MULTIPLE = 256  # of which MLPs of a pruned model are a multiple
_STATE_SPACES = "its state spaces (Mamba 2) are priced as gated delta networks with states of the same size"


def _granite_hybrid(config: dict[str, Any]) -> Reading:
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    layers = [kinds.get(kind, kind) for kind in config.get("layer_types") or []]
    if "linear_attention" not in layers:
        plain = {key: value for key, value in config.items() if not key.startswith("mamba") and key != "layer_types"}
        return Reading(_few_experts(plain), "granite", "")
    config |= {
        **states(config, config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_state"]),
        "layer_types": layers,
    }
    if config.get("num_local_experts"):
        config["moe_intermediate_size"] = config["intermediate_size"]
    return Reading(_few_experts(config), "granite_hybrid", _STATE_SPACES)


def _few_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config; if it has no experts, its shared expert is the MLP."""
    if config.get("num_local_experts"):
        return config
    shared = config.pop("shared_intermediate_size", None)
    kept = {key: value for key, value in config.items() if key not in _EXPERTS}
    return {**kept, "intermediate_size": shared or config.get("intermediate_size")}


def _ungated(family: str) -> Callable[[dict[str, Any]], Reading]:
    def read(config: dict[str, Any]) -> Reading:
        what = "its MLPs without a gate are priced as gated MLPs with as many weights"
        return Reading({**config, **_as_gated(config)}, family, what)

    return read


def _encoder(family: str, unusable_positions: int = 0) -> Callable[[dict[str, Any]], Reading]:
    """Return a reader of an encoder with learnt positions, such as BERT (arXiv:1810.04805).

    RoBERTa numbers its positions from 2 on, so that many of them are unusable.
    """

    def read(config: dict[str, Any]) -> Reading:
        config |= {
            **_as_gated(config),
            **_POOLING,
            "pooling": config.get("pooling") or "cls",
            "attention_bias": True,
            "max_position_embeddings": config["max_position_embeddings"] - unusable_positions,
        }
        what = "its MLPs are priced as gated MLPs with as many weights, its learnt positions as rotary embeddings"
        return Reading(config, family, what)

    return read


def _nomic_bert(config: dict[str, Any]) -> Reading:
    """Read an encoder with rotary embeddings and gated MLPs (arXiv:2402.01613).

    vLLM serves it up to the length that it was trained for, because longer prompts need another rotary embedding.
    """
    positions = config["max_position_embeddings"]
    config |= {
        **_POOLING,
        "pooling": config.get("pooling") or "mean",
        "max_position_embeddings": min(config.get("max_trained_positions") or positions, positions),
    }
    return Reading(config, "nomic_bert", "its post-norms are priced as pre-norms")


_POOLING = {"is_causal": False, "tie_word_embeddings": True}


def _minimax_m3(config: dict[str, Any]) -> Reading:
    freq = config.get("moe_layer_freq")
    dense = [at for at, one in enumerate(freq) if not one] if isinstance(freq, list) else []
    config |= {
        "moe_layer_freq": 1,
        "mlp_only_layers": dense,
        "moe_intermediate_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "intermediate_size": config.get("dense_intermediate_size") or config["intermediate_size"],
        "first_k_dense_replace": 0,
    }
    return Reading(config, "minimax_m3", "its sparse attention is priced as attention to all tokens")


_READERS: dict[str, Callable[[dict[str, Any]], Reading]] = {
    "Llama4ForCausalLM": _llama4,
    "Gemma4ForCausalLM": _gemma4,
    "NemotronHForCausalLM": _nemotron_h,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "NemotronForCausalLM": _ungated("nemotron"),
    "Starcoder2ForCausalLM": _ungated("starcoder2"),
    "ApertusForCausalLM": _ungated("apertus"),
    "MiniMaxM3ForCausalLM": _minimax_m3,
    "DeciLMForCausalLM": _deci,
    "KimiLinearForCausalLM": _kimi_linear,
    **dict.fromkeys(("BertModel", "BertForMaskedLM", "BertForSequenceClassification"), _encoder("bert")),
    **dict.fromkeys(
        ("RobertaModel", "XLMRobertaModel", "XLMRobertaForSequenceClassification"), _encoder("xlm_roberta", 2)
    ),
    "NomicBertModel": _nomic_bert,
    **dict.fromkeys(("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), _lightning),
    **dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), _lfm2),
    "LongcatFlashForCausalLM": _longcat,
    **dict.fromkeys(("MPTForCausalLM", "MptForCausalLM", "DbrxForCausalLM"), _nested),
    "QWenLMHeadModel": _qwen,
    "ArcticForCausalLM": _arctic,
    **dict.fromkeys(("Step3TextForCausalLM", "Step3VLForCausalLM"), _step3),
    "Ernie4_5_MoeForCausalLM": lambda config: Reading(config, "ernie4_5_moe", ""),
}
