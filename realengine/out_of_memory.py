"""Running out of memory is a user's error: it names the setting to change."""

from __future__ import annotations

import torch

from serving.deployments.config import Deployment
from serving.errors import UserError


class OutOfMemory:
    """Turns torch's out-of-memory errors into one line that names the knob to turn."""

    def __init__(self, deployment: Deployment, kv_bytes: int, what: str, num_blocks: int) -> None:
        self._deployment, self._kv_bytes, self._what, self._blocks = deployment, kv_bytes, what, num_blocks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or not _is_out_of_memory(error):
            return
        config = self._deployment.scheduler
        if self._what == "kv":
            remedy = f"needs {self._kv_bytes / 1e9:,.1f} GB of KV cache; lower it"
            raise UserError("scheduler.num_blocks", self._blocks, remedy) from None
        if self._what == "weights":
            remedy = "does not fit into memory; set quantization to fp8 or int4, or raise tensor_parallel_size"
            raise UserError("model", self._deployment.model, remedy) from None
        remedy = "needs more memory for activations than is left; lower it, or lower num_blocks"
        raise UserError("scheduler.max_num_batched_tokens", config.max_num_batched_tokens, remedy) from None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """From torch's allocators, or from CUDA beside them: graphs, pinned memory, libraries' own."""
    said = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in said)
