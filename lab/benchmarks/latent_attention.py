"""Latent attention of DeepSeek-V3 and V4: predicted times divided by NVIDIA's measured times of vLLM's modules.

The modules (`mla_*`, `dsv4_csa_*` and `dsv4_hca_*` of aiconfigurator-core) are vLLM's attention of a layer with its
projections. No fit uses these tables. `python -m lab.benchmarks.latent_attention H200`, with aiconfigurator-core
installed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from lab.kernels.aiconfigurator import PACKAGE, tables_root
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.operations import uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.serving.deployments.attention import CompressedAttention
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec

MODULE = {"queries up", "attention out", "keys and values up", "queries to latent", "latent to values", "latent down"}
MODULE |= {"values down", "index queries", "prefill attention", "decode attention", "rotary, KV write", "latent norms"}
ENTRIES = "(1 for"  # part of the names of operations that compressed attention adds
SAMPLE = 600


def of_v3(gpu: str, stored: str, kind: str) -> str:
    """Return the ratios of predicted to measured times for DeepSeek-V3, with at least 8 heads and 16-bit KV."""
    table = _table(gpu, "mla", f"mla_{kind}_module_perf")
    rows = table[(table.kv_cache_dtype == "bfloat16") & (table.gemm_type == stored) & (table.num_heads >= 8)]
    model = find_model("DeepSeek-V3").model_copy(
        update={"checkpoint_quantization": "none" if stored == "bfloat16" else stored}
    )
    return f"{gpu} {kind} {stored}: {_ratios(gpu, model, rows.assign(isl_past=0), kind, 1.0)}"


def of_v4(gpu: str, layer: str, kind: str) -> str:
    """Return ratios of predicted to measured times for layers of DeepSeek-V4-Flash: block-wise fp8 weights, fp8 KV."""
    table = _table(gpu, "sparse_attention", f"dsv4_{layer}_{kind}_module_perf")
    rows = table[table.model.str.contains("Flash")]
    flash = find_model("DeepSeek-V4-Flash")
    assert isinstance(flash.latent, CompressedAttention)
    one = flash.latent.model_copy(update={"compress_ratios": (4 if layer == "csa" else 128,)})
    model = flash.model_copy(update={"num_layers": 1, "latent": one})
    past = rows.step if kind == "context" else 0
    return f"{gpu} V4 {layer} {kind}: {_ratios(gpu, model, rows.assign(isl_past=past), kind, 0.1)}"


def _table(gpu: str, family: str, name: str) -> Any:
    path = next(tables_root(PACKAGE, gpu).glob(f"{family}/vllm/*/{name}.parquet"))
    return pq.ParquetFile(path).read().to_pandas()


def _ratios(gpu: str, model: ModelSpec, rows: Any, kind: str, long_ms: float) -> str:
    """Return ratios of predicted to measured time at `SAMPLE` points, and at the points that take over `long_ms`.

    Both sets of ratios are given as 10 % quantile, median and 90 % quantile, in one line of text.
    """
    kernels = load_kernels(find_gpu(gpu))
    ratios, measured_ms = [], []
    for row in rows.sample(min(SAMPLE, len(rows)), random_state=1).itertuples():
        prompts = kind == "context"
        step = (0, 1, row.batch_size, row.isl, row.isl_past) if prompts else (row.batch_size, row.step - 1, 0, 2, 0)
        tp, kept_in = model.num_heads // row.num_heads, "fp8" if row.kv_cache_dtype == "fp8" else "auto"
        engine = Deployment(device="cuda", tensor_parallel_size=tp, kv_cache_dtype=kept_in)
        operations = step_operations(model, engine, uniform_step(*step))
        own = [one for one in operations if one.name in MODULE or ENTRIES in one.name or one.name.endswith(" index")]
        ns = sum(float(kernels.time(operation).ns) for operation in own)
        ratios.append(ns / 1e6 / row.latency)
        measured_ms.append(row.latency)
    spread = [
        np.quantile(part, [0.1, 0.5, 0.9]) for part in (ratios, np.array(ratios)[np.array(measured_ms) > long_ms])
    ]
    ranges = f"; over {long_ms} ms ".join(" ".join(f"{ratio:.2f}" for ratio in part) for part in spread)
    return f"all {ranges}"


if __name__ == "__main__":
    for gpu in sys.argv[1:] or ["H100", "H200", "B200"]:
        for kind in ("generation", "context"):
            for stored in ("bfloat16", "fp8_block"):
                print(of_v3(gpu, stored, kind), flush=True)
            for layer in ("csa", "hca"):
                print(of_v4(gpu, layer, kind), flush=True)
