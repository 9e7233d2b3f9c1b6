"""GPTQ checkpoints (AutoGPTQ, GPTQModel): integers packed along inputs, zero points stored one too small.

Of a linear layer `[out, in]`: qweight `[in * bits / 32, out]`, qzeros `[groups, out * bits / 32]`, both int32 with the
first integer in a word's lowest bits; scales `[groups, out]`; g_idx `[in]`, the group of each input. gptq_v2 stores
zero points as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realengine.checkpoints.tensors import CheckpointTensors
from realengine.packed_weight import PackedWeight, pack, unpack
from serving.deployments.model_spec import ModelSpec


def read(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raises UserError for tensors that are missing or in an order of their own."""
    bits, group = int(config["bits"]), spec.checkpoint_group_size
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    for module in tensors.modules("qweight"):
        integers = unpack(tensors.take(module, "qweight", torch.int32).t().contiguous(), bits)
        tensors.check_order(module, "g_idx", integers.shape[1], group)
        zero = unpack(tensors.take(module, "qzeros", torch.int32), bits).t() + offset
        if not spec.checkpoint_zero_points:
            if not torch.all(zero == 2 ** (bits - 1)):
                raise tensors.fault(f"{module}.qzeros are not in the middle, though config.json says sym")
            zero = None
        scale = tensors.take(module, "scales").t().contiguous()
        tensors.give(module, PackedWeight(pack(integers, bits), scale, zero, bits, group))
        bias = tensors.state.get(f"{module}.bias")
        if bias is not None and not bias.any():  # AutoGPTQ writes one for every layer
            tensors.drop(module, "bias")
