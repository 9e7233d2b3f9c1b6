"""The `vllm serve` command of a deployment, with the settings that differ from vLLM's defaults.

The data type of the weights is always stated, since vLLM's default is the type in the checkpoint, which the shapes of a
model in the catalogue do not tell.
"""

from __future__ import annotations

import json
import shlex

from tokentwin.planning.plan.candidates import Engine
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engine_defaults import engine_defaults
from tokentwin.serving.deployments.engines import BLOCK_SIZE, UTILIZATION
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.inter_node import nodes_of
from tokentwin.serving.deployments.lora import LoraConfig
from tokentwin.serving.deployments.model_catalogue import find_model, hub_id, pooling_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.speculative import SpeculativeConfig

_QUANTIZATION = {"fp8": "fp8"}  # any other quantization is in the checkpoint already
_STORED = ("int4", "int8")  # vLLM reads these types, but does not make them


def vllm_command(deployment: Deployment, gpu: GpuSpec | None = None) -> str:
    """Return the command as one line for a shell.

    vLLM's defaults depend on the GPU; without a `gpu` the command states more settings than necessary. Raises UserError
    for settings that vLLM does not have, or has no option for.
    """
    return shlex.join(["vllm", "serve", hub_id(deployment.model), *vllm_options(deployment, gpu)])


