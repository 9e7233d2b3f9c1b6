"""The way a checkpoint's weights are stored, from the `quantization_config` of its config.json.

Unknown formats are refused by name: a format that is nearly read is read wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.errors import UserError

_KEPT = ("modules_to_not_convert", "ignored_layers", "ignore")  # names of the formats for layers left in 16 bits
KNOWN = "fp8, mxfp4, NVFP4, GPTQ, AWQ, compressed-tensors and unquantised weights"


def checkpoint_fields(config: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that say how the weights of the model called `name` are stored.

    Raises UserError for weights that cannot be priced.
    """
    if not config:
        return {}
    method = config.get("quant_method")
    if method in ("gptq", "awq"):
        return _grouped(config, name)
    if method == "compressed-tensors":
        return _compressed(config, name)
    if method == "mxfp4":  # mxfp4 stores experts only, whatever modules are listed
        return {"checkpoint_quantization": "mxfp4"}
    if method == "fp8":
        stored = "fp8_block" if config.get("weight_block_size") else "fp8"
        return {"checkpoint_quantization": stored}
    if method == "fbgemm_fp8" or (method, config.get("quant_algo")) == ("modelopt", "FP8"):
        return {"checkpoint_quantization": "fp8"}
    if (method, config.get("quant_algo")) == ("modelopt", "NVFP4"):
        return {"checkpoint_quantization": "nvfp4"}
    raise _unknown(name, config.get("quant_algo") or method)


def _grouped(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of GPTQ or AWQ, whose early checkpoints call their settings w_bit and q_group_size."""
    method = config["quant_method"]
    if config.get("dynamic"):
        remedy = "sets bits for single layers, which is not supported; use a checkpoint without it"
        raise UserError(f"{name}.quantization_config.dynamic", str(config["dynamic"])[:80], remedy)
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        remedy = "packs weights in another order than gemm; use a gemm checkpoint"
        raise UserError(f"{name}.quantization_config.version", config["version"], remedy)
    if method == "gptq" and config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        remedy = "is not supported; use a checkpoint in gptq or gptq_v2"
        raise UserError(f"{name}.quantization_config.checkpoint_format", config["checkpoint_format"], remedy)
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size", "missing"))
    zeros = config.get("zero_point", True) if method == "awq" else not config.get("sym", True)
    return _integers(name, bits, group, bool(zeros))


def _compressed(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    where, layout = f"{name}.quantization_config", config.get("format")
    groups = config.get("config_groups") or {}
    schemes = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
    if layout == "float-quantized":
        blocks = any(scheme.get("strategy") == "block" for scheme in schemes)
        return {"checkpoint_quantization": "fp8_block" if blocks else "fp8"}
    if layout not in ("pack-quantized", "int-quantized"):
        raise _unknown(name, layout)
    if any(group.get("input_activations") for group in groups.values()):
        remedy = "in integers are not supported, only weights; use a checkpoint such as W4A16, or one in fp8"
        raise UserError(f"{where}.input_activations", "quantised activations", remedy)
    stored = [
        _integers(name, scheme.get("num_bits"), scheme.get("group_size"), not scheme.get("symmetric", True))
        for scheme in schemes
    ]
    if not stored or any(one != stored[0] for one in stored):
        raise UserError(f"{where}.config_groups", len(stored), "must all store weights alike; use another checkpoint")
    return stored[0]


def _integers(name: str, bits: Any, group: Any, zeros: bool) -> dict[str, Any]:
    where = f"{name}.quantization_config"
    if bits not in (4, 8):
        raise UserError(f"{where}.bits", bits, "must be 4 or 8")
    group = -1 if group is None else group
    if not isinstance(group, int) or (group != -1 and (group < 16 or group % 16)):
        raise UserError(f"{where}.group_size", group, "must be a multiple of 16, or -1")
    return {
        "checkpoint_quantization": f"int{bits}",
        "checkpoint_group_size": max(group, 0),
        "checkpoint_zero_points": zeros,
    }


def kept_modules(config: Mapping[str, Any] | None, name: str) -> list[str]:
    """Return the names of modules that stay in 16 bits. Raises UserError for anything but a list of names."""
    if not config or config.get("quant_method") == "mxfp4":  # mxfp4 stores experts only, whatever modules are listed
        return []
    named: list[str] = []
    for key in _KEPT:
        listed = config.get(key) or []
        modules = [listed] if isinstance(listed, str) else listed
        if not isinstance(modules, list) or not all(module and isinstance(module, str) for module in modules):
            raise UserError(f"{name}.quantization_config.{key}", listed, "must be a list of names of modules")
        named += modules
    return named


def _unknown(name: str, stored: Any) -> UserError:
    return UserError(f"{name}.quantization_config", stored, f"has no cost model; only {KNOWN} have one")
