"""Which reader a checkpoint needs, by the `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realengine.checkpoints import fp8, kv_scales, packed
from realengine.checkpoints.tensors import CheckpointTensors
from serving.deployments.model_spec import ModelSpec

_READERS = {  # others are FP8
    "gptq": packed.read_gptq,
    "awq": packed.read_awq,
    "compressed-tensors": packed.read_compressed_tensors,
}


def read_quantised(state: dict[str, torch.Tensor], config: Mapping[str, Any], spec: ModelSpec, where: str) -> None:
    """Turn the tensors of a quantised checkpoint into what `WeightLoader` takes, in place; others stay as they are.

    config  its config.json

    Raises UserError, naming `where`, for tensors that are missing or that the engine would compute wrongly.
    """
    if spec.checkpoint_quantization == "none":
        return
    tensors, stored = CheckpointTensors(state, where), config["quantization_config"]
    read = fp8.read if spec.checkpoint_quantization.startswith("fp8") else _READERS[stored["quant_method"]]
    read(tensors, stored, spec)
    kv_scales.read(tensors, spec.num_layers)
    for name in state:
        module, _, part = name.rpartition(".")
        if part in ("weight_packed", "weight_scale") and not module.startswith("model.layers."):
            raise tensors.fault(f"{module} is quantised, which only layers may be; use a checkpoint with it in 16 bits")
