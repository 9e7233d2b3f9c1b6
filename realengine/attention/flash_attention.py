"""Attention by FlashAttention's kernels: those in torch (`varlen_attn`), and those of the package `flash-attn`.

FlashAttention 2 reads a paged cache only if a block has a multiple of 256 tokens. FlashAttention 3 (Hopper only) reads
any blocks. Where torch's `varlen_attn` cannot read the cache, the KV of a step is copied into one tensor before each
layer's attention. This is cheap for prompts, but multiplies the memory traffic of decode rows by three.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tokentwin.realengine.attention.kv_cache import LayerKv
from tokentwin.realengine.devices.device import Device
from tokentwin.realengine.step_input import Batch, Ints
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_WIDEST_HEAD = 256
_FA2_BLOCK = 256  # FlashAttention 2 requires blocks of a multiple of so many tokens


class _Rows(NamedTuple):
    """The rows of a step, as FlashAttention takes them; all tensors are int32.

    Attributes:
        starts: [R + 1] index of each row's first query token, and the number of query tokens
        kv_starts: [R + 1] the same for KV tokens
        context: [R] number of KV tokens
        table: [R, most blocks] block ids; 0 beyond a row's own
        most_queries, most_context: upper limits of a row's query tokens and KV tokens, known on the host
        window: number of tokens to the left and to the right that a query sees; -1 is all
        places: block and place in the block of every KV token, if KV is copied; else None
    """

    starts: Tensor
    kv_starts: Tensor
    context: Tensor
    table: Tensor
    most_queries: int
    most_context: int
    window: tuple[int, int]
    places: tuple[Tensor, Tensor] | None = None


# A single query sees its whole context. FlashAttention 2 packs query heads (GQA) only without a causal mask.
_CAUSAL = {False: (-1, 0), True: (-1, -1)}
_Call = Callable[[Tensor, Tensor, Tensor, _Rows], Tensor]  # queries, keys, values, rows


class _FlashRows:
    """The part that both libraries share: a step's rows, made on the device, so that decode steps may be graphs.

    A step with prompts runs eagerly, because FlashAttention 2 chooses its kernel on the host by the longest row.
    """

    name: str
    capturable: Literal["never", "decode", "always"] = "decode"
    _copies = False
    _call: _Call

    def __init__(self, spec: ModelSpec, deployment: Deployment, device: Device) -> None:
        check_library(self.name, spec, deployment)
        if deployment.kv_cache_dtype == "fp8":
            raise UserError("kv_cache_dtype", "fp8", f"does not work with attention {self.name}; use triton")
        self._block_size = deployment.scheduler.block_size
        self._longest = deployment.scheduler.max_model_len
        self._scale = spec.head_dim**-0.5

    def tiles(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints]:
        none = np.zeros(0, dtype=np.int32)
        return none, none

    def prepare(self, batch: Batch, captured: bool) -> None:
        pass

    def plan(self, batch: Batch, window: int = 0) -> _Rows:
        only_decodes = batch.layout.decodes_only
        most_context = self._longest if batch.host is None else max(batch.on_host("context"))
        starts, kv_starts = _starts(batch.query_len), _starts(batch.context)
        at = torch.arange(-(-most_context // self._block_size), dtype=torch.int32, device=batch.blocks.device)
        place = (batch.table_start[:, None] + at).clamp(max=len(batch.blocks) - 1)
        own = at < (batch.context[:, None] + self._block_size - 1) // self._block_size
        rows = _Rows(
            starts,
            kv_starts,
            batch.context,
            torch.where(own, batch.blocks[place.long()], 0),
            1 if only_decodes else max(batch.on_host("query_len")),
            most_context,
            (window - 1, 0) if window else _CAUSAL[only_decodes],
        )
        return rows._replace(places=self._kv_places(batch, rows)) if self._copies else rows

    def _kv_places(self, batch: Batch, rows: _Rows) -> tuple[Tensor, Tensor]:
        tokens, context = sum(batch.on_host("context")), batch.context.long()
        row = torch.repeat_interleave(torch.arange(len(context), device=context.device), context, output_size=tokens)
        position = torch.arange(tokens, device=context.device) - rows.kv_starts[row]
        return rows.table[row, position // self._block_size].long(), position % self._block_size

    def attend(self, queries: Tensor, plan: _Rows, kv: LayerKv) -> Tensor:
        if plan.places is None:
            keys, values = kv.keys.transpose(1, 2), kv.values.transpose(1, 2)
        else:
            block, place = plan.places
            keys, values = kv.keys[block, :, place], kv.values[block, :, place]
        return self._call(queries, keys, values, plan)


class VarlenAttention(_FlashRows):
    """Torch's own `varlen_attn`. It reads the cache by block tables if torch has these and blocks allow it."""

    name = "varlen"

    def __init__(self, spec: ModelSpec, deployment: Deployment, device: Device) -> None:
        super().__init__(spec, deployment, device)
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            raise UserError("attention", self.name, f"needs torch 2.11 or later, not {torch.__version__}") from None
        known = inspect.signature(varlen_attn).parameters
        if "window_size" not in known:
            raise UserError("attention", self.name, f"needs torch 2.11 or later, not {torch.__version__}")
        more: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
        if deployment.batch_invariant:
            if "num_splits" not in known:
                raise UserError("batch_invariant", True, f"does not work with attention {self.name} of this torch")
            more["num_splits"] = 1
        self._copies = "block_table" not in known or self._block_size % _FA2_BLOCK != 0
        if self._copies:
            self.capturable = "never"

        def call(queries: Tensor, keys: Tensor, values: Tensor, rows: _Rows) -> Tensor:
            tables = {} if self._copies else {"seqused_k": rows.context, "block_table": rows.table}
            limits = (rows.starts, rows.kv_starts, rows.most_queries, rows.most_context)
            how = {"scale": self._scale, "window_size": rows.window, **more, **tables}
            return cast(Tensor, varlen_attn(queries, keys, values, *limits, **how))

        self._call = call


