"""Structured output's mask: the logits of tokens that may not come next become -inf, in place, in one launch."""

from collections.abc import Iterator
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import I32, shaped
from realengine.kernels.specialisation import Specialisation

_BLOCK = 1024  # tokens of a program: it reads 32 words of the mask and writes only forbidden logits


@triton.jit
def _token_mask(logits, stride, samples, bits, words, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    sample = tl.load(samples + row).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    word = tl.load(bits + row.to(tl.int64) * words + tokens // 32, mask=inside, other=-1)
    forbidden = (word >> (tokens % 32)) & 1 == 0
    tl.store(logits + sample * stride + tokens, float("-inf"), mask=inside & forbidden)


def token_mask(logits: Tensor, samples: Tensor, bits: Tensor) -> None:
    """Forbid tokens in row `samples[i]` of `logits` [S, V] unless bit t % 32 of `bits[i, t // 32]` allows token t.

    `samples` is int32 [M], `bits` int32 [M, W].
    """
    rows, words = bits.shape
    vocab = logits.shape[1]
    grid = (rows, triton.cdiv(vocab, _BLOCK))
    _token_mask[grid](logits, logits.stride(0), samples, bits, words, vocab, _BLOCK, num_warps=4, num_stages=1)


def specialisations() -> Iterator[Specialisation]:
    launch = partial(token_mask, shaped(1, 151_936), shaped(1, dtype=I32), shaped(1, 4748, dtype=I32))
    yield Specialisation("token_mask bf16", _token_mask, launch, 64, ("st.global",))
