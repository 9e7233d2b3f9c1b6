"""The search for an attention backend: ours by name, other ones by `module:Class` or by their entry point."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from realengine.attention import Attention
from realengine.attention_names import ATTENTION
from realengine.device import Device
from realengine.step_input import Batch
from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError, raised
from serving.user_code.plugins import find, make

_CALLS = ("tiles", "prepare", "plan", "attend")
_CAPTURABLE = ("never", "decode", "always")


class OwnAttention:
    """A backend that is not ours; its exceptions become errors of one line."""

    def __init__(self, name: str, backend: Attention) -> None:
        self.name, self._backend = name, backend
        self.capturable = getattr(backend, "capturable", "never")
        if self.capturable not in _CAPTURABLE:
            raise UserError("attention", name, f"capturable must be {', '.join(_CAPTURABLE)}, not {self.capturable!r}")

    def plan(self, batch: Batch, window: int = 0) -> Any:
        return self._called("plan", batch)  # models with windows never get such a backend

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
    """Return the backend that a deployment names, for the heads of `spec` (one rank's); raise UserError without one."""
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
