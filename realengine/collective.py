"""The communication between the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from realengine.op_times import OpTimes


class Collective(Protocol):
    """A group of `size` ranks, of which this is `rank`. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def sum(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        """Return `x` summed over the ranks, the same to the bit on each of them."""

    def join(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        """Return the ranks' `x` `[n, m]` side by side, `[n, size * m]`."""


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        return x


class DistributedGroup:
    """The default process group of torch.distributed: NCCL on CUDA, gloo on the CPU."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        with times("all_reduce"):
            self._dist.all_reduce(x)
        return x

    def join(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with times("all_gather"):
            self._dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)
