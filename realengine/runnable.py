"""The models of a `ModelSpec` that the real engine computes: a model that is nearly right is wrong."""

from __future__ import annotations

from realengine.mlp import MIXTURE_FAMILIES, SHARING_FAMILIES
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURE_FAMILIES)
_STORED = ("none", "fp8", "fp8_block", "int4", "int8")


def check_runnable(spec: ModelSpec) -> None:
    """Raise UserError, naming the first property of `spec` that the engine does not compute."""
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