def vllm_options(deployment: Deployment, gpu: GpuSpec | None = None) -> list[str]:
    """Return the options of the command, which follow the model. Raises UserError as `vllm_command` does."""
    if deployment.policy != "vllm":
        remedy = "does not exist in vLLM; it runs on our own engine (docs/policies.md)"
        raise UserError("policy", deployment.policy, remedy)
    if deployment.engine_name.name != "vllm":
        raise UserError("engine", deployment.engine, "is not vLLM; leave it out, because only vLLM's command is known")
    if deployment.quantization in _STORED and deployment.quantization != _stored(deployment):
        remedy = "cannot be made from 16-bit weights by vLLM; name a checkpoint in GPTQ or AWQ as the model"
        raise UserError("quantization", deployment.quantization, remedy)
    if deployment.scheduler.kv_eviction != "lru":
        remedy = "does not exist in vLLM; it runs on our own engine"
        raise UserError("scheduler.kv_eviction", deployment.scheduler.kv_eviction, remedy)
    if (nodes := nodes_of(deployment)) > 1:
        raise UserError("nodes", nodes, "need a command each; start vLLM by its guide to parallelism and scaling")
    if (groups := deployment.prefill_context_parallel_size) > 1 and not _is_latent(deployment):
        remedy = "needs latent attention in vLLM; start an engine that can do so with other models by its own guide"
        raise UserError("prefill_context_parallel_size", groups, remedy)
    scheduler, multimodal = deployment.scheduler, deployment.multimodal
    usual = engine_defaults(deployment, gpu) if gpu else {}
    settings: dict[str, object] = {"dtype": deployment.dtype}
    if pooling_model(deployment.model) is not None:
        settings["runner"] = "pooling"
    for name, value, default in (
        ("tensor-parallel-size", deployment.tensor_parallel_size, 1),
        ("pipeline-parallel-size", deployment.pipeline_parallel_size, 1),
        ("data-parallel-size", deployment.data_parallel_size, 1),
        ("prefill-context-parallel-size", deployment.prefill_context_parallel_size, 1),
        ("decode-context-parallel-size", deployment.decode_context_parallel_size, 1),
        ("all2all-backend", deployment.all2all_backend, "allgather_reducescatter"),
        ("max-model-len", scheduler.max_model_len, _longest(deployment)),
        ("max-num-seqs", scheduler.max_num_seqs, usual.get("max_num_seqs")),
        ("max-num-batched-tokens", scheduler.max_num_batched_tokens, usual.get("max_num_batched_tokens")),
        ("max-num-active-seqs", scheduler.max_num_active_seqs, None),
        ("max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens, None),
        ("max-cudagraph-capture-size", deployment.max_cudagraph_capture_size, None),
        ("block-size", scheduler.block_size // deployment.decode_context_parallel_size, BLOCK_SIZE),
        ("quantization", _QUANTIZATION.get(deployment.quantization), None),
        ("kv-cache-dtype", deployment.kv_cache_dtype, "auto"),
        ("scheduling-policy", scheduler.policy, "fcfs"),
        ("long-prefill-token-threshold", scheduler.long_prefill_token_threshold, 0),
        ("prefill-schedule-interval", scheduler.prefill_schedule_interval, 1),
    ):
        if value != default:
            settings[name] = value
    if deployment.gpu_memory_utilization is None:
        settings["num-gpu-blocks-override"] = scheduler.num_blocks
    elif deployment.gpu_memory_utilization != UTILIZATION:
        settings["gpu-memory-utilization"] = deployment.gpu_memory_utilization
    if multimodal is not None and multimodal.mm_encoder_tp_mode != "weights":
        settings["mm-encoder-tp-mode"] = multimodal.mm_encoder_tp_mode
    if scheduler.speculative is not None:
        settings["speculative-config"] = _speculative(scheduler.speculative)
    switches = [
        "--enable-expert-parallel" if deployment.enable_expert_parallel else "",
        "--enforce-eager" if deployment.enforce_eager else "",
        "" if scheduler.enable_chunked_prefill else "--no-enable-chunked-prefill",
        "" if scheduler.enable_prefix_caching else "--no-enable-prefix-caching",
        "" if scheduler.async_scheduling else "--no-async-scheduling",
        "--long-prefill-token-threshold-adaptive" if scheduler.long_prefill_token_threshold_adaptive else "",
        "--disable-chunked-mm-input" if multimodal and multimodal.disable_chunked_mm_input else "",
    ]
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*words, *filter(None, switches), *_adapters(deployment.lora)]


def _adapters(lora: LoraConfig | None) -> list[str]:
    """Return the options of adapters; the adapters themselves are loaded later, or by `--lora-modules`."""
    if lora is None:
        return []
    words = ["--enable-lora", "--max-loras", str(lora.max_loras), "--max-lora-rank", str(lora.max_lora_rank)]
    if lora.max_cpu_loras is not None:
        words += ["--max-cpu-loras", str(lora.max_cpu_loras)]
    return [*words, "--lora-target-modules", *lora.target_modules] if lora.target_modules else words


def _is_latent(deployment: Deployment) -> bool:
    """Return whether the model is in the catalogue and has latent attention."""
    try:
        return find_model(deployment.model).latent is not None
    except UserError:
        return False


def _longest(deployment: Deployment) -> int | None:
    """Return the model's number of positions, vLLM's default length; None for a model that is not in the catalogue."""
    try:
        return find_model(deployment.model).max_positions
    except UserError:
        return None


def _stored(deployment: Deployment) -> str | None:
    """Return the quantization of the model's checkpoint; None for a model that is not in the catalogue."""
    try:
        return find_model(deployment.model).checkpoint_quantization
    except UserError:
        return None


def vllm_command_of(engine: Engine) -> str | None:
    """Return the command of a candidate; None if vLLM cannot serve it, or not by one command.

    The driver's command for the power limit comes first, if there is one.
    """
    if engine.split:
        return None
    try:
        command = vllm_command(engine.deployment, engine.gpu_spec)
    except UserError:
        return None
    limit_w = engine.deployment.power_limit_w
    return command if limit_w is None else f"sudo nvidia-smi --power-limit={limit_w:g} && {command}"


def _speculative(config: SpeculativeConfig) -> str:
    if config.method == "eagle":
        remedy = "needs the checkpoint of its head in vLLM, which a deployment does not name"
        raise UserError("scheduler.speculative.method", "eagle", remedy)
    names = ("method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size")
    known = {name: getattr(config, name) for name in (*names, "prompt_lookup_max", "prompt_lookup_min")}
    if config.draft_sample_method == "probabilistic":
        known["draft_sample_method"] = "probabilistic"
    return json.dumps({name: value for name, value in known.items() if value is not None})
