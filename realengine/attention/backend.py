"""The interface of attention backends, and the search for one by name, `module:Class` or entry point."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch

from tokentwin.realengine.attention import ATTENTION
from tokentwin.realengine.attention.kv_cache import LayerKv
from tokentwin.realengine.devices.device import Device
from tokentwin.realengine.step_input import Batch, Ints
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError, raised
from tokentwin.serving.user_code.plugins import find, make

_CALLS = ("tiles", "prepare", "plan", "attend")
_CAPTURABLE = ("never", "decode", "always")


class Attention(Protocol):
    """An attention backend, made as `Backend(spec, deployment, device)`, where `spec` is a rank's share of the model.

    Attributes:
        name: name in the deployment and in recordings
        capturable: kind of steps in which `plan` and `attend` may be captured in a CUDA graph

    A constructor raises UserError, or any other exception, for a model or deployment that the backend cannot run.
    """

    name: str
    capturable: Literal["never", "decode", "always"]

    def tiles(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints]:
        """Return `tile_row` and `tile_first` of `Batch`, on the host, for prefill rows.

        `rows` are `(row, query tokens, context)`.
        """

    def prepare(self, batch: Batch, captured: bool) -> None:
        """Prepare a step before its model runs; no graph captures this call.

        It is called for every step; `batch.host` has the step's content. If the step runs as a graph (`captured`),
        everything that `attend` reads must be at the addresses that it had when the graph was captured.
        """

    def plan(self, batch: Batch, window: int = 0) -> Any:
        """Return the plan of a step, which all layers of a group share.

        In a graph, it is captured with the layers, and `batch.host` is None. A query sees the last `window` tokens up
        to and including its own; 0 means all tokens.
        """

    def attend(self, queries: torch.Tensor, plan: Any, kv: LayerKv) -> torch.Tensor:
        """Return causal attention of `queries` `[T, heads, head_dim]` over each row's own context, in the same shape.

        This step's keys and values of the layer are already in `kv`. Tokens that belong to no row must come out finite.
        """


class OwnAttention:
    """A wrapper of a user's own backend, which turns its exceptions into one-line errors."""

    def __init__(self, name: str, backend: Attention) -> None:
        self.name, self._backend = name, backend
        self.capturable = getattr(backend, "capturable", "never")
        if self.capturable not in _CAPTURABLE:
            raise UserError("attention", name, f"capturable must be {', '.join(_CAPTURABLE)}, not {self.capturable!r}")

    def plan(self, batch: Batch, window: int = 0) -> Any:
        return self._called("plan", batch)  # without `window`, because models with windows never get a user's backend

    def __getattr__(self, call: str) -> Any:
        return partial(self._called, call)

    def _called(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(self._backend, call)(*arguments)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UserError("attention", self.name, f"{call} failed: {raised(error)}") from error


def find_attention(deployment: Deployment, spec: ModelSpec, device: Device) -> Attention:
    """Return the deployment's backend for one rank's share `spec` of the model; raise UserError if there is none."""
    name = deployment.attention
    if name == "auto":
        name = "triton" if deployment.device == "cuda" else "torch"
    if name in ("triton", "hybrid"):
        try:
            import triton  # noqa: F401
        except ImportError:
            remedy = "needs triton (Linux, x86_64): pip install 'tokentwin[engine]'"
            raise UserError("attention", name, remedy) from None
    if spec.sliding_window and name not in ATTENTION:
        raise UserError(
            "attention", name, f"is not asked for sliding windows, which {spec.name} has; use torch or triton"
        )
    backend: Attention = make("attention", name, find("attention", name, ATTENTION, _CALLS), spec, deployment, device)
    return backend if name in ATTENTION else cast(Attention, OwnAttention(name, backend))
