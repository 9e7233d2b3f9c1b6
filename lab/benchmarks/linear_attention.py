"""Layers with a constant state: predicted times divided by NVIDIA's times of vLLM's kernels, which no fit uses.

`python -m lab.benchmarks.linear_attention H200`, with aiconfigurator-core installed, prints the median and the 10 % and
90 % quantiles.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from lab.kernels.aiconfigurator import PACKAGE, tables_root
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.linear_attention import LinearDecode, LinearPrefill
from tokentwin.serving.deployments.gpu_spec import find_gpu

_POINT = ("phase", "batch_size", "seq_len", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv")


def main(gpu: str) -> None:
    kernels = load_kernels(find_gpu(gpu))
    measured: dict[tuple[Any, ...], dict[str, float]] = {}
    path = max(tables_root(PACKAGE, gpu).glob("linear_attention/vllm/*/gdn_perf.parquet"))
    # the tables have separate times for the convolution and for the delta rule
    for row in pq.ParquetFile(path).read().to_pylist():
        parts = measured.setdefault(tuple(row[name] for name in _POINT), {})
        parts[row["kernel_source"]] = min(row["latency"], parts.get(row["kernel_source"], np.inf))
    ratios: dict[str, list[tuple[float, float]]] = {}
    for (phase, rows, length, *shape), parts in measured.items():
        if len(parts) != 2:
            continue
        kind, tokens = (LinearPrefill, rows * length) if phase == "context" else (LinearDecode, rows)
        ms = sum(parts.values())
        ratios.setdefault(phase, []).append((ms, float(kernels.time(kind("", rows, tokens, *shape)).ns) / 1e6 / ms))
    for phase, points in ratios.items():
        for what, least in (("all", 0.0), ("over 0.1 ms", 0.1)):
            low, middle, high = np.quantile([ratio for ms, ratio in points if ms >= least], (0.1, 0.5, 0.9))
            print(f"{gpu} {phase}, {what}: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
