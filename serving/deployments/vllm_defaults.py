"""What `vllm serve` does where its command line does not say: the settings of vLLM 0.33's server, by GPU.

As vLLM's `EngineArgs.get_batch_defaults` has them for its API server: large GPUs get larger steps and more requests at
once. The A100 is excepted by name, since larger steps lower its throughput.
"""

from __future__ import annotations

from collections.abc import Collection

from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import GpuSpec

UTILIZATION = 0.92  # of the memory of a GPU; 0.9 in versions before
BLOCK_SIZE = 16
_LARGE = 70 * 1024**3  # bytes of memory


def served_by_default(deployment: Deployment, gpu: GpuSpec, stated: Collection[str] = ()) -> Deployment:
    """`deployment` on `gpu` with vLLM's async_scheduling, max_num_seqs and max_num_batched_tokens.

    Scheduler settings that are `stated` stay as they are. Pipeline stages go without async_scheduling here.
    """
    scheduler = deployment.scheduler
    large = gpu.memory_bytes >= _LARGE and "a100" not in gpu.name.lower()
    seqs, tokens = (1024, 8192) if large else (256, 2048)
    if not scheduler.enable_chunked_prefill:
        tokens = max(tokens, scheduler.max_model_len)
    settings = {
        "async_scheduling": deployment.pipeline_parallel_size == 1,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": min(tokens, seqs * scheduler.max_model_len),
    }
    return deployment.rescheduled(**{name: value for name, value in settings.items() if name not in stated})
