"""The reader for a checkpoint, by the `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realengine.checkpoints import fp8, packed
from realengine.checkpoints.tensors import CheckpointTensors
from realengine.stored_weight import Fp8Weight, PackedWeight, StoredWeight
from serving.deployments.model_spec import ModelSpec

_READERS = {  # other checkpoints are FP8
    "gptq": packed.read_gptq,
    "awq": packed.read_awq,
    "compressed-tensors": packed.read_compressed_tensors,
}
_KV_SCALES = {  # names by tool: compressed-tensors and transformers, ModelOpt, AutoFP8, early vLLM for both
    "k_scale": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v_scale": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
_UNUSED_SCALES = ("q_scale", "prob_scale", "kv_scale", "q_proj.output_scale")  # queries and scores are in 16 bits


def read_quantised(state: dict[str, StoredWeight], config: Mapping[str, Any], spec: ModelSpec, where: str) -> None:
    """Turn the tensors of a quantised checkpoint into the layout that `WeightLoader` takes, in place.

    Args:
        config: the checkpoint's config.json

    Other tensors stay as they are. Raises UserError, naming `where`, for tensors that are missing or that the engine
    would compute wrongly.
    """
    if spec.checkpoint_quantization == "none":
        return
    tensors, stored = CheckpointTensors(state, where), config["quantization_config"]
    read = fp8.read if spec.checkpoint_quantization.startswith("fp8") else _READERS[stored["quant_method"]]
    read(tensors, stored, spec)
    _read_kv_scales(tensors, spec.num_layers)
    for name, weight in state.items():
        if isinstance(weight, Fp8Weight | PackedWeight) and not name.startswith("model.layers."):
            module = name.removesuffix(".weight")
            raise tensors.fault(f"{module} is quantised, which only layers may be; use a checkpoint with it in 16 bits")


def _read_kv_scales(tensors: CheckpointTensors, layers: int) -> None:
    """Rename the scales of keys and values in an FP8 cache to `self_attn.k_scale` and `self_attn.v_scale`.

    Keys and values are divided by them. Raises UserError for scales by head.
    """
    for index in range(layers):
        attention = f"model.layers.{index}.self_attn"
        for name, called in _KV_SCALES.items():
            parts = [part for part in called if f"{attention}.{part}" in tensors.state]
            if not parts:
                continue
            scale = tensors.state[f"{attention}.{parts[0]}"].float()
            if scale.numel() != 1:
                raise tensors.fault(f"{attention}.{parts[0]} has {scale.numel()} scales; only one a layer is supported")
            if not 0 < scale.item() < float("inf"):
                raise tensors.fault(f"{attention}.{parts[0]} is {scale.item():g}, but must be positive")
            tensors.drop(attention, *(part for part in parts if part != "kv_scale"))
            tensors.state[f"{attention}.{name}"] = scale.reshape(1)
        tensors.drop(attention, *_UNUSED_SCALES)
