"""The types of a deployment's weights, with their bytes, and the types that a `quantization_config` states.

Memory and step times depend on them. Unknown formats are refused by name, because a format that is only partly
understood would be read wrongly.

A checkpoint lists the linear layers that it keeps in 16 bits. A name in the list stands for a module and everything in
it; the name may begin at any part of the path (`self_attn`, `layers.0.mlp.down_proj`). `*` in a name matches any text
(modelopt). A name that begins with `re:` is a regular expression that matches the path from its start
(compressed-tensors). Projections that engines multiply together must be stored in one format, as vLLM and the real
engine require; so must all input projections of latent attention. Embeddings, norms, routers, the head, other towers
and layers for drafting are always in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import translate
from operator import eq
from typing import Any, NamedTuple

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.editions import check_edition
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,  # without the 4-byte scale of each 128 x 128 weights, which adds 0.02 %
    "int8": 1.0,  # `weight_width` adds the scales and zero points of groups
    "int4": 0.5,
    "mxfp4": 17 / 32,  # 4 bits, and an 8-bit scale for each 32 weights (OCP Microscaling Formats 1.0)
    "nvfp4": 9 / 16,  # 4 bits, and an 8-bit scale for each 16 weights
}
GROUP_SIZE = {"int4": 128, "int8": 0}  # inputs that share a scale if weights are quantised on loading; 0: all
ATTENTION = ("qkv", "attention out", "linear in", "linear out")  # projections, by their names in a step
_SCALE_BYTES = 2.0
_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")  # keys under which formats list layers in 16 bits
KNOWN = "fp8, mxfp4, NVFP4, GPTQ, AWQ, compressed-tensors and unquantised weights"
_OUTSIDE = re.compile(
    "lm_head|embed|norm|router|(^|[.])gate[$]?$|shared_expert_gate|visual|vision_tower|mm_projector|^mtp|correction_bias|indexer"
    "|in_proj_(a|b|ba)$|conv1d"
)
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_LATENT = tuple((*queries, "kv_a_proj_with_mqa", "kv_b_proj") for queries in (("q_a_proj", "q_b_proj"), ("q_proj",)))
_LINEAR = (("in_proj_qkv", "in_proj_z"), ("in_proj_qkvz",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
Kept = tuple[tuple[str, tuple[int, ...]], ...]


class Stored(NamedTuple):
    """The storage of a projection in some layers.

    Attributes:
        layers: number of layers that store it in this way
        dtype: type of the weights, which decides the time of GEMMs
        width: bytes of a weight, with its share of the scales
        suffix: text added to the names of its operations if other layers store the projection in another type
    """

    layers: int
    dtype: str
    width: float
    suffix: str = ""


def weights_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """Return the type of the weights: the deployment's `quantization`, else the checkpoint's, else `dtype`.

    Some weights may stay in 16 bits; see `stored`.
    """
    if deployment.quantization != "none":
        return deployment.quantization
    published = model.checkpoint_quantization
    return deployment.dtype if published == "none" else published


def narrowest_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """Return the type of the experts of an MoE model, which may have fewer bits than the rest; else of all weights."""
    return stored(model, deployment, "experts", 1)[0].dtype if model.num_experts else weights_dtype(model, deployment)


def stored(model: ModelSpec, deployment: Deployment, projection: str, layers: int) -> list[Stored]:
    """Return how `layers` layers store a projection, which has its name in a step.

    The first entry is for the layers that store it in the model's usual type, the second for the layers that keep it in
    16 bits. An entry without layers is left out.
    """
    dtype, kept = weights_dtype(model, deployment), _kept(model, deployment, projection, layers)
    if projection == "experts" and dtype == model.checkpoint_quantization:
        dtype = model.checkpoint_experts or dtype
    suffix = " (16 bits)" if kept < layers else ""
    parts = [
        Stored(layers - kept, dtype, weight_width(dtype, model, deployment)),
        Stored(kept, deployment.dtype, DTYPE_BYTES[deployment.dtype], suffix),
    ]
    return [part for part in parts if part.layers]


def _kept(model: ModelSpec, deployment: Deployment, projection: str, layers: int) -> int:
    """Return how many of `layers` layers keep a projection in 16 bits.

    The checkpoint decides if its type is used. Otherwise it is as in published checkpoints: mxfp4 is only for experts,
    and NVIDIA's nvfp4 editions of MoE models keep attention in 16 bits.
    """
    dtype = weights_dtype(model, deployment)
    if dtype == "mxfp4":
        return 0 if projection == "experts" else layers
    if dtype == model.checkpoint_quantization:
        return min(len(dict(model.checkpoint_kept).get(projection, ())), layers)
    return layers if dtype == "nvfp4" and model.num_experts and projection in ATTENTION else 0


def check_format(model: ModelSpec, deployment: Deployment) -> None:
    """Raise UserError if the weights cannot be in the deployment's format.

    mxfp4 needs experts, and a model that is named as an edition (`-AWQ`) has the format of that edition.
    """
    check_edition(deployment.model, deployment.quantization)
    if deployment.quantization == "mxfp4" and not model.num_experts:
        remedy = f"is for a mixture's experts, and {model.name} has none; use int4 or fp8"
        raise UserError("quantization", "mxfp4", remedy)


def check_heads(model: ModelSpec, tp: int) -> None:
    """Raise UserError if heads cannot be split evenly over `tp` devices; KV heads may be repeated."""
    if model.num_heads % tp or max(model.num_kv_heads, tp) % min(model.num_kv_heads, tp):
        remedy = f"must split {model.name}'s {model.num_heads} heads and {model.num_kv_heads} KV heads evenly"
        raise UserError("tensor_parallel_size", tp, remedy)


def check_linear_heads(model: ModelSpec, tp: int) -> None:
    """Raise UserError if heads with a constant state cannot be split evenly over `tp` devices.

    A single key head is repeated on every device.
    """
    if model.linear is None:
        return
    keys, values = model.linear.linear_num_key_heads, model.linear.linear_num_value_heads
    heads, kind = (values, "value") if keys == 1 else (keys, "key")
    if heads % tp:
        remedy = f"must divide the {heads} {kind} heads of {model.name}'s layers with a constant state"
        raise UserError("tensor_parallel_size", tp, remedy)


def weight_width(dtype: str, model: ModelSpec, deployment: Deployment) -> float:
    """Return the bytes of a weight of `dtype`, with its share of the 16-bit scale and the zero point of its group.

    The checkpoint states the group size; if weights are quantised on loading, `GROUP_SIZE` does. If all inputs of an
    output share one scale, a group is assumed to have as many weights as the hidden size.
    """
    if dtype not in GROUP_SIZE:
        return DTYPE_BYTES[dtype]
    number = DTYPE_BYTES[dtype]
    group, zeros = GROUP_SIZE[dtype], False
    if model.checkpoint_quantization == dtype:
        group, zeros = model.checkpoint_group_size, model.checkpoint_zero_points
    return number + (_SCALE_BYTES + (number if zeros else 0.0)) / (group or model.hidden_size)


def checkpoint_fields(config: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that say how the weights of the model called `name` are stored.

    Raises UserError if the format has no cost model.
    """
    if not config:
        return {}
    method = config.get("quant_method") or ("modelopt" if config.get("quant_algo") else None)
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
    """Return the fields of a GPTQ or AWQ checkpoint. Early checkpoints call the settings w_bit and q_group_size."""
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
    """Return the names of modules that stay in 16 bits. Raises UserError if the config has no valid list of names."""
    if not config or config.get("quant_method") == "mxfp4":  # mxfp4 stores experts only, whatever modules are listed
        return []
    named: list[str] = []
    for key in _LISTS:
        listed = config.get(key) or []
        modules = [listed] if isinstance(listed, str) else listed
        if not isinstance(modules, list) or not all(module and isinstance(module, str) for module in modules):
            raise UserError(f"{name}.quantization_config.{key}", listed, "must be a list of names of modules")
        named += modules
    return named


