"""Attention by FlashInfer: one of its paged wrappers for steps that run eagerly, and one for each graph.

FlashInfer divides the work on the host, once per step, and copies its plan to the device from a buffer of its own. So a
plan is made only when the copy of the previous one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tokentwin.realengine.attention.flash_attention import check_library, installed
from tokentwin.realengine.attention.kv_cache import FP8, LayerKv
from tokentwin.realengine.devices.device import Device
from tokentwin.realengine.step_input import Batch, Ints, Layout
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_WORKSPACE = 128 << 20  # bytes; the size that FlashInfer's documentation recommends


class FlashInferAttention:
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`, which computes decode rows, chunks and prompts alike."""

    name = "flashinfer"
    capturable: Literal["never", "decode", "always"] = "decode"

    def __init__(self, spec: ModelSpec, deployment: Deployment, device: Device) -> None:
        check_library(self.name, spec, deployment)
        if spec.sliding_window:
            raise UserError("attention", self.name, f"has no sliding windows here, but {spec.name} has; use triton")
        self._library = installed("flashinfer")
        if self._library is None:
            raise UserError("attention", self.name, "is not installed: pip install flashinfer-python")
        config = deployment.scheduler
        self._page, self._most = config.block_size, -(-config.max_model_len // config.block_size)
        dtype = getattr(torch, deployment.dtype)
        self._sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, self._page)
        self._types = {"q_data_type": dtype, "kv_data_type": FP8 if deployment.kv_cache_dtype == "fp8" else dtype}
        self._how: dict[str, Any] = {"causal": True, "sm_scale": spec.head_dim**-0.5, **self._types}
        if deployment.batch_invariant:
            self._how["disable_split_kv"] = True
        self._workspace: Tensor | None = None
        self._eager: Any = None
        self._graphs: dict[Layout, Any] = {}
        self._copied: Any = None

    def tiles(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints]:
        none = np.zeros(0, dtype=np.int32)
        return none, none

    def prepare(self, batch: Batch, captured: bool) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        where = batch.blocks.device
        wrapper = self._for_graph(batch.layout, where) if captured else self._for_eager(where)
        assert batch.host is not None
        field = batch.layout.places()
        lengths, context, first = (batch.host[field[name]] for name in ("query_len", "context", "table_start"))
        needs = -(-context // self._page)
        ends = np.cumsum(needs)
        own = np.arange(ends[-1]) - np.repeat(ends - needs, needs) + np.repeat(first, needs)
        plan = (_starts(lengths), _starts(needs), batch.host[field["blocks"]][own], context - (needs - 1) * self._page)
        wrapper.plan(*(torch.from_numpy(part.astype(np.int32)) for part in plan), *self._sizes, **self._how)
        if where.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _for_eager(self, where: torch.device) -> Any:
        if self._eager is None:
            self._eager = self._library.BatchPrefillWithPagedKVCacheWrapper(self._space(where), "HND")
        return self._eager

    def _for_graph(self, layout: Layout, where: torch.device) -> Any:
        if layout not in self._graphs:
            rows, ints = layout.rows, partial(torch.zeros, dtype=torch.int32, device=where)
            self._graphs[layout] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._space(where),
                "HND",
                use_cuda_graph=True,
                qo_indptr_buf=ints(rows + 1),
                paged_kv_indptr_buf=ints(rows + 1),
                paged_kv_indices_buf=ints(rows * self._most),
                paged_kv_last_page_len_buf=ints(rows),
            )
        return self._graphs[layout]

    def _space(self, where: torch.device) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=where)
        return self._workspace

    def plan(self, batch: Batch, window: int = 0) -> Any:
        return self._eager if batch.host is not None else self._graphs[batch.layout]

    def attend(self, queries: Tensor, plan: Any, kv: LayerKv) -> Tensor:
        scales = {} if kv.k_scale == kv.v_scale == 1.0 else {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
        out: Tensor = plan.run(queries.contiguous(), (kv.keys, kv.values), **scales)
        return out


def _starts(lengths: Ints) -> Ints:
    """Return 0 and the cumulative sums of `lengths`."""
    return np.concatenate(([0], np.cumsum(lengths)))
