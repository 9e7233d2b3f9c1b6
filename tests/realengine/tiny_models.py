"""Tiny random models of each family, made and run by transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers  # whose parts are imported when they are first named

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MANY_EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama3-rope": lambda: transformers.LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "smollm2": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=None, head_dim=8),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**_SHAPE, **_MANY_EXPERTS, norm_topk_prob=True),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **_SHAPE, **_MANY_EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    ),
    "dots1": lambda: transformers.Dots1Config(
        **_SHAPE,
        head_dim=16,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "qwen3-moe-as-it-is": lambda: transformers.Qwen3MoeConfig(**_SHAPE, **_MANY_EXPERTS, norm_topk_prob=False),
}


def save(family: str, folder: Path, shape: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Save a random model of `family`, of its usual or another shape, as transformers does, and return it."""
    torch.manual_seed(3)
    config = CONFIGS[family]()
    config.update(shape or {})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms are constant in a new model: make them matter
        for name, weight in model.state_dict().items():
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder, **options)
    return model


def greedy(judge: Any, prompts: Sequence[list[int]], outputs: int) -> list[list[int]]:
    """Return what transformers generates greedily for each prompt, all in one batch."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    there = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    answers = judge.generate(
        padded, attention_mask=there, max_new_tokens=outputs, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return answers[:, longest:].tolist()
