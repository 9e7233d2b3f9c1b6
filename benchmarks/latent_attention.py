"""Latent attention against vLLM's own modules: predicted times of DeepSeek-V3's over NVIDIA's tables.

The modules (`mla_context_module`, `mla_generation_module` of aiconfigurator-core) are vLLM's attention of a layer with
its projections. No fit has seen them. `python benchmarks/latent_attention.py H200`, with aiconfigurator-core installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from calibration.kernels.aiconfigurator import SYSTEMS
from calibration.kernels.catalogue import load_kernels
from calibration.operations import uniform_step
from calibration.step_operations import step_operations
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.model_catalogue import find_model

MODULE = {"queries up", "attention out", "keys and values up", "queries to latent", "latent to values", "latent down"}
MODULE |= {"prefill attention", "decode attention", "rotary, KV write", "latent norms"}
SAMPLE = 600
LONG_MS = 1.0


def compare(gpu: str, stored: str, kind: str) -> str:
    """Predicted over measured time at `SAMPLE` points of at least 8 heads, 16-bit KV: 10 %, median, 90 %."""
    package = find_spec("aiconfigurator_core")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("aiconfigurator-core is not installed; pip install aiconfigurator-core")
    folder = Path(package.submodule_search_locations[0]) / "systems" / "data" / SYSTEMS[gpu] / "mla" / "vllm"
    table = pq.ParquetFile(next(folder.glob(f"*/mla_{kind}_module_perf.parquet"))).read().to_pandas()
    rows = table[(table.kv_cache_dtype == "bfloat16") & (table.gemm_type == stored) & (table.num_heads >= 8)]
    model, kernels = find_model("DeepSeek-V3"), load_kernels(find_gpu(gpu))
    model = model.model_copy(update={"checkpoint_quantization": "none" if stored == "bfloat16" else stored})
    ratios, measured_ms = [], []
    for row in rows.sample(min(SAMPLE, len(rows)), random_state=1).itertuples():
        prompts = kind == "context"
        step = (0, 1, row.batch_size, row.isl, 0) if prompts else (row.batch_size, row.step - 1, 0, 2, 0)
        engine = Deployment(device="cuda", tensor_parallel_size=128 // row.num_heads)
        operations = step_operations(model, engine, uniform_step(*step))
        ns = sum(float(kernels.time(operation).ns) for operation in operations if operation.name in MODULE)
        ratios.append(ns / 1e6 / row.latency)
        measured_ms.append(row.latency)
    spread = [np.quantile(of, [0.1, 0.5, 0.9]) for of in (ratios, np.array(ratios)[np.array(measured_ms) > LONG_MS])]
    told = "; over 1 ms ".join(" ".join(f"{ratio:.2f}" for ratio in of) for of in spread)
    return f"{gpu} {kind} {stored}: all {told}"


if __name__ == "__main__":
    for gpu in sys.argv[1:] or ["H100", "H200", "B200"]:
        for stored in ("bfloat16", "fp8_block"):
            for kind in ("generation", "context"):
                print(compare(gpu, stored, kind), flush=True)
