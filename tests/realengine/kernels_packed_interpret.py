"""The GEMM with packed weights in Triton's interpreter, against float64; `interpreted.py` runs these checks."""

import torch

from tests.realengine.kernels_fused_interpret import BF16, F16, F32, close
from tokentwin.realengine.kernels.packed_gemm import kernel_weight, packed_gemm, unpacked
from tokentwin.realengine.models.linear import PackedWeight, pack


def packed() -> None:
    """Both widths, with zero points and without, groups of every kind, inputs that fill no step, and splits."""
    draw = torch.Generator().manual_seed(0)
    for tokens, outputs, inputs, bits, group, zeros, splits, dtype, scaled in [
        (1, 64, 256, 4, 128, False, 1, F32, F32),
        (3, 100, 576, 4, 128, True, 2, F32, F16),  # a last group of 64, rows that fill no tile
        (17, 40, 96, 4, 48, True, 1, F32, F32),  # groups that end within a step
        (2, 72, 512, 4, 512, False, 4, F16, F16),
        (2, 32, 48, 4, 16, True, 1, BF16, BF16),
        (5, 130, 200, 8, 200, False, 1, F32, F32),
        (33, 64, 192, 8, 32, True, 3, F16, F32),
    ]:
        groups = -(-inputs // group)
        integers = torch.randint(0, 2**bits, (outputs, inputs), generator=draw, dtype=torch.uint8)
        scale = (torch.rand(outputs, groups, generator=draw) + 0.5).to(scaled)
        zero = torch.randint(0, 2**bits, (outputs, groups), generator=draw).to(torch.uint8) if zeros else None
        if zeros and bits == 4:
            zero[0, 0] = 16  # which GPTQ can store
        x = torch.randn(tokens, inputs, generator=draw).to(dtype)
        group_of = torch.arange(inputs) // group
        middle = torch.full_like(scale, 2.0 ** (bits - 1)).double() if zero is None else zero.double()
        dense = (integers.double() - middle[:, group_of]) * scale.double()[:, group_of]
        weight = kernel_weight(PackedWeight(pack(integers, bits), scale, zero, bits, group))
        arrived = torch.zeros(9, dtype=torch.int32)
        for _ in range(min(splits, 2)):  # the counters of the programs that have ended are zero again
            out = packed_gemm(x, weight, splits, arrived)
            close(out, x.double() @ dense.T, dtype, f"{bits} bits, groups of {group}, {splits} splits, {dtype}")
        assert not arrived.any()
        close(unpacked(weight, dtype), dense, dtype, f"unpacked {bits} bits, groups of {group}, {dtype}")


CHECKS = (packed,)
