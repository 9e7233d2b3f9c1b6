"""Checks of models and deployments: the engine refuses what it would compute wrongly, and ignores no setting."""

from __future__ import annotations

from pydantic import BaseModel

from tokentwin.realengine.models.mlp import MIXTURE_FAMILIES, SHARING_FAMILIES
from tokentwin.realengine.models.weight_loader import QUANTIZATIONS
from tokentwin.realengine.parallel.tensor_parallel import shard_spec
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.kv_layout import kv_groups, stating_kv_groups
from tokentwin.serving.deployments.lora import LoraConfig, adapted_linears
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURE_FAMILIES)
_STORED = ("none", "fp8", "fp8_block", "int4", "int8")
_SIMULATED = (
    "pipeline_parallel_size", "data_parallel_size", "all2all_backend", "expert_imbalance", "inter_node", "fusion",
    "engine", "max_cudagraph_capture_size", "power_limit_w", "prefill_context_parallel_size",
    "decode_context_parallel_size", "multimodal",
)  # fmt: skip


def check_runnable(spec: ModelSpec) -> None:
    """Raise UserError for the first property of `spec` that the engine does not support."""
    name = spec.name
    simulated = "works only in the simulator; the real engine runs"
    if spec.family not in _FAMILIES:
        raise UserError(f"{name}.architectures", spec.family, f"{simulated} {', '.join(_FAMILIES)}")
    if bool(spec.num_experts) != (spec.family in MIXTURE_FAMILIES):
        raise UserError(
            f"{name}.num_experts", spec.num_experts, f"{simulated} mixtures of family {', '.join(MIXTURE_FAMILIES)}"
        )
    if spec.shared_intermediate_size and spec.family not in SHARING_FAMILIES:
        remedy = f"{simulated} a shared expert of family {', '.join(SHARING_FAMILIES)}"
        raise UserError(f"{name}.shared_expert_intermediate_size", spec.shared_intermediate_size, remedy)
    if spec.bidirectional:
        raise UserError(f"{name}.is_causal", False, f"{simulated} causal attention")
    if spec.sliding_window == 1:
        raise UserError(f"{name}.sliding_window", 1, f"{simulated} windows of at least 2 tokens")
    if spec.sliding_layers and not spec.sliding_at:
        raise UserError(f"{name}.sliding_layers", spec.sliding_layers, "must come with sliding_at, which names them")
    if spec.checkpoint_quantization not in _STORED:
        remedy = f"{simulated} weights in 16 bits, {', '.join(_STORED[1:])}"
        raise UserError(f"{name}.quantization_config", spec.checkpoint_quantization, remedy)
    if spec.other_rope:
        raise UserError(f"{name}.rope_type", spec.other_rope, f"{simulated} rope_type default and llama3")
    if spec.activation != "silu":
        raise UserError(f"{name}.hidden_act", spec.activation, f"{simulated} hidden_act silu")
    if spec.mlp_bias:
        raise UserError(f"{name}.mlp_bias", True, f"{simulated} MLPs without biases")
    if spec.out_bias or (spec.qkv_bias and spec.family not in ("qwen2", "qwen2_moe")):
        raise UserError(f"{name}.attention_bias", True, f"{simulated} attention biases only in the QKV of Qwen2")
    if spec.rotary_share != 1:
        raise UserError(f"{name}.partial_rotary_factor", spec.rotary_share, f"{simulated} a factor of 1")


def check_deployment(deployment: Deployment, spec: ModelSpec) -> Deployment:
    """Return `deployment` with the `kv_groups` of the model `spec`.

    Raises UserError for the first setting that the engine does not support for that model.
    """
    scheduler = deployment.scheduler
    for name in _SIMULATED:
        value = getattr(deployment, name)
        if value != Deployment.model_fields[name].default:
            remedy = "works only in the simulator; leave it out for the real engine"
            raise UserError(name, "stated" if isinstance(value, BaseModel) else value, remedy)
    if deployment.kv_tiers is not None and len(tiers := deployment.kv_tiers.tiers) > 1:
        remedy = "real engines have one tier, the host's memory; leave the others out"
        raise UserError("kv_tiers.tiers", ", ".join(tier.name for tier in tiers), remedy)
    if deployment.fleet is not None:
        replicas = sum(pool.replicas for pool in deployment.fleet.pools)
        raise UserError("fleet", replicas, "is several engines, and this runs one; leave it out, or run bench")
    if deployment.lora is not None:
        _check_adapters(deployment, deployment.lora, spec)
    if scheduler.state_blocks:
        remedy = "is for models with constant states, which only the simulator runs; leave it out"
        raise UserError("scheduler.state_blocks", scheduler.state_blocks, remedy)
    if scheduler.speculative is not None and scheduler.speculative.method in ("eagle", "mtp"):
        remedy = "works only in the simulator; the real engine drafts with ngram and draft_model"
        raise UserError("scheduler.speculative.method", scheduler.speculative.method, remedy)
    if scheduler.speculative is not None and scheduler.speculative.num_speculative_tokens_per_batch_size is not None:
        remedy = "works only in the simulator; leave it out for the real engine"
        raise UserError("scheduler.speculative.num_speculative_tokens_per_batch_size", "stated", remedy)
    if deployment.quantization not in QUANTIZATIONS:
        remedy = f"works only in the simulator; the real engine runs {', '.join(QUANTIZATIONS)}"
        raise UserError("quantization", deployment.quantization, remedy)
    if deployment.quantization not in ("none", stored := spec.checkpoint_quantization) and stored != "none":
        remedy = f"cannot be made of {spec.name}, which is stored in {stored}; leave it out"
        raise UserError("quantization", deployment.quantization, remedy)
    if deployment.enable_expert_parallel and not spec.num_experts:
        raise UserError("enable_expert_parallel", True, f"needs a mixture; {spec.name} is dense; leave it out")
    shard_spec(spec, deployment.tensor_parallel_size, deployment.enable_expert_parallel)
    if scheduler.policy == "priority" and scheduler.enable_prefix_caching and not scheduler.forget_withdrawn:
        remedy = "could reuse blocks that were never computed under policy priority, as vLLM does; set it to true"
        raise UserError("scheduler.forget_withdrawn", False, remedy)
    if scheduler.max_model_len > spec.max_positions:
        remedy = f"must be at most {spec.max_positions}, the positions of {spec.name}"
        raise UserError("scheduler.max_model_len", scheduler.max_model_len, remedy)
    return stating_kv_groups(deployment, kv_groups(spec, deployment))


def _check_adapters(deployment: Deployment, lora: LoraConfig, spec: ModelSpec) -> None:
    """Raise UserError for the first setting that does not go together with `lora`."""
    adapted_linears(spec, lora, 1)  # raises for models with parts that no adapter here changes
    if lora.adapters is None:
        remedy = "is missing; name the folder of the adapters' folders, or random:RANK"
        raise UserError("lora.adapters", None, remedy)
    if lora.load_ms is not None:
        raise UserError("lora.load_ms", lora.load_ms, "is measured on the real engine; leave it out")
    for name, value in (("tensor_parallel_size", deployment.tensor_parallel_size), ("kv_tiers", deployment.kv_tiers)):
        if value not in (1, None):
            shown = value if isinstance(value, int) else "stated"
            raise UserError(name, shown, "cannot be combined with lora on the real engine; leave one of them out")
    stored = spec.checkpoint_quantization if deployment.quantization == "none" else deployment.quantization
    if stored.startswith("fp8"):
        remedy = f"cannot be {stored} with lora on the real engine; choose 16 bits, int8 or int4, or leave lora out"
        raise UserError("quantization", stored, remedy)
