"""The time of a step by vLLM's own kernels, alone and without gaps: a target beside the roofline.

It is the sum of the GEMM and attention times in NVIDIA's tables, which were measured, and of our estimate of the
elementwise kernels. No engine reaches the roofline: these kernels reach about three quarters of it in a decode step.
"""

from __future__ import annotations

from typing import Any

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError


def decode_step_ns(gpu: str, model: str, rows: int, context: int) -> float | None:
    """Return the summed kernel times in ns of a decode step in bf16; None for a GPU or model without tables."""
    from tokentwin.calibration.operations import uniform_step

    return _sum_ns(gpu, model, uniform_step(rows, context, 0, 0, 0))


def prompt_step_ns(gpu: str, model: str, tokens: int) -> float | None:
    """Return the summed kernel times in ns of one whole prompt in bf16; None for a GPU or model without tables."""
    from tokentwin.calibration.operations import uniform_step

    return _sum_ns(gpu, model, uniform_step(0, 0, 1, tokens, 0))


def _sum_ns(gpu: str, model: str, sizes: Any) -> float | None:
    from tokentwin.calibration.kernels.catalogue import load_kernels  # imports scipy
    from tokentwin.calibration.kernels.surfaces import bundled_names
    from tokentwin.calibration.steps.correction import step_parts

    try:
        spec, shape = find_gpu(gpu), find_model(model)
    except UserError:
        return None
    if spec.name not in bundled_names():
        return None
    parts = step_parts(shape, Deployment(model=shape.name), load_kernels(spec), sizes)
    return float(sum(ns for name, ns in parts.items() if name != "imbalance"))
