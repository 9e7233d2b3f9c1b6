"""The time of a collective between nodes: NCCL's own closed form of its rings and trees.

In a collective of g devices on each of n nodes, the devices of a node share its work, and every device exchanges its
share with its counterparts. Between nodes a ring takes some steps of a latency and the bytes that a ring sends. A tree
takes 2 log2(n) steps up and down and the bytes of both ways. Latencies and shares of the rate are the numbers by which
NCCL chooses its algorithm (`hwLat`, row NET, and `ncclTopoTuneModel` in NVIDIA/nccl, src/graph/tuning.cc), for its
protocols for small messages (LL) and for large ones (Simple). The fastest counts. No two nodes were measured here, so
the standard error is an estimate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from calibration.operations import Collective
from serving.deployments.gpu_spec import GpuSpec

INTER_NODE_SIGMA = 0.4


class _Protocol(NamedTuple):
    """Nanoseconds of a step from node to node, and the share of the link's rate."""

    hop_ns: float
    share: float


_RING = (_Protocol(2_700.0, 1 / 4), _Protocol(9_600.0, 1.0))
_TREE = (_Protocol(5_000.0, 0.9 / 3.8), _Protocol(50_000.0, 0.9))


def rate_between_nodes(gpu: GpuSpec, operation: Collective) -> float:
    """Return the bytes a second that a device sends to other nodes: its share of the adapters, which are on PCIe."""
    assert operation.link is not None
    return min(operation.link.bytes_per_s, gpu.pcie_bytes_per_s)


def between_nodes_ns(gpu: GpuSpec, operation: Collective) -> Any:
    """Return the nanoseconds that `operation` adds to its time within a node."""
    assert operation.link is not None
    nodes, sent = operation.nodes, np.asarray(operation.sent_between_nodes, dtype=np.float64)
    steps = 1 if operation.kind == "p2p" else nodes - 1
    both_ways = 2 if operation.kind == "all_reduce" else 1
    ways = [(protocol, both_ways * steps, sent) for protocol in _RING]
    if operation.kind == "all_reduce":  # the root's share goes up and down whole, including the root's own part
        ways += [(protocol, 2 * (nodes - 1).bit_length(), sent * nodes / (nodes - 1)) for protocol in _TREE]
    rate = rate_between_nodes(gpu, operation)
    return np.minimum.reduce(
        [
            hops * (protocol.hop_ns + operation.link.latency_ns) + 1e9 * moved / (protocol.share * rate)
            for protocol, hops, moved in ways
        ]
    )
