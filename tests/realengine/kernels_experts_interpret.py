"""The grouped GEMM of experts in Triton's interpreter, against float64; `interpreted.py` runs these checks."""

import torch
from torch import Tensor

from tests.realengine.kernels_fused_interpret import BF16, F16, F32, FP8, close
from tokentwin.realengine.kernels.router import Rules, route
from tokentwin.realengine.models.layer_ops import Routing
from tokentwin.realengine.models.linear import Fp8Weight, PackedWeight, StoredWeight, pack
from tokentwin.realengine.models.triton_ops import TritonOps
from tokentwin.realengine.models.weights import RANDOM


def layer(kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[StoredWeight, Tensor]:
    """Return random weights stored as `kind` says, and the float64 weights that they stand for, by definition."""
    if kind == "floats":
        weight = torch.randn(outputs, inputs).mul(inputs**-0.5).to(dtype)
        return weight, weight.double()
    if kind.startswith("fp8"):
        values = (torch.randn(outputs, inputs) * 50).to(FP8)
        rows, columns = (128 if outputs % 128 == 0 else 1, 128) if kind == "fp8 by block" else (1, inputs)
        scale = (torch.rand(outputs // rows, -(-inputs // columns)) + 0.5) * inputs**-0.5 / 50
        wide = scale[torch.arange(outputs) // rows][:, torch.arange(inputs) // columns]
        return Fp8Weight(values, scale), values.double() * wide.double()
    bits, group = (8, inputs) if kind == "int8" else (4, 32)
    integers = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scale = ((torch.rand(outputs, -(-inputs // group)) + 0.5) * 4 / 2**bits * inputs**-0.5).to(dtype)
    zero = torch.randint(0, 2**bits, scale.shape, dtype=torch.uint8) if kind == "int4 with zeros" else None
    group_of = torch.arange(inputs) // group
    middle = torch.full_like(scale, 2 ** (bits - 1)) if zero is None else zero
    dense = (integers.double() - middle.double()[:, group_of]) * scale.double()[:, group_of]
    return PackedWeight(pack(integers, bits), scale, zero, bits, group), dense


def experts() -> None:
    """Sizes that no tile divides; experts with no tokens, with many, or of another rank; every way to store weights."""
    torch.manual_seed(0)
    for tokens, topk, count, own, hidden, inner, dtype, kind in [
        (5, 2, 4, range(4), 96, 80, F32, "floats"),
        (1, 3, 8, range(8), 64, 48, BF16, "floats"),
        (150, 2, 3, range(3), 72, 100, F16, "floats"),
        (40, 4, 12, range(3, 6), 64, 64, F32, "floats"),
        (4, 2, 3, range(3), 32, 16, BF16, "floats"),
        (5, 2, 3, range(1, 3), 72, 80, F32, "fp8"),
        (3, 2, 2, range(2), 192, 256, F32, "fp8 by block"),
        (5, 2, 4, range(1, 4), 72, 80, F32, "int4"),
        (33, 2, 2, range(2), 48, 40, F16, "int4 with zeros"),
        (2, 1, 3, range(3), 40, 48, BF16, "int8"),
    ]:
        ops = TritonOps(RANDOM["mixtral"].model_copy(update={"num_experts": count}))
        x = torch.randn(tokens, hidden).to(dtype)
        gate_up, down = ([layer(kind, *shape, dtype) for _ in own] for shape in ((2 * inner, hidden), (hidden, inner)))
        shares, chosen = torch.randn(tokens, count).softmax(-1).topk(topk)
        chosen[:, 0] = own[0]  # two columns may then name it: a choice is what counts
        ordered, choices = chosen.flatten().sort(stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(own.start, own.stop + 1), out_int32=True)
        weights = (ops.expert_weights((stored for stored, _ in layers), len(own), dtype) for layers in (gate_up, down))
        matrices, routing = list(weights), Routing(choices, bounds, shares)
        out = ops.experts(x, *matrices, routing)
        expected = torch.zeros(tokens, hidden, dtype=torch.float64)
        for token in range(tokens):
            for share, expert in zip(shares[token].double(), chosen[token].tolist(), strict=True):
                if expert in own:
                    (_, wide), (_, narrow) = gate_up[expert - own.start], down[expert - own.start]
                    gate, up = (wide @ x[token].double()).chunk(2)
                    expected[token] += share * (narrow @ (gate / (1 + (-gate).exp()) * up))
        close(out, expected, dtype, f"experts {tokens} x {topk} of {count}, {dtype}, {kind}")
        ops.grouped_from = 0  # torch's grouped GEMM, where it can
        if kind == "floats" and len(own) == count and dtype == BF16:
            close(ops.experts(x, *matrices, routing), expected, dtype, f"by grouped_mm, {dtype}")
        else:
            assert torch.equal(ops.experts(x, *matrices, routing), out)


def routes() -> None:
    """Softmax and sigmoid with a bias; every expert's choices in order; a rank with some of the experts; equal scores;
    more choices than a program reads at once."""
    torch.manual_seed(1)
    for tokens, count, topk, own, biased, normed, factor, dtype in [
        (1, 8, 2, range(8), False, True, 1.0, BF16),
        (5, 60, 4, range(60), False, False, 1.0, F32),
        (7, 128, 6, range(32, 64), True, True, 2.5, F32),
        (130, 16, 8, range(4, 16), False, True, 1.0, F16),
    ]:
        logits = (torch.randn(tokens, count) * 2).to(dtype)
        logits[0, 1] = logits[0, 2]
        bias = torch.randn(count) if biased else None
        rules = Rules(topk, normed, factor)
        chosen, shares, choices, offsets = route(logits, bias, rules, own)
        wide = logits.double()
        scores = wide.sigmoid() if biased else wide.softmax(-1)
        ranked = scores + bias if biased else scores
        best = ranked.sort(dim=-1, descending=True, stable=True)
        # where the scores of the last expert and of the next differ by less than float32 knows, either is right
        clear = best.values[:, topk - 1] - best.values[:, topk] > 1e-6
        assert torch.equal(chosen[clear].sort(-1).values, best.indices[clear, :topk].sort(-1).values.int())
        wanted = scores.gather(1, chosen.long())
        wanted = factor * (wanted / wanted.sum(-1, keepdim=True) if normed else wanted)
        close(shares, wanted, F32, f"shares of {tokens} x {topk} of {count}")
        ordered, places = chosen.flatten().sort(stable=True)
        assert torch.equal(choices, places)
        bounds = torch.searchsorted(ordered, torch.arange(own.start, own.stop + 1), out_int32=True)
        assert torch.equal(offsets, bounds)


CHECKS = (experts, routes)
