"""The fused and sampling kernels in Triton's interpreter, against float64; `interpreted.py` runs these checks."""

import torch
from torch import Tensor

from lab.gpu_suite.references import distance_from_draw, normalised
from tokentwin.realengine.kernels.rope_store import rope_store
from tokentwin.realengine.kernels.row_operations import add_rms_norm, silu_mul
from tokentwin.realengine.kernels.sampling import argmax, draw, token_mask
from tokentwin.realengine.models.linear import round_to_fp8

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Limits of the error, in norm and at worst. The interpreter truncates to bf16, where a GPU rounds.
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1e-2, FP8: 0.04}


def close(out: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """`out` is as near to `expected` as its dtype allows, in norm and at each element."""
    error = out.double() - expected
    relative, worst = float(error.norm() / expected.norm()), float(error.abs().max() / expected.abs().max())
    print(f"{what}: {relative:.1e} of the norm, {worst:.1e} of the largest at worst")
    assert max(relative, worst) <= TOLERANCE[dtype], what


def norms() -> None:
    """Sizes that are powers of two and others, with a residual and without."""
    torch.manual_seed(0)
    for tokens, size, dtype, add in [
        (3, 576, F32, True), (2, 64, F16, False), (1, 96, BF16, True), (5, 1000, BF16, False), (2, 8192, F16, True),
    ]:  # fmt: skip
        x, residual = (torch.randn(2, tokens, size) * 3).to(dtype)
        weight = torch.randn(size).to(dtype)
        summed = (residual.float() + x.float()).to(dtype) if add else x
        out, _ = add_rms_norm(x, residual if add else None, weight, 1e-5)
        close(out, normalised(summed.double(), weight.double(), 1e-5), dtype, f"norm {size} {dtype} {add}")
        if add:
            close(residual, summed.double(), dtype, "residual")
            assert torch.equal(residual, summed) or dtype == BF16


def silu() -> None:
    torch.manual_seed(0)
    for tokens, size, dtype in [(3, 1536, F32), (2, 48, F16), (2, 1100, BF16)]:
        gate_up = (torch.randn(tokens, 2 * size) * 4).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=1)
        close(silu_mul(gate_up)[0], gate / (1 + (-gate).exp()) * up, dtype, f"silu {size} {dtype}")


