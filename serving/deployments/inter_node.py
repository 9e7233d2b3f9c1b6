"""The links between nodes, the devices of an engine on each node, and the links between devices that exchange data.

The bandwidths of the named links are the line rates of their standards; `calibration/kernels/collectives.py` decides
which share of a line rate a collective gets. Ranks are numbered as in vLLM: tensor-parallel devices are next to each
other, then come groups that share prompts, then pipeline stages, then data-parallel ranks. Ranks fill one node after
another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings

if TYPE_CHECKING:
    from tokentwin.serving.deployments.config import Deployment


LinkName = Literal[
    "infiniband-xdr",
    "infiniband-ndr",
    "infiniband-hdr",
    "roce-400",
    "roce-200",
    "roce-100",
    "ethernet-400",
    "ethernet-100",
    "ethernet-25",
]
_GBIT_S: dict[str, int] = {"infiniband-xdr": 800, "infiniband-ndr": 400, "infiniband-hdr": 200}


class NodeLink(NamedTuple):
    """The link of one device to other nodes while all devices of its node send.

    Attributes:
        bytes_per_s: bandwidth in one direction
        latency_ns: latency in addition to that of NCCL's protocols
    """

    bytes_per_s: float
    latency_ns: float


class InterNodeConfig(Settings):
    """Equal nodes, and the links between them. One GB is 10^9 bytes."""

    link: LinkName = Field("infiniband-ndr", description="kind of link between nodes")
    gpus_per_node: int = Field(8, ge=1, le=1024, description="number of devices in a node")
    nics_per_node: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="number of network adapters of a node, shared by its devices; null: one for each device",
    )
    bandwidth_gb_s: float | None = Field(
        None, gt=0, le=1e6, description="GB/s of one adapter in one direction; null: the line rate of the link"
    )
    latency_us: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="latency of a message in microseconds, in addition to NCCL's latency for RDMA; null: 0; required "
        "for ethernet links",
    )

    @model_validator(mode="after")
    def _latency_is_known(self) -> InterNodeConfig:
        if self.latency_us is None and not self.rdma:
            remedy = "uses TCP in the kernel, for which NCCL states no latency; measure the latency and set latency_us"
            raise UserError("inter_node.link", self.link, remedy)
        return self

    @property
    def rdma(self) -> bool:
        """True if network adapters access GPU memory directly (RDMA)."""
        return not self.link.startswith("ethernet")

    @property
    def of_a_device(self) -> NodeLink:
        """The link of one device: its share of the node's network adapters."""
        gbit_s = _GBIT_S.get(self.link) or int(self.link.rpartition("-")[2])
        adapter = 1e9 * (gbit_s / 8 if self.bandwidth_gb_s is None else self.bandwidth_gb_s)
        share = (self.nics_per_node or self.gpus_per_node) / self.gpus_per_node
        return NodeLink(adapter * share, 1000 * (self.latency_us or 0.0))


class Group(NamedTuple):
    """Devices that exchange data: their number, their number of nodes, and the link; `link` is None for one node."""

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
    """Return the group of devices that share a layer."""
    return _group(deployment, deployment.tensor_parallel_size, 1)


def context_group(deployment: Deployment) -> Group:
    """Return the group of one device of every tensor-parallel group that shares prompts."""
    return _group(deployment, deployment.prefill_context_parallel_size, deployment.tensor_parallel_size)


def kv_group(deployment: Deployment) -> Group:
    """Return the group of tensor-parallel devices that share the tokens of KV blocks."""
    return _group(deployment, deployment.decode_context_parallel_size, 1)


def data_group(deployment: Deployment) -> Group:
    """Return the group of one device of every data-parallel rank."""
    return _group(deployment, deployment.data_parallel_size, deployment.gpus_of_a_rank)


def expert_group(deployment: Deployment) -> Group:
    """Return the group of all devices of a pipeline stage."""
    alone = of_stage(deployment)
    return _group(alone, alone.gpus, 1)


def hops_between_nodes(deployment: Deployment) -> list[bool]:
    """Return, for each hop between pipeline stages, True if it crosses nodes on any data-parallel rank."""
    stages = deployment.pipeline_parallel_size
    gpus, per_node = deployment.gpus_of_a_rank // stages, inter_node(deployment).gpus_per_node
    firsts = range(0, deployment.gpus, gpus * stages)

    def leaves(stage: int) -> bool:
        return any((at + stage * gpus) // per_node != (at + (stage + 1) * gpus) // per_node for at in firsts)

    return [leaves(stage) for stage in range(stages - 1)]


def of_stage(deployment: Deployment) -> Deployment:
    """Return the deployment of one pipeline stage alone. Its devices stay on their nodes, which have fewer devices."""
    alone: dict[str, object] = {"pipeline_parallel_size": 1}
    if nodes_of(deployment) > 1:
        config = inter_node(deployment)
        together = deployment.tensor_parallel_size * deployment.prefill_context_parallel_size
        kept = max(config.gpus_per_node // deployment.pipeline_parallel_size, min(together, config.gpus_per_node))
        own = {"gpus_per_node": kept, "nics_per_node": None, "bandwidth_gb_s": config.of_a_device.bytes_per_s / 1e9}
        alone["inter_node"] = config.model_copy(update=own)
    return deployment.model_copy(update=alone)


def _group(deployment: Deployment, size: int, stride: int) -> Group:
    """Return the group of `size` devices, `stride` ranks apart, at the place where it spans the most nodes."""
    config = inter_node(deployment)
    per_node = config.gpus_per_node
    if nodes_of(deployment) == 1 or size == 1:
        return Group(size, 1, None)
    reach = (size - 1) * stride
    nodes = max((first + reach) // per_node - first // per_node for first in range(min(stride, per_node))) + 1
    nodes = min(nodes, size)
    return Group(size, nodes, config.of_a_device if nodes > 1 else None)
