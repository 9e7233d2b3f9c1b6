"""The devices of an engine on each node, and the links between devices that exchange data.

Ranks are numbered as vLLM numbers them: tensor-parallel devices next to each other, then pipeline stages, then
data-parallel ranks. They fill one node after another.
"""

from __future__ import annotations

from typing import NamedTuple

from serving.deployments.config import Deployment
from serving.deployments.inter_node import InterNodeConfig, NodeLink


class Group(NamedTuple):
    """Devices that exchange data: their number, the number of their nodes, and the link; no link within a node."""

    gpus: int
    nodes: int
    link: NodeLink | None


def inter_node(deployment: Deployment) -> InterNodeConfig:
    """Return the links between the nodes of `deployment`; the defaults if it states none."""
    return deployment.inter_node or InterNodeConfig()


def nodes_of(deployment: Deployment) -> int:
    """Return the number of nodes of one engine."""
    return -(-deployment.gpus // inter_node(deployment).gpus_per_node)


def tensor_group(deployment: Deployment) -> Group:
    """Return the devices that share a layer."""
    return _group(deployment, deployment.tensor_parallel_size, 1)


def data_group(deployment: Deployment) -> Group:
    """Return one device of every data-parallel rank."""
    stride = deployment.tensor_parallel_size * deployment.pipeline_parallel_size
    return _group(deployment, deployment.data_parallel_size, stride)


def expert_group(deployment: Deployment) -> Group:
    """Return all devices of a pipeline stage."""
    alone = of_stage(deployment)
    return _group(alone, alone.gpus, 1)


def hops_between_nodes(deployment: Deployment) -> list[bool]:
    """Return, for each hop between pipeline stages, whether it leaves the node on any data-parallel rank."""
    tp, stages = deployment.tensor_parallel_size, deployment.pipeline_parallel_size
    per_node = inter_node(deployment).gpus_per_node
    firsts = range(0, deployment.gpus, tp * stages)

    def leaves(stage: int) -> bool:
        return any((at + stage * tp) // per_node != (at + (stage + 1) * tp) // per_node for at in firsts)

    return [leaves(stage) for stage in range(stages - 1)]


def of_stage(deployment: Deployment) -> Deployment:
    """Return one pipeline stage alone, whose devices are on nodes as before, with fewer of them on each."""
    alone: dict[str, object] = {"pipeline_parallel_size": 1}
    if nodes_of(deployment) > 1:
        config, tp = inter_node(deployment), deployment.tensor_parallel_size
        kept = max(config.gpus_per_node // deployment.pipeline_parallel_size, min(tp, config.gpus_per_node))
        own = {"gpus_per_node": kept, "nics_per_node": None, "bandwidth_gb_s": config.of_a_device.bytes_per_s / 1e9}
        alone["inter_node"] = config.model_copy(update=own)
    return deployment.model_copy(update=alone)


def _group(deployment: Deployment, size: int, stride: int) -> Group:
    """Return `size` devices, `stride` ranks apart, at the place where they are on most nodes."""
    config = inter_node(deployment)
    per_node = config.gpus_per_node
    if nodes_of(deployment) == 1 or size == 1:
        return Group(size, 1, None)
    reach = (size - 1) * stride
    nodes = max((first + reach) // per_node - first // per_node for first in range(min(stride, per_node))) + 1
    nodes = min(nodes, size)
    return Group(size, nodes, config.of_a_device if nodes > 1 else None)