def _unknown(name: str, stored: Any) -> UserError:
    return UserError(f"{name}.quantization_config", stored, f"has no cost model; only {KNOWN} have one")


def kept_layers(
    patterns: Sequence[str],
    name: str,
    layers: int,
    dense: Collection[int],
    experts: int,
    shared: bool,
    latent: bool,
    linear: Collection[int] = (),
) -> Kept:
    """Return, for each projection (by its name in a step), the layers from 0 that keep it in 16 bits.

    Projections that no layer keeps in 16 bits are left out.

    Args:
        patterns: names in the checkpoint's list of modules in 16 bits
        name: name of the model, for errors
        layers: number of layers
        dense: indices of the dense layers of an MoE model
        experts: number of experts; 0 if all layers are dense
        shared: True if an MoE model has a shared expert
        latent: True if the model has latent attention
        linear: indices of the layers that have attention with a constant state

    Raises UserError if only some of the weights that must be stored in one format are kept, or a name matches nothing
    that is known.
    """
    field = f"{name}.quantization_config"
    listed = [_Pattern(pattern, field) for pattern in patterns]
    kept: dict[str, list[int]] = {}
    for layer in range(layers if listed else 0):
        here = [pattern for pattern in listed if pattern.layer in (None, layer)]
        plain = _LATENT if latent else _QKV
        attention = _LINEAR if layer in linear else plain
        for projection, spellings in _projections(not experts or layer in dense, experts, shared, attention):
            paths = [[f"model.layers.{layer}.{module}" for module in modules] for modules in spellings]
            kept_paths = [[path for path in one if sum(pattern.names(path) for pattern in here)] for one in paths]
            if any(map(eq, kept_paths, paths)):
                kept.setdefault(projection, []).append(layer)
            elif alone := next(filter(None, kept_paths), None):
                remedy = "is in 16 bits, but not all that must be stored like it; use another checkpoint"
                raise UserError(field, alone[0], remedy)
    for pattern in listed:
        if not pattern.used and not _OUTSIDE.search(pattern.said) and (pattern.layer or 0) < layers:
            remedy = "names no weights that are known; leave it out if it is no linear layer"
            raise UserError(field, pattern.said[:80], remedy)
    return tuple((projection, tuple(kept_by)) for projection, kept_by in kept.items())


