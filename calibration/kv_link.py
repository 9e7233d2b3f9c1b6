"""The speed of KV copies to host memory and back, fitted to the copies that the real engine recorded.

A copy takes a latency plus its bytes over the bandwidth of its direction. The fit is non-negative least squares on
relative errors, for both directions at once, because they share the latency.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from tokentwin.serving.deployments.config import Deployment
from tokentwin.traces.recording import Recording

_FASTEST_GB_S = 1e6  # bandwidth of a direction in which larger copies take no longer


def as_linked(deployment: Deployment, runs: Sequence[Recording]) -> Deployment:
    """Return `deployment` with the latency and the bandwidths of its KV tier fitted to the copies in `runs`.

    A direction without copies keeps its configured bandwidth.
    """
    tiers = deployment.kv_tiers
    if tiers is None:
        return deployment
    rows = [row for run in runs for row in run.table("steps", ["kv_transfers"])["kv_transfers"].to_pylist()]
    copies = [copy for row in rows for copy in row or () if copy["size_bytes"]]
    if not copies:
        return deployment
    took_ns = np.array([max(copy["ended_ns"] - copy["began_ns"], 1) for copy in copies], dtype=np.float64)
    size = np.array([copy["size_bytes"] for copy in copies], dtype=np.float64)
    reads = np.array([copy["reads"] for copy in copies])
    parts = np.column_stack([np.ones(len(copies)), size * reads, size * ~reads])
    (latency_ns, *ns_per_byte), _ = nnls(parts / took_ns[:, None], np.ones(len(copies)))
    learnt = {"latency_us": float(latency_ns) / 1e3}
    there = reads.any(), (~reads).any()
    for name, slope, any_copies in zip(("read_gb_s", "write_gb_s"), ns_per_byte, there, strict=True):
        if any_copies:
            learnt[name] = min(1 / float(slope), _FASTEST_GB_S) if slope else _FASTEST_GB_S
    (tier,) = tiers.tiers
    tiers = tiers.model_copy(update={"tiers": (tier.model_copy(update=learnt),)})
    return deployment.model_copy(update={"kv_tiers": tiers})
