"""The choice of an engine's KV memory."""

from __future__ import annotations

from serving.deployments.config import SchedulerConfig
from serving.errors import UserError
from serving.kv.block_pool import BlockPool
from serving.kv.blocks import KvBlocks
from serving.kv.content import Content, segment_content
from serving.kv.contiguous_pool import ContiguousPool
from serving.kv.grouped_pool import GroupedPool
from serving.kv.state_pool import StatePool


def kv_blocks(config: SchedulerConfig, shares_prefixes: bool, content: Content | None) -> KvBlocks:
    """Return the KV memory of an engine; blocks have identities if the engine brings its own `content`."""
    if config.kv_reservation != "paged":
        if config.kv_groups or config.state_blocks:
            remedy = "needs a model with full attention in all layers; set it to paged"
            raise UserError("scheduler.kv_reservation", config.kv_reservation, remedy)
        return ContiguousPool(config, names=content is not None)
    if config.kv_groups:
        return GroupedPool(config, content or segment_content(config))
    if content is not None and not config.state_blocks:
        return BlockPool(config, content, named=True)
    shares = shares_prefixes and config.enable_prefix_caching
    pool = StatePool if config.state_blocks else BlockPool
    return pool(config, (content or segment_content(config)) if shares else None)
