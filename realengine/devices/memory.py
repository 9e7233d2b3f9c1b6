"""The memory of a device: the number of KV blocks that fit, how it is computed, and the error if too few fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tokentwin.serving.answers.figures import shown_gib
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.kv_layout import most_held
from tokentwin.serving.errors import UserError

_MOST = 10_000_000  # limit of SchedulerConfig.num_blocks
_GIB = 1024**3


class KvBudget(NamedTuple):
    """The memory of one device in bytes, measured after the weights were loaded.

    Attributes:
        total: memory of the device
        used: memory of weights, buffers, the driver and other processes
        activations: peak memory of the largest step
        graphs: memory of all decode graphs, and of the maximum number of mixed graphs that are kept
        utilization: fraction of `total` that may be used
        block: bytes of one KV block
    """

    total: int
    used: int
    activations: int
    graphs: int
    utilization: float
    block: int

    def beside(self, draft: KvBudget) -> KvBudget:
        """Return the budget that includes a draft model on the same device; its steps run after the target's."""
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
        """Return one line that shows how the number of blocks is computed."""
        gib = [f"{bytes / _GIB:,.2f}" for bytes in (self.total, self.used, self.activations, self.graphs, self.left)]
        return (
            f"KV blocks: {gib[0]} GiB x {self.utilization:g} - {gib[1]} used after loading - {gib[2]} activations "
            f"- {gib[3]} graphs = {gib[4]} GiB / {self.block / 1024:,.0f} KiB = {self.num_blocks:,}"
        )

    def check(self, config: SchedulerConfig) -> None:
        """Raise UserError unless the longest request and the null block fit."""
        need = most_held(config, config.max_model_len) + 1
        if self.num_blocks < need:
            raise UserError(
                "gpu_memory_utilization",
                self.utilization,
                f"leaves {self.num_blocks} KV blocks, but one request of {config.max_model_len} tokens needs {need}; "
                f"raise it, or lower max_model_len or max_num_batched_tokens ({self.explain()})",
            )


@contextmanager
def memory_for(what: str, deployment: Deployment, num_blocks: int, block_bytes: int) -> Iterator[None]:
    """Turn torch's out-of-memory errors into a UserError that names the setting to change.

    `what` is "weights", "kv" or a description of a step's memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        if what == "kv":
            remedy = f"needs {shown_gib(num_blocks * block_bytes)} of KV cache; lower it"
            raise UserError("scheduler.num_blocks", num_blocks, remedy) from None
        if what == "weights":
            remedy = "does not fit into memory; set quantization to fp8 or int4, or raise tensor_parallel_size"
            raise UserError("model", deployment.model, remedy) from None
        most = deployment.scheduler.max_num_batched_tokens
        remedy = "needs more memory for activations than is left; lower it, or lower num_blocks"
        raise UserError("scheduler.max_num_batched_tokens", most, remedy) from None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether the error means that memory ran out, in torch's allocators or in CUDA itself.

    CUDA itself allocates graphs, pinned memory and the memory of libraries.
    """
    said = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in said)