class FlashAttention(_FlashRows):
    """The package `flash_attn_interface` (FlashAttention 3) where it is installed, else `flash_attn` (2)."""

    name = "flash-attn"

    def __init__(self, spec: ModelSpec, deployment: Deployment, device: Device) -> None:
        super().__init__(spec, deployment, device)
        library = installed("flash_attn_interface")
        if library is not None:
            self._call = self._third(library.flash_attn_with_kvcache, 1 if deployment.batch_invariant else 0)
            return
        library = installed("flash_attn")
        if library is None:
            raise UserError("attention", self.name, "is not installed: pip install flash-attn (or build its hopper/)")
        if self._block_size % _FA2_BLOCK:
            remedy = f"must be a multiple of {_FA2_BLOCK} for FlashAttention 2; FlashAttention 3 takes any"
            raise UserError("scheduler.block_size", self._block_size, remedy)
        if deployment.batch_invariant:
            raise UserError("batch_invariant", True, "does not work with FlashAttention 2; use attention triton")
        self._call = self._second(library.flash_attn_varlen_func)

    def _third(self, function: Callable[..., Tensor], splits: int) -> _Call:
        """Return the call of FlashAttention 3, which divides KV into `splits`; 0 lets it choose."""

        def call(queries: Tensor, keys: Tensor, values: Tensor, rows: _Rows) -> Tensor:
            return function(
                queries, keys, values, cache_seqlens=rows.context, page_table=rows.table, cu_seqlens_q=rows.starts,
                max_seqlen_q=rows.most_queries, softmax_scale=self._scale, causal=True, window_size=rows.window,
                num_splits=splits,
            )  # fmt: skip

        return call

    def _second(self, function: Callable[..., Tensor]) -> _Call:
        def call(queries: Tensor, keys: Tensor, values: Tensor, rows: _Rows) -> Tensor:
            return function(
                queries, keys, values, rows.starts, rows.kv_starts, rows.most_queries, rows.most_context,
                softmax_scale=self._scale, causal=True, window_size=rows.window, block_table=rows.table,
            )  # fmt: skip

        return call


def check_library(name: str, spec: ModelSpec, deployment: Deployment) -> None:
    """Raise UserError if no library's attention can run `spec` in `deployment`."""
    if deployment.device != "cuda":
        raise UserError("attention", name, "needs device cuda; use torch on the CPU")
    if deployment.dtype == "float32":
        raise UserError("dtype", deployment.dtype, f"does not work with attention {name}; use bfloat16 or float16")
    if spec.head_dim > _WIDEST_HEAD:
        remedy = f"takes heads of at most {_WIDEST_HEAD} dimensions, but {spec.name}'s have {spec.head_dim}"
        raise UserError("attention", name, f"{remedy}; use torch")


def installed(module: str) -> Any:
    """Return the imported module, or None if it is not installed or cannot be loaded."""
    try:
        return import_module(module)
    except (ImportError, OSError):  # OSError: a library that was built for another CUDA
        return None


def _starts(lengths: Tensor) -> Tensor:
    """Return `[R + 1]` int32: 0, and the cumulative sums of `lengths` `[R]`."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
