"""Decode attention that reads the prefix of all running requests once: "cascade attention" in vLLM.

vLLM's FlashAttention backend attends to a prefix that all running requests share in one pass for all rows, and to the
rest of each context in another, where it expects both to be faster together (`use_cascade_attention` in
`vllm/v1/attention/backends/flash_attn.py`). Releases from 0.18 on do so only on demand (pull request 36318). Other
engines, and vLLM's default backend on Blackwell, never do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokentwin.calibration.step_operations import heads_per_device
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.model_spec import ModelSpec

_ON_DEMAND_SINCE = (0, 18)
_BACKEND_OF = ("Ampere", "Ada", "Hopper")  # generations on which FlashAttention is vLLM's default backend
_LEAST_TOKENS, _LEAST_ROWS = 256, 8
_TILE = 128  # rows, and tokens of KV, that one block of GPU threads attends to


def readable_prefix(tokens: int, model: ModelSpec, deployment: Deployment, gpu: GpuSpec) -> int:
    """Return how many of the `tokens` tokens that all prompts share may be read once; 0 if the engine never does so.

    They are whole KV blocks. Releases that are not stated count as recent ones.
    """
    engine, scheduler = deployment.engine_name, deployment.scheduler
    old = engine.name == "vllm" and engine.release is not None and engine.release < _ON_DEMAND_SINCE
    plain = model.full_layers == model.num_layers and model.latent is None
    if not (old and plain and scheduler.enable_prefix_caching and gpu.generation in _BACKEND_OF):
        return 0
    cached = tokens // scheduler.block_size * scheduler.block_size
    return cached if cached >= _LEAST_TOKENS else 0


def read_once(
    rows: ArrayLike, prefix: int, model: ModelSpec, deployment: Deployment, gpu: GpuSpec
) -> NDArray[np.bool_]:
    """Return whether a step of so many decode rows reads a `readable_prefix` once.

    vLLM compares the waves of thread blocks of both ways. Without grouped queries, or with drafts, it always reads the
    prefix once. Steps with prompts count as steps of their decode rows.
    """
    count, (heads, kv_heads) = np.asarray(rows), heads_per_device(model, deployment.tensor_parallel_size)
    enough = count >= _LEAST_ROWS if prefix else np.zeros(count.shape, dtype=bool)
    if heads == kv_heads or deployment.scheduler.speculative is not None:
        return enough
    tiles = -(-prefix // _TILE)
    once = -(-heads * -(-count // _TILE) // gpu.sm_count) * tiles
    by_row = -(-count * kv_heads * -(-heads // kv_heads // _TILE) * tiles // gpu.sm_count)
    return enough & (once < by_row)
