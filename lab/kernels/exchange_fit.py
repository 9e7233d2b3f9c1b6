"""The fit of closed forms to DeepEP's tables: `python -m lab.kernels.fit --forms exchanges`.

The tables are NVIDIA's (aiconfigurator, Apache-2.0), measured with SGLang 0.5.12 on one node, and with 0.5.6 on 1 to 8
nodes of H100. H200's tables of 0.5.6 repeat H100's numbers and are left out. In the high-throughput mode only rows with
20 SMs (DeepEP's default) count, up to 16,384 tokens per device and 4 nodes. Rows of 8 nodes are left out: they
contradict the others, and reach only half of the rate that DeepEP published (51 GB/s with an adapter of 50 GB/s,
because traffic within the node counts, too).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from scipy.optimize import least_squares

from lab.kernels.aiconfigurator import SYSTEMS, tables_root
from tokentwin.calibration.kernels.collectives import SEVERAL_NODES, ExchangeForm
from tokentwin.calibration.operations import Exchange
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.errors import UserError

_ONE_NODE, _SEVERAL = "0.5.12", "0.5.6.post2"
_FILES = {"low_latency": "wideep_deepep_ll_perf.parquet", "high_throughput": "wideep_deepep_normal_perf.parquet"}
_PHASES = ("dispatch", "combine")
_SMS, _MOST_TOKENS, _MOST_NODES = 20, 16_384, 4
_LOW, _HIGH = (8.0, 0.0, -4.0, -2.0), (12.0, 12.0, 0.0, 0.0)  # bounds: log ns, log ns, log share, log share
_OUTLIER = 0.1
_NORMAL_90 = 1.645


class _Point(NamedTuple):
    exchange: Exchange
    ns: float


def points(root: Path, gpu: GpuSpec, mode: str, phase: str) -> list[_Point]:
    """Return every measured exchange of `gpu`; raise UserError for a missing or unreadable table."""
    name, link = SEVERAL_NODES
    measured = []
    for version in (_ONE_NODE, *([_SEVERAL] if gpu.name == name else [])):
        for row in _rows(root / "comm" / "sglang" / version / _FILES[mode]):
            nodes, tokens, hidden = row["node_num"], row["num_token"], row["hidden_size"]
            if mode == "low_latency":
                us = row[f"{phase}_avg_t_us"]
            else:
                us = row[f"{phase}_transmit_us"] + row[f"{phase}_notify_us"]
                if row["dispatch_sms"] != _SMS or tokens > _MOST_TOKENS or nodes > _MOST_NODES:
                    continue
            devices = (4 if gpu.name == "GB200" else 8) * nodes
            exchange = Exchange(
                "", phase, devices, float(tokens * hidden), 1, False, nodes, link if nodes > 1 else None,
                hidden=hidden, topk=row["num_topk"], mode=mode, fp8=phase == "dispatch",
            )  # fmt: skip
            measured.append(_Point(exchange, 1000.0 * us))
    return measured


def fit_exchange(gpu: GpuSpec, measured: list[_Point], apart: ExchangeForm | None) -> ExchangeForm:
    """Return the form of one mode and phase; parameters that depend on several nodes are taken from `apart`."""
    log_ns = np.log([point.ns for point in measured])
    several = np.array([point.exchange.nodes > 1 for point in measured])
    most = max(float(point.exchange.elements) / point.exchange.hidden for point in measured)
    most_nodes = max(point.exchange.nodes for point in measured)

    def form(x: Any, error: float = 0.0, error_apart: float = 0.0) -> ExchangeForm:
        start, doubling, share, share_apart = np.exp(x).tolist()
        if apart is not None:
            doubling, share_apart, error_apart = apart.doubling_ns, apart.share_apart, apart.error_apart
        return ExchangeForm(start, doubling, share, share_apart, error, error_apart, most, most_nodes)

    def off(x: Any) -> Any:
        candidate = form(x)
        return np.log([float(candidate.ns(gpu, point.exchange)) for point in measured]) - log_ns

    least = float(log_ns.min())
    begin = np.clip((least, 8.0, -0.6, -0.1), np.add(_LOW, 1e-3), np.subtract(_HIGH, 1e-3))
    best = least_squares(off, begin, bounds=(_LOW, _HIGH), loss="soft_l1", f_scale=_OUTLIER).x
    errors = np.abs(off(best))
    spread = [float(np.quantile(errors[rows], 0.9)) / _NORMAL_90 if rows.any() else 0.0 for rows in (~several, several)]
    return form(best, *spread)


def fit_all(tables: str, names: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entry in `gpus/exchanges.json` of each GPU with tables, or of those among `names`.

    The GPU that was measured on several nodes is always fitted first, because the others use its parameters for several
    nodes.
    """
    apart: dict[str, ExchangeForm] = {}
    for name in sorted({*(names or SYSTEMS), SEVERAL_NODES[0]}, key=lambda name: (name != SEVERAL_NODES[0], name)):
        root, gpu = tables_root(tables, name), find_gpu(name)
        if not (root / "comm" / "sglang" / _ONE_NODE / _FILES["low_latency"]).exists():
            continue
        forms = {}
        for mode in _FILES:
            for phase in _PHASES:
                key = f"{mode}/{phase}"
                made = fit_exchange(gpu, points(root, gpu, mode, phase), apart.get(key))
                apart.setdefault(key, made)
                forms[key] = {field: float(f"{value:.5g}") for field, value in vars(made).items()}
        said = "NVIDIA aiconfigurator kernel tables (ai-dynamo/aiconfigurator), Apache-2.0; "
        versions = f"{_ONE_NODE} and {_SEVERAL}" if name == SEVERAL_NODES[0] else _ONE_NODE
        yield name, {"source": f"{said}comm/sglang/{versions}", "forms": forms}


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except OSError as error:
        raise UserError("tables", str(path), f"is not a readable Parquet file: {error}") from None
    return rows
