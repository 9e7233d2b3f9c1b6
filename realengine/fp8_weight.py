"""Weights in FP8 (e4m3) and the scales that give them back: one for each output channel, or for blocks of 128 x 128."""

from __future__ import annotations

from typing import NamedTuple

import torch

FP8_BLOCK = 128


class Fp8Weight(NamedTuple):
    """The weights of one linear layer, or of several that share their input.

    values  [out, in] e4m3
    scale   [out / n, groups] float32: n outputs share one, and all inputs, or groups of 128
    """

    values: torch.Tensor
    scale: torch.Tensor

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]`: what the numbers stand for, computed in float32 and rounded once."""
        outputs, inputs = self.values.shape
        scale = self.scale.repeat_interleave(outputs // len(self.scale), dim=0)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(FP8_BLOCK, dim=1)[:, :inputs]
        return (self.values.float() * scale).to(dtype)
