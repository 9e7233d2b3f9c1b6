"""A rank's KV blocks in host memory, and the copies between them and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from realengine.copier import Copier, Copy, StreamCopier, ThreadCopier
from realengine.kv_cache import KvCache
from serving.errors import UserError


class HostMemory:
    """`slots` blocks beside those of `kv`, in one tensor of the host's. Raises UserError if there is no room for it."""

    def __init__(self, slots: int, kv: KvCache, device: torch.device) -> None:
        self._kv = kv
        self.copier: Copier = StreamCopier(device) if device.type == "cuda" else ThreadCopier()
        try:
            self._blocks = torch.empty((slots, *kv.block_shape), dtype=kv.dtype, pin_memory=self.copier.pinned)
        except RuntimeError:
            self.copier.close()
            gigabytes = slots * kv.block_bytes / 1e9
            remedy = "is more than the host has; lower it"
            raise UserError("kv_tiers.tiers.0.capacity_gib", f"{gigabytes:,.1f} GB a rank", remedy) from None

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        """Blocks and slots: from the slots into the blocks, or the other way."""
        return self.copier.submit(partial(self._copy, list(pairs), reads))

    def _copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> None:
        for block, slot in pairs:
            inside, outside = self._kv.block(block), self._blocks[slot]
            target, source = (inside, outside) if reads else (outside, inside)
            target.copy_(source, non_blocking=True)