def mask() -> None:
    """A vocabulary that fills no block and no word; rows without a mask keep every bit."""
    torch.manual_seed(0)
    for vocab, dtype in [(2077, BF16), (96, F32)]:
        logits = torch.randn(5, vocab + 3).to(dtype)[:, :vocab]  # joined from ranks, it is a view
        before, samples = logits.clone(), torch.tensor([3, 0], dtype=torch.int32)
        bits = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int32)
        token_mask(logits, samples, bits)
        for sample in range(5):
            for token in range(vocab):
                word = int(bits[[3, 0].index(sample), token // 32]) if sample in (3, 0) else -1
                kept = before[sample, token] if word >> token % 32 & 1 else float("-inf")
                assert logits[sample, token] == kept


def to_fp8() -> None:
    """Rows are rounded to e4m3 as in the reference, which does so in a separate pass; rows of zeros are, too."""
    torch.manual_seed(0)
    for tokens, size, dtype in [(3, 576, F32), (2, 96, F16), (2, 1100, F32)]:
        x, residual = (torch.randn(2, tokens, size) * 3).to(dtype)
        x[0] = residual[0] = 0
        weight = torch.randn(size).to(dtype)
        plain, fused = (residual.clone() for _ in range(2))
        pairs = [(add_rms_norm(x, plain, weight, 1e-5)[0], add_rms_norm(x, fused, weight, 1e-5, fp8=True))]
        assert torch.equal(plain, fused)
        gate_up = (torch.randn(tokens, 2 * size) * 4).to(dtype)
        gate_up[0] = 0
        pairs.append((silu_mul(gate_up)[0], silu_mul(gate_up, fp8=True)))
        for made, (rows, scale) in pairs:
            wanted, wanted_scale = round_to_fp8(made)
            assert torch.equal(scale, wanted_scale)
            # The interpreter loses the carry of what rounds up to a power of two, and truncates the smallest numbers.
            exact = made.float() / scale
            off, small = (rows.float() - wanted.float()).abs(), exact.abs() < 2**-6
            assert (off[small] <= 2**-7).all()
            assert (off[~small & (exact.frexp().mantissa.abs() < 15.5 / 16)] == 0).all()


def rope() -> None:
    """Both pairings, with head norms and without, into caches of every dtype; nothing but the slots is written."""
    torch.manual_seed(0)
    for heads, kv_heads, dim, page, dtype, cached, norm, interleaved, scale in [
        (9, 3, 64, 16, F32, F32, False, True, 1.0),
        (4, 2, 128, 16, F32, F32, True, False, 1.0),
        (14, 2, 96, 32, F16, F16, True, True, 0.5),
        (28, 4, 64, 16, BF16, BF16, False, False, 1.0),
        (4, 1, 96, 16, BF16, FP8, True, False, 0.25),
        (2, 2, 64, 16, F32, FP8, False, True, 2.0),
    ]:
        slots = torch.tensor([0, 0, page - 1, 2 * page + 3, page, 3 * page + 1])
        tokens = len(slots)
        qkv = (torch.randn(tokens, (heads + 2 * kv_heads) * dim) * 2).to(dtype)
        if cached == FP8:
            qkv[2, -1], qkv[3, -2] = 3000, -3000  # more than it holds
        qkv[1] = qkv[0]  # of padding tokens either may be the last to write
        positions = torch.tensor([0, 0, 5, 31, 7, 1], dtype=torch.int32)
        angles = torch.rand(32, dim // 2) * 6
        weights = torch.randn(2, dim).to(dtype) if norm else [None, None]
        caches = torch.full((2, 4, kv_heads, page, dim), float("nan")).to(cached)
        queries = rope_store(
            qkv, positions, slots.int(), angles.cos(), angles.sin(), *weights, 1e-5, interleaved, *caches, scale, scale
        )

        split = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        turn = torch.polar(torch.ones(()).double(), angles.double())[positions][:, None]
        for which, (part, weight) in enumerate(zip(split, [*weights, None], strict=True)):
            expected = part if weight is None else normalised(part, weight.double(), 1e-5)
            if which < 2:
                pairs = expected.unflatten(-1, (-1, 2) if interleaved else (2, -1))
                pairs = pairs if interleaved else pairs.transpose(-1, -2)
                turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
                expected = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
            if which == 0:
                close(queries, expected, dtype, f"queries {dim} {dtype} norm {norm} interleaved {interleaved}")
            else:
                cache = caches[which - 1].to(F32)
                stored = cache[slots // page, :, slots % page] * scale
                if cached == FP8:
                    expected = expected.clamp(-448 * scale, 448 * scale)
                    # The interpreter loses the carry of what rounds up to a power of two: 1.99 becomes 1.
                    expected = torch.where((expected / scale).frexp().mantissa.abs() < 15.5 / 16, expected, stored)
                close(stored, expected, cached, f"cached {which} {cached}")
                written = ~cache.isnan().any(-1).any(1)
                assert set(written.flatten().nonzero().flatten().tolist()) == set(slots.tolist())


def greedy() -> None:
    """One split and many; the first of equal logits is taken; minus infinity marks forbidden tokens."""
    torch.manual_seed(0)
    for rows, vocab, dtype in [(1, 9000, F32), (3, 5000, F16), (2, 2048, BF16), (2, 50, F32)]:
        logits = torch.randn(rows, vocab + 16).to(dtype)[:, :vocab]
        logits[0, -1] = logits[0, vocab // 2] = 9.0
        logits[-1, : vocab // 3] = -torch.inf
        out = torch.full((rows,), -1, dtype=torch.int32)
        expected = [row.tolist().index(row.max()) for row in logits.double()]
        assert argmax(logits, out).tolist() == expected
    flat = torch.full((1, 5000), -torch.inf)
    assert argmax(flat, torch.full((1,), -1, dtype=torch.int32)).tolist() == [0]


def drawn(logits: Tensor, rows: list[tuple[float, int, float, float]]) -> list[int]:
    """Return a token for each of `rows`, which have temperature, top-k, top-p and a uniform number."""
    out = torch.full((len(rows),), -1, dtype=torch.int32)
    heat, k, p, u = (torch.tensor(column) for column in zip(*rows, strict=True))
    tokens = draw(logits, heat, k.int(), p, u, out).tolist()
    for row, how, token in zip(logits, rows, tokens, strict=True):
        assert distance_from_draw(row, how, token) <= 1e-4, (row.dtype, len(row), how, token)
    return tokens


def limits() -> None:
    """Every combination of limits, over rows in which limits keep few tokens, keep impossible ones, or do nothing."""
    torch.manual_seed(0)
    rows = [
        (0.0, 5, 0.5, 0.9), (1.0, 0, 1.0, 0.5), (0.7, 1, 1.0, 0.999), (1.3, 50, 1.0, 0.25), (1.0, 0, 0.9, 0.75),
        (0.8, 40, 0.95, 0.0), (2.0, 0, 1e-6, 0.99), (1.0, 4000, 0.5, 0.3), (1.0, 30_000, 0.99, 0.9999999),
    ]  # fmt: skip
    for vocab, spread, dtype in [(4200, 3.0, F32), (8501, 0.1, BF16), (300, 2.0, F16)]:
        logits = (torch.randn(len(rows), vocab) * spread).to(dtype)
        logits[:, vocab // 7 : vocab // 5] = -torch.inf
        drawn(logits, rows)


def shares() -> None:
    """Tokens are drawn in proportion: over evenly spaced numbers, each is found as often as its probability says."""
    probabilities = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
    logits = probabilities.log().repeat(10, 1)
    uniform = [(index + 0.5) / 10 for index in range(10)]
    tokens = drawn(logits, [(1.0, 0, 1.0, u) for u in uniform])
    assert [tokens.count(token) for token in range(5)] == [1, 0, 4, 2, 3]
    tokens = drawn(logits[:5], [(1.0, 2, 1.0, u) for u in uniform[::2]])
    assert {token: tokens.count(token) for token in set(tokens)} == {2: 3, 4: 2}
    tokens = drawn(logits[:5], [(1.0, 3, 0.4, u) for u in uniform[::2]])  # of 4, 3 and 2 ninths, the first reach 0.4
    assert set(tokens) == {2}


def ties() -> None:
    """All tokens that tie with the last kept one are kept; zeros of either sign tie."""
    flat = torch.zeros(4, 5000)
    assert drawn(flat, [(0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.5), (1.0, 3, 0.01, 0.25), (1.0, 0, 0.5, 0.75)])[0] == 0
    for dtype in (F32, F16, BF16):
        few = torch.tensor([-1.0, 2.0, 0.0, 2.0, -0.0, -5.0], dtype=dtype).repeat(4, 1)
        rows = [(1.0, 1, 1.0, 0.99), (1.0, 3, 1.0, 0.999), (1.0, 0, 0.3, 0.4), (1e-4, 0, 0.9, 0.6)]
        assert drawn(few, rows) == [3, 4, 1, 3]
    assert drawn(torch.tensor([[-3.0, -2.0, -7.0]]), [(1.0, 1, 1.0, 0.5)]) == [1]


CHECKS = (norms, silu, to_fp8, mask, rope, greedy, limits, shares, ties)