class _Pattern:
    """A name in a checkpoint's list of modules in 16 bits.

    Attributes:
        layer: index of the only layer that it can match; None if it can match any layer
        used: True if it has matched a module
    """

    def __init__(self, said: str, field: str) -> None:
        self.said, self.used = said, False
        numbered = re.search(r"layers[.](\d+)", said)
        self.layer = int(numbered[1]) if numbered and not said.startswith("re:") else None
        at = max(said.find("layers."), 0)  # the path of a wrapper may come before "layers."
        path = said[3:] if said.startswith("re:") else rf".*\b{translate(said[at:])[:-2]}([.].*)?\Z"
        try:
            self._expression = re.compile(path)
        except re.error as error:
            raise UserError(field, said[:80], f"is no regular expression ({error}); correct it") from None

    def names(self, module: str) -> bool:
        """Return whether the pattern matches the module with this path."""
        names = bool(self._expression.match(module))
        self.used |= names
        return names


def _projections(
    dense: bool, experts: int, shared: bool, attention: Sequence[Sequence[str]]
) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield each projection of a layer: its name in a step, and its modules in each possible spelling."""
    if attention is _LINEAR:
        yield "linear in", _within("linear_attn", _LINEAR)
        yield "linear out", _within("linear_attn", (("out_proj",),))
    else:
        yield "qkv", _within("self_attn", attention)
        yield "attention out", _within("self_attn", (("o_proj",),))
    if dense:
        yield from _mlp("", "mlp")
        return
    ends = sorted({0, experts - 1})
    yield (
        "experts",
        [
            tuple(f"{where}.{expert}.{part}" for expert in ends for part in parts)
            for where, parts in zip(("mlp.experts", "block_sparse_moe.experts"), _EXPERT, strict=True)
        ],
    )
    if shared:
        yield from _mlp("shared ", "mlp.shared_expert", "mlp.shared_experts")


def _mlp(which: str, *places: str) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    yield f"{which}gate and up", [modules for where in places for modules in _within(where, _GATE_UP)]
    yield f"{which}down", [modules for where in places for modules in _within(where, (("down_proj",),))]


def _within(where: str, spellings: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    return [tuple(f"{where}.{module}" for module in modules) for modules in spellings]
