"""The operation at a point of a surface: the inverse of `Structure.shape` and `Structure.sizes`.

Plots and browsers of kernel-time tables need this. A kernel's key gives the kind of operation, and a shape and sizes
give the operation itself. The names of features are the labels of table columns and plot axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokentwin.calibration.kernels.structure import structure_of
from tokentwin.calibration.kernels.surfaces import KernelFit, fitted
from tokentwin.calibration.latent_attention import HeadGemm, LatentDecode, LatentPrefill
from tokentwin.calibration.operations import DecodeAttention, Estimate, Experts, Gemm, Operation, PrefillAttention
from tokentwin.serving.deployments.gpu_spec import GpuSpec

NO_WINDOW = 2**17  # value of the window feature for shapes without a sliding window


@dataclass(frozen=True)
class KernelKind:
    """One kind of kernel.

    Attributes:
        title: the usual name of the kind
        shape: names of the features that a model fixes
        sizes: names of the features that depend on the step; the last one is the x axis of a plot
        operation: function that makes an operation from the number type (the part of the key after the slash), a shape
            of integers, and sizes
    """

    title: str
    shape: tuple[str, ...]
    sizes: tuple[str, ...]
    operation: Callable[..., Operation]


def equal_prompts(heads: int, kv_heads: int, dim: int, window: int, dtype: str, rows: Any, length: Any) -> Operation:
    """Return the attention of `rows` prompts of `length` tokens without past tokens."""
    pairs = length * (length + 1) / 2
    if window:
        beyond = np.maximum(length - window, 0.0)
        pairs = pairs - beyond * (beyond + 1) / 2
    return PrefillAttention("", rows, rows * length, 0 * rows, rows * pairs, heads, kv_heads, dim, dtype, window)


def equal_decodes(heads: int, kv_heads: int, dim: int, window: int, dtype: str, rows: Any, context: Any) -> Operation:
    """Return the attention of `rows` decode rows over `context` tokens each, including their own."""
    seen = np.minimum(context, window) if window else context
    return DecodeAttention("", rows, rows * seen, heads, kv_heads, dim, dtype, window)


def latent_prompts(heads: int, head_dim: int, value_dim: int, dtype: str, rows: Any, length: Any) -> Operation:
    """Return latent attention over expanded keys and values: `rows` prompts of `length` tokens, nothing cached."""
    sizes = (rows, rows * length, 0 * rows, rows * length * (length + 1) / 2)
    return LatentPrefill("", *sizes, heads, heads, head_dim, dtype, value_dim=value_dim)


def latent_decodes(heads: int, head_dim: int, value_dim: int, dtype: str, rows: Any, context: Any) -> Operation:
    """Return latent attention of `rows` decode rows over `context` tokens each, including their own."""
    return LatentDecode("", rows, rows * context, heads, 1, head_dim, dtype, value_dim=value_dim)


def _seen(window: int) -> int:
    return 0 if window >= NO_WINDOW else window


_HEADS = ("KV heads", "query heads per KV head", "head size", "window (tokens)")
_LATENT = ("heads", "key size", "value size")
_EXPERTS = ("hidden size", "intermediate size", "experts per token", "experts", "experts on a GPU")
_PROMPTS, _ROWS = ("prompts", "length of each (tokens)"), ("rows", "context of each (tokens)")
KINDS = {
    "gemm": KernelKind(
        "GEMM", ("n (columns)", "k (rows)"), ("m (tokens)",), lambda dtype, n, k, m: Gemm("", m, n, k, dtype)
    ),
    "prefill": KernelKind(
        "prompt attention", _HEADS, _PROMPTS,
        lambda dtype, kv, group, dim, window, *at: equal_prompts(kv * group, kv, dim, _seen(window), dtype, *at),
    ),
    "decode": KernelKind(
        "decode attention", _HEADS, _ROWS,
        lambda dtype, kv, group, dim, window, *at: equal_decodes(kv * group, kv, dim, _seen(window), dtype, *at),
    ),
    "mla_prefill": KernelKind(
        "latent prompt attention", _LATENT, _PROMPTS,
        lambda dtype, heads, key, value, *at: latent_prompts(heads, key, value, dtype, *at),
    ),
    "mla_decode": KernelKind(
        "latent decode attention", _LATENT, _ROWS,
        lambda dtype, heads, key, value, *at: latent_decodes(heads, key, value, dtype, *at),
    ),
    "head_gemm": KernelKind(
        "GEMM by head", ("heads", "n (columns)", "k (rows)"), ("m (tokens)",),
        lambda dtype, heads, n, k, m: HeadGemm("", m, n, k, dtype, heads=heads),
    ),
    "experts": KernelKind(
        "experts", _EXPERTS, ("tokens",),
        lambda dtype, hidden, inter, topk, experts, on_device, tokens: Experts(
            "", tokens, hidden, inter, topk, experts, 1, round(experts / on_device), dtype
        ),
    ),
}  # fmt: skip


def kind_of(key: str) -> KernelKind:
    """Return the kind of the kernel with this key; for `gemm/fp8` it is GEMM."""
    return KINDS[key.partition("/")[0]]


def operation_at(key: str, shape: Sequence[float], sizes: Sequence[Any]) -> Operation:
    """Return the operation of kernel `key` at a shape and sizes; sizes are numbers or arrays of one array shape."""
    return kind_of(key).operation(key.partition("/")[2], *map(round, shape), *sizes)


def estimate_at(gpu: GpuSpec, key: str, fit: KernelFit, shape: Sequence[float], sizes: Sequence[Any]) -> Estimate:
    """Return the times of `fit` at a shape and sizes, never below the roofline."""
    return fitted(gpu, operation_at(key, shape, sizes), fit, tuple(shape))


def measured_at(gpu: GpuSpec, key: str, fit: KernelFit, number: int) -> tuple[tuple[Any, ...], Any]:
    """Return the knots of the sizes as arrays, and the measured nanoseconds of shape `number` at them.

    The time is NaN at a knot near which fewer than half of the shapes were measured.
    """
    surface = fit.surface
    sizes = np.meshgrid(*(np.exp2(axis) for axis in surface.knots), indexing="ij")
    operation = operation_at(key, np.exp2(surface.shapes[number]).tolist(), sizes)
    ns = structure_of(operation).ns(gpu, operation, fit.efficiency) * np.exp(surface.values[number])
    return tuple(sizes), np.where(surface.support >= 0.5, ns, np.nan)
