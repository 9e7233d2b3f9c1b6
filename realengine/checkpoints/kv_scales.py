"""What keys and values are divided by in an FP8 cache, under the names that checkpoints have for it."""

from __future__ import annotations

from realengine.checkpoints.tensors import CheckpointTensors

_NAMES = {  # by tools: compressed-tensors and transformers, ModelOpt, AutoFP8, early vLLM for both
    "k_scale": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v_scale": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
_UNUSED = ("q_scale", "prob_scale", "kv_scale", "q_proj.output_scale")  # queries and scores are in 16 bits


def read(tensors: CheckpointTensors, layers: int) -> None:
    """Names become `self_attn.k_scale` and `self_attn.v_scale`. Raises UserError for scales by head."""
    for index in range(layers):
        attention = f"model.layers.{index}.self_attn"
        for name, called in _NAMES.items():
            found = [part for part in called if f"{attention}.{part}" in tensors.state]
            if not found:
                continue
            scale = tensors.state[f"{attention}.{found[0]}"].float()
            if scale.numel() != 1:
                raise tensors.fault(f"{attention}.{found[0]} has {scale.numel()} scales; only one a layer is supported")
            if not 0 < scale.item() < float("inf"):
                raise tensors.fault(f"{attention}.{found[0]} is {scale.item():g}, but must be positive")
            tensors.drop(attention, *(part for part in found if part != "kv_scale"))
            tensors.state[f"{attention}.{name}"] = scale.reshape(1)
        tensors.drop(attention, *_UNUSED)
