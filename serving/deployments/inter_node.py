"""The links between nodes.

Bandwidths of the named links are the line rates of their standards; `calibration/kernels/inter_node.py` decides how
much of one a collective gets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from serving.errors import UserError
from serving.settings import Settings

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

    It has bytes a second in one direction, and nanoseconds beyond those of NCCL's own protocols.
    """

    bytes_per_s: float
    latency_ns: float


class InterNodeConfig(Settings):
    """Nodes that are alike, and the links that join them. GB are 10^9 bytes."""

    link: LinkName = Field("infiniband-ndr", description="kind of link between nodes")
    gpus_per_node: int = Field(8, ge=1, le=1024, description="devices that share a node's own links")
    nics_per_node: int | None = Field(
        None, ge=1, le=1024, description="adapters of a node, which its devices share; null: one for each device"
    )
    bandwidth_gb_s: float | None = Field(
        None, gt=0, le=1e6, description="GB/s of one adapter in one direction; null: the line rate of the link"
    )
    latency_us: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="microseconds of a message beyond what NCCL counts for RDMA; null: none, and ethernet needs it",
    )

    @model_validator(mode="after")
    def _latency_is_known(self) -> InterNodeConfig:
        if self.latency_us is None and not self.rdma:
            remedy = "goes through the kernel's TCP, for which NCCL states no latency; measure it and set latency_us"
            raise UserError("inter_node.link", self.link, remedy)
        return self

    @property
    def rdma(self) -> bool:
        """True if adapters reach GPU memory by themselves."""
        return not self.link.startswith("ethernet")

    @property
    def of_a_device(self) -> NodeLink:
        """The share of a device in the node's adapters."""
        gbit_s = _GBIT_S.get(self.link) or int(self.link.rpartition("-")[2])
        adapter = 1e9 * (gbit_s / 8 if self.bandwidth_gb_s is None else self.bandwidth_gb_s)
        share = (self.nics_per_node or self.gpus_per_node) / self.gpus_per_node
        return NodeLink(adapter * share, 1000 * (self.latency_us or 0.0))
