"""Architectures that the cost model does not know, in the fields of those that it knows.

A reader turns a `config.json` into one of a decoder with attention and gated MLPs, and says in a clause what it
approximates. Weights, KV bytes and states are kept as exactly as the shapes allow; step times are then *extrapolated*.
An architecture without a reader is read by its shapes alone. A config that says too little is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from serving.errors import UserError

Config = Mapping[str, Any]

_GATED, _PLAIN = 3, 2  # matrices of an MLP with and without a gate
_SPELLINGS = {  # other names of a field, as older or rarer architectures write it
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_sequence_length", "max_seq_len", "n_ctx"),
    "vocab_size": ("padded_vocab_size",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("top_k_experts", "moe_k", "num_experts_per_token", "moe_topk"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "first_k_dense_replace": ("moe_layer_start_index",),
}
_STATES = ("mamba", "ssm_", "rwkv", "linear_attn", "attn_type_list")  # how fields of layers with states begin
_UNGATED = ("relu2", "relu", "gelu", "gelu_new", "gelu_fast", "xielu")  # activations of MLPs without a gate


class Reading(NamedTuple):
    """A config in known fields, the family that it is named after, and a clause about what is approximated."""

    config: dict[str, Any]
    family: str
    approximated: str


def read(config: Config, architecture: str, name: str) -> Reading:
    """Return what the `config.json` of an unknown architecture means in known fields.

    Raises UserError if the model called `name` has layers with states that no reader knows.
    """
    reader = _READERS.get(architecture)
    plain = {**config, **_respelled(config)}
    if reader is not None:
        try:
            return reader(plain)
        except KeyError as error:
            raise UserError(f"{name}.{error.args[0]}", None, "is missing; add it to config.json") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{name}.architectures", architecture, f"cannot be read ({error}); correct it") from None
    if states := next((key for key in config if key.startswith(_STATES)), None):
        remedy = f"has layers with states ({states}), which are read only of {', '.join(_WITH_STATES)}"
        raise UserError(f"{name}.architectures", architecture, remedy)
    return _by_shapes(plain, architecture)


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
        narrow = [one == 1 or any(word in str(one) for word in ("sliding", "chunk", "local")) for one in windows]
        config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in narrow]
    if config.get("n_embd") and not config.get("intermediate_size"):
        config["intermediate_size"] = 4 * config["n_embd"]  # where a config of GPT is silent
    if (config.get("hidden_act") or config.get("activation_function")) in _UNGATED and family != "gemma":
        config |= _as_gated(config)
    config["routed_scaling_factor"] = config.get("routed_scaling_factor") or 1.0
    kind = "latent attention" if config.get("kv_lora_rank") else "attention with keys and values"
    experts = "experts" if config.get("num_experts") else "gated MLPs"
    return Reading(config, family, f"{architecture} is priced by its shapes, as {kind} and {experts}")


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


_KINDS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


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
        **_states(config, config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"]),
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


_MULTIPLE = 256  # of which MLPs of a pruned model are a multiple
_STATE_SPACES = "its state spaces (Mamba 2) are priced as gated delta networks with states of the same size"


def _granite_hybrid(config: dict[str, Any]) -> Reading:
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    layers = [kinds.get(kind, kind) for kind in config.get("layer_types") or []]
    if "linear_attention" not in layers:
        plain = {key: value for key, value in config.items() if not key.startswith("mamba") and key != "layer_types"}
        return Reading(_few_experts(plain), "granite", "")
    config |= {
        **_states(config, config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_state"]),
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
    without = ("num_experts", "num_local_experts", "num_experts_per_tok")
    kept = {key: value for key, value in config.items() if key not in without}
    return {**kept, "intermediate_size": shared or config.get("intermediate_size")}


def _states(config: Config, heads: int, size: int, state: int) -> dict[str, Any]:
    """Return the fields of a gated delta network with the states of Mamba 2 (arXiv:2405.21060)."""
    return {
        "linear_num_key_heads": config.get("n_groups") or config.get("mamba_n_groups") or 1,
        "linear_key_head_dim": state,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": config.get("conv_kernel") or config.get("mamba_d_conv") or 4,
    }


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
    "Ernie4_5_MoeForCausalLM": lambda config: Reading(config, "ernie4_5_moe", ""),
}
_WITH_STATES: Sequence[str] = (
    "NemotronHForCausalLM", "GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM", "KimiLinearForCausalLM",
)  # fmt: skip
