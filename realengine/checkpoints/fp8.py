"""FP8 checkpoints: e4m3 weights with a scale for the tensor, for each output channel or for each block.

AutoFP8's `fp8`, DeepSeek's and Qwen's blocks of it, `fbgemm_fp8`, ModelOpt's FP8 and compressed-tensors'
float-quantized differ only in the shape of `weight_scale`, and in its name for blocks (`weight_scale_inv`, which is no
inverse). Scales of activations are ignored: the engine computes one for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from realengine.checkpoints.tensors import CheckpointTensors
from realengine.projection import quantised
from realengine.stored_weight import FP8_BLOCK, Fp8Weight
from serving.deployments.model_spec import ModelSpec

_BLOCK = (FP8_BLOCK, FP8_BLOCK)
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "activation_scale")


def read(tensors: CheckpointTensors, config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Read the weights of an FP8 checkpoint, with scales as `[out, 1]` float32.

    Blocks are rounded anew, to the range that the largest number of a channel allows. Experts keep blocks of 128 x 128,
    which their GEMM has, or rows of such blocks if the outputs fill no block. Raises UserError for tensors that are
    missing, of another type or of a shape that no scheme has.
    """
    for part in ("weight_scale", "weight_scale_inv"):
        for module in tensors.modules(part):
            weight = tensors.take(module, "weight", torch.float8_e4m3fn)
            scale = tensors.take(module, part).float()
            outputs, inputs = weight.shape
            rows, columns = config.get("weight_block_size") or _BLOCK
            if scale.numel() in (1, outputs):
                scale = scale.reshape(-1, 1).expand(outputs, 1)
            elif scale.shape != (-(-outputs // rows), -(-inputs // columns)):
                raise tensors.fault(
                    f"{module}.{part} has shape {tuple(scale.shape)}, which fits no way to scale weights"
                )
            elif ".experts." in module and (rows, columns) == _BLOCK:
                if outputs % rows:
                    scale = scale.repeat_interleave(rows, 0)[:outputs]
            else:
                wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
                weight, scale = quantised(weight.float() * wide)
            tensors.state[f"{module}.weight"] = Fp8Weight(weight, scale.contiguous())
    for part in _OF_ACTIVATIONS:
        for module in tensors.modules(part):
            tensors.drop(module, part)
