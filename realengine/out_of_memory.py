"""Running out of memory as a user's error, which names the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from serving.deployments.config import Deployment
from serving.errors import UserError
from serving.figures import shown_gib


@contextmanager
def memory_for(what: str, deployment: Deployment, num_blocks: int, block_bytes: int) -> Iterator[None]:
    """Turn torch's out-of-memory errors into one line that names the setting to change.

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
    """Return whether the error is out-of-memory, from torch's allocators or from CUDA beside them.

    CUDA allocates graphs, pinned memory and libraries' own memory.
    """
    said = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in said)
