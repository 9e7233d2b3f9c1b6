"""Layers with a constant state (Mamba, lightning attention, short convolutions) in the fields of gated delta networks.

A gated delta network has one matrix for each value head (`LinearAttention`). States keep their size, and projections
nearly as many weights. What is read is which layers have a state, and the sizes of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

STATE, FULL = "linear_attention", "full_attention"
BOTH = "hybrid"  # of a layer with attention beside or after a state space
_KINDS = {"mamba": STATE, "conv": STATE, "short_conv": STATE, "attention": FULL, STATE: STATE, FULL: FULL, BOTH: BOTH}
LAYERS = ("layers_block_type", "layer_types", "attn_layer_indices", "attn_layer_period", "mamba_step")
"""Fields that say which layers have a state."""
_CHANNELS = 16  # that share a head where each channel has a state of its own (Mamba 1)


def layer_kinds(config: Config) -> list[str]:
    """Return what each layer has: a state, attention, or both; empty if the config does not say."""
    layers = range(config["num_hidden_layers"])
    if listed := config.get("layers_block_type") or config.get("layer_types"):
        return [_KINDS.get(str(kind), FULL) for kind in listed]
    if "attn_type_list" in config:
        return [FULL if kind == 1 else STATE for kind in config["attn_type_list"]]
    if "full_attn_idxs" in config or "attn_layer_indices" in config:
        full = config.get("full_attn_idxs") or config.get("attn_layer_indices") or ()
        return [FULL if layer in full else STATE for layer in layers]
    if period := config.get("attn_layer_period"):
        return [FULL if layer % period == config.get("attn_layer_offset", 0) else STATE for layer in layers]
    if step := config.get("mamba_step"):
        return [FULL if layer % step == step // 2 else STATE for layer in layers]
    return []


def state_space(config: Config) -> dict[str, Any]:
    """Return the fields of a state space by Mamba's names (arXiv:2312.00752 and 2405.21060).

    In Mamba 1 each channel has its own step size. Sixteen channels are a head, which gives the projections of heads
    about as many weights as those of step sizes have.
    """
    names = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    heads = next((config[name] for name in names if config.get(name)), 0)
    inner = config.get("mamba_d_ssm") or heads * (config.get("hidden_size_per_head") or 0)
    inner = inner or int((config.get("mamba_expand") or 2) * config["hidden_size"])
    if not heads or "mamba_dt_rank" in config:
        heads = inner // _CHANNELS
    return states(config, heads, inner // heads, config["mamba_d_state"])


def states(config: Config, heads: int, size: int, state: int) -> dict[str, Any]:
    """Return the fields of a gated delta network with the states of Mamba 2."""
    groups = config.get("n_groups") or config.get("mamba_n_groups") or config.get("mamba_ngroups") or 1
    return {
        "linear_num_key_heads": groups,
        "linear_key_head_dim": state,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": config.get("conv_kernel") or config.get("mamba_d_conv") or 4,
    }


def lightning(config: Config) -> dict[str, Any]:
    """Return the fields of lightning attention (MiniMax-01, arXiv:2501.08313): every head has a state."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    fields = states({"n_groups": heads}, heads, size, size)
    return {**fields, "linear_conv_kernel_dim": 1, "mamba_ssm_dtype": "float32"}


def short_convolution(config: Config) -> dict[str, Any]:
    """Return the fields of a gated convolution (LFM2), whose projections have four times the squared hidden size."""
    hidden = config["hidden_size"]
    fields = states({"n_groups": hidden // 2 // _CHANNELS}, hidden // _CHANNELS, _CHANNELS, _CHANNELS)
    return {**fields, "linear_conv_kernel_dim": config.get("conv_L_cache") or 3}
