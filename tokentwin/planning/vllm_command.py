"""The `vllm serve` command of a deployment, with every setting that the answer depends on spelt out."""

from __future__ import annotations

import json
import shlex

from serving.config import Deployment
from serving.errors import UserError
from serving.model_catalogue import hub_id
from serving.speculative import SpeculativeConfig
from tokentwin.planning.engines import Engine

_QUANTIZATION = {"none": None, "fp8": "fp8", "fp8_block": None, "mxfp4": None}  # None: as the checkpoint has it


def vllm_command(deployment: Deployment) -> str:
    """One line for a shell. Raises UserError for what vLLM does not have, or cannot be told."""
    if deployment.policy != "vllm":
        raise UserError("policy", deployment.policy, "is none of vLLM's; it runs on our engine (docs/policies.md)")
    scheduler = deployment.scheduler
    settings: dict[str, object] = {
        "dtype": deployment.dtype,
        "tensor-parallel-size": deployment.tensor_parallel_size,
        "max-model-len": scheduler.max_model_len,
        "max-num-seqs": scheduler.max_num_seqs,
        "max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "block-size": scheduler.block_size,
    }
    if deployment.gpu_memory_utilization is not None:
        settings["gpu-memory-utilization"] = deployment.gpu_memory_utilization
    else:
        settings["num-gpu-blocks-override"] = scheduler.num_blocks
    if deployment.pipeline_parallel_size > 1:
        settings["pipeline-parallel-size"] = deployment.pipeline_parallel_size
    if deployment.data_parallel_size > 1:
        settings["data-parallel-size"] = deployment.data_parallel_size
    if quantization := _QUANTIZATION[deployment.quantization]:
        settings["quantization"] = quantization
    if deployment.kv_cache_dtype != "auto":
        settings["kv-cache-dtype"] = deployment.kv_cache_dtype
    if scheduler.policy != "fcfs":
        settings["scheduling-policy"] = scheduler.policy
    if scheduler.long_prefill_token_threshold:
        settings["long-prefill-token-threshold"] = scheduler.long_prefill_token_threshold
    if scheduler.speculative is not None:
        settings["speculative-config"] = _speculative(scheduler.speculative)
    switches = [
        "--enable-expert-parallel" if deployment.enable_expert_parallel else "",
        "--enforce-eager" if deployment.enforce_eager else "",
        "" if scheduler.enable_chunked_prefill else "--no-enable-chunked-prefill",
        "" if scheduler.enable_prefix_caching else "--no-enable-prefix-caching",
        "--async-scheduling" if scheduler.async_scheduling else "--no-async-scheduling",
    ]
    words = ["vllm", "serve", hub_id(deployment.model)]
    words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return shlex.join([*words, *filter(None, switches)])


def vllm_command_of(engine: Engine) -> str | None:
    """That of a candidate; None for what vLLM cannot serve, or not by one command."""
    if engine.split:
        return None
    try:
        return vllm_command(engine.deployment)
    except UserError:
        return None


def _speculative(config: SpeculativeConfig) -> str:
    if config.method == "eagle":
        raise UserError("scheduler.speculative.method", "eagle", "names no head's checkpoint, which vLLM needs")
    known = {"method": config.method, "model": config.model, "num_speculative_tokens": config.num_speculative_tokens}
    return json.dumps({name: value for name, value in known.items() if value is not None})
