"""The types of weights: as a deployment has them, with their bytes, and as a checkpoint's `quantization_config` says.

Memory and times both follow from them. Unknown formats are refused by name: a format that is nearly read is read
wrongly.

A checkpoint lists the linear layers that it keeps in 16 bits. A name stands for a module and all within it, from any
part of its path on (`self_attn`, `layers.0.mlp.down_proj`). `*` in a name stands for anything (modelopt). A name that
begins with `re:` is a regular expression of the path from its beginning (compressed-tensors). Projections that engines
multiply at once must be stored alike, as vLLM and the real engine demand; so must all projections that lead into a
latent attention. Embeddings, norms, routers, the head, other towers and layers for drafting are in 16 bits in any case.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import translate
from operator import eq
from typing import Any, NamedTuple

from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,  # without the 4-byte scale for 128 x 128 weights: 0.02 %
    "int8": 1.0,  # `weight_width` adds scales and zero points of groups
    "int4": 0.5,
    "mxfp4": 17 / 32,  # 4 bits, and one shared 8-bit scale for 32 of them (OCP Microscaling Formats 1.0)
    "nvfp4": 9 / 16,  # 4 bits, and one 8-bit scale for 16 of them
}
GROUP_SIZE = {"int4": 128, "int8": 0}  # inputs that share a scale if 16-bit weights are quantised; 0: all
ATTENTION = ("qkv", "attention out", "linear in", "linear out")  # projections, by their names in a step
_SCALE_BYTES = 2.0
_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")  # names of the formats for layers left in 16 bits
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
    """A projection of so many `layers`: `width` bytes a weight, its share of scales included, for GEMMs in `dtype`.

    Attributes:
        suffix: added to the names of its operations, if other layers store it otherwise
    """

    layers: int
    dtype: str
    width: float
    suffix: str = ""


def weights_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """Return the type that weights are kept in: the deployment's, else the published one, else `dtype`.

    Some weights are in 16 bits all the same; see `stored`.
    """
    if deployment.quantization != "none":
        return deployment.quantization
    published = model.checkpoint_quantization
    return deployment.dtype if published == "none" else published


def narrowest_dtype(model: ModelSpec, deployment: Deployment) -> str:
    """Return the type of a mixture's experts, which may be of fewer bits than the rest, else of all weights."""
    return stored(model, deployment, "experts", 1)[0].dtype if model.num_experts else weights_dtype(model, deployment)


def stored(model: ModelSpec, deployment: Deployment, projection: str, layers: int) -> list[Stored]:
    """Return how `layers` layers keep a projection, named as in a step.

    First come layers that keep it in the model's usual type, then layers that keep it in 16 bits. An entry without
    layers is left out.
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
    """Return how many of `layers` layers keep a projection in 16 bits: as published, else as makers do.

    mxfp4 is for experts only; NVIDIA's editions of mixtures in nvfp4 keep attention in 16 bits.
    """
    dtype = weights_dtype(model, deployment)
    if dtype == "mxfp4":
        return 0 if projection == "experts" else layers
    if dtype == model.checkpoint_quantization:
        return min(len(dict(model.checkpoint_kept).get(projection, ())), layers)
    return layers if dtype == "nvfp4" and model.num_experts and projection in ATTENTION else 0


def check_experts(model: ModelSpec, deployment: Deployment) -> None:
    """Raise UserError for mxfp4 if there are no experts to store in it."""
    if deployment.quantization == "mxfp4" and not model.num_experts:
        remedy = f"is for a mixture's experts, and {model.name} has none; use int4 or fp8"
        raise UserError("quantization", "mxfp4", remedy)


def check_heads(model: ModelSpec, tp: int) -> None:
    """Raise UserError if heads cannot be split over `tp` devices; KV heads may be repeated."""
    if model.num_heads % tp or max(model.num_kv_heads, tp) % min(model.num_kv_heads, tp):
        remedy = f"must split {model.name}'s {model.num_heads} heads and {model.num_kv_heads} KV heads evenly"
        raise UserError("tensor_parallel_size", tp, remedy)


def check_linear_heads(model: ModelSpec, tp: int) -> None:
    """Raise UserError if heads with a constant state cannot be split over `tp` devices."""
    heads = model.linear.linear_num_key_heads if model.linear is not None else tp
    if heads % tp:
        remedy = f"must divide the {heads} key heads of {model.name}'s layers with a constant state"
        raise UserError("tensor_parallel_size", tp, remedy)


def weight_width(dtype: str, model: ModelSpec, deployment: Deployment) -> float:
    """Return the bytes of a weight of `dtype`, with its share of the 16-bit scale and the zero point of its group.

    The checkpoint gives the groups, or `GROUP_SIZE` if weights are quantised on loading. A scale for all of an output's
    inputs is shared out among as many weights as the hidden size.
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
    """Return the layers (from 0) that keep each projection, by its name in a step, in 16 bits.

    Args:
        dense: the dense ones of the `layers`; all, if there are no `experts`
        shared: whether a mixture has an expert for all tokens
        linear: layers that have attention with a constant state

    Projections that no layer keeps are left out. Raises UserError if a checkpoint keeps only some of the weights that
    must be stored alike, and for a name of unknown weights. `name` is the model's.
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
    """A name in the list of a checkpoint.

    Attributes:
        layer: the only layer that it may stand for; None: any
        used: whether it has stood for a module
    """

    def __init__(self, said: str, field: str) -> None:
        self.said, self.used = said, False
        numbered = re.search(r"layers[.](\d+)", said)
        self.layer = int(numbered[1]) if numbered and not said.startswith("re:") else None
        at = max(said.find("layers."), 0)  # another wrapper's path may stand before "layers."
        path = said[3:] if said.startswith("re:") else rf".*\b{translate(said[at:])[:-2]}([.].*)?\Z"
        try:
            self._expression = re.compile(path)
        except re.error as error:
            raise UserError(field, said[:80], f"is no regular expression ({error}); correct it") from None

    def names(self, module: str) -> bool:
        """Return whether the pattern stands for the module of that path."""
        names = bool(self._expression.match(module))
        self.used |= names
        return names


def _projections(
    dense: bool, experts: int, shared: bool, attention: Sequence[Sequence[str]]
) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield a layer's projections by their names in a step, with the modules of each in every spelling."""
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
