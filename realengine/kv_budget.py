"""The KV blocks that fit into a device: its memory, less everything else, by arithmetic that can be read."""

from __future__ import annotations

from typing import NamedTuple

from serving.deployments.config import SchedulerConfig
from serving.deployments.kv_groups import most_held
from serving.errors import UserError

_MOST = 10_000_000  # limit of SchedulerConfig.num_blocks
_GIB = 1024**3


class KvBudget(NamedTuple):
    """Bytes of one device, measured once weights were loaded.

    Attributes:
        total: memory of the device
        used: memory of weights, buffers, the driver and other processes
        activations: the most that the largest step needed at once
        graphs: memory to capture every decode graph, and as many mixed ones as are kept
        utilization: the share of `total` that may be used
        block: bytes of one KV block
    """

    total: int
    used: int
    activations: int
    graphs: int
    utilization: float
    block: int

    def beside(self, draft: KvBudget) -> KvBudget:
        """Return the budget with a draft model on the same device, whose steps come after the target's."""
        return self._replace(
            activations=max(self.activations, draft.activations),
            graphs=self.graphs + draft.graphs,
            block=self.block + draft.block,
        )

    @property
    def left(self) -> int:
        """Bytes for KV; may be negative."""
        return int(self.total * self.utilization) - self.used - self.activations - self.graphs

    @property
    def num_blocks(self) -> int:
        return min(max(self.left, 0) // self.block, _MOST)

    def explain(self) -> str:
        """Return the arithmetic in one line."""
        gib = [f"{bytes / _GIB:,.2f}" for bytes in (self.total, self.used, self.activations, self.graphs, self.left)]
        return (
            f"KV blocks: {gib[0]} GiB x {self.utilization:g} - {gib[1]} used after loading - {gib[2]} activations "
            f"- {gib[3]} graphs = {gib[4]} GiB / {self.block / 1024:,.0f} KiB = {self.num_blocks:,}"
        )

    def check(self, config: SchedulerConfig) -> None:
        """Raise UserError unless the longest request fits, beside the null block."""
        need = most_held(config, config.max_model_len) + 1
        if self.num_blocks < need:
            raise UserError(
                "gpu_memory_utilization",
                self.utilization,
                f"leaves {self.num_blocks} KV blocks, but one request of {config.max_model_len} tokens needs {need}; "
                f"raise it, or lower max_model_len or max_num_batched_tokens ({self.explain()})",
            )
