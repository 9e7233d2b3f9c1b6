"""Structured output's mask: the logits of tokens that may not come next become -inf, in place, in one launch."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import TRITON_NAME

if TYPE_CHECKING:
    from realengine.kernels.aot import Specialisation

_BLOCK = 1024  # tokens of a program: it reads 32 words of the mask and writes only what is forbidden


@triton.jit
def _token_mask(logits, stride, samples, bits, words, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    sample = tl.load(samples + row).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tokens < vocab
    word = tl.load(bits + row.to(tl.int64) * words + tokens // 32, mask=held, other=-1)
    forbidden = (word >> (tokens % 32)) & 1 == 0
    tl.store(logits + sample * stride + tokens, float("-inf"), mask=held & forbidden)


def token_mask(logits: Tensor, samples: Tensor, bits: Tensor) -> None:
    """Leave of row `samples[i]` of `logits` [S, V] what bit t % 32 of `bits[i, t // 32]` allows; int32 [M], [M, W]."""
    rows, words = bits.shape
    vocab = logits.shape[1]
    constexprs = _compiled_in()
    grid = (rows, triton.cdiv(vocab, constexprs["BLOCK"]))
    _token_mask[grid](logits, logits.stride(0), samples, bits, words, vocab, **constexprs)


def _compiled_in() -> dict[str, Any]:
    """All of a launch that is compiled into its kernel."""
    return {"BLOCK": _BLOCK, "num_warps": 4, "num_stages": 1}


def specialisations() -> list["Specialisation"]:
    """How `token_mask` launches its kernel."""
    from realengine.kernels.aot import Specialisation

    constexprs = _compiled_in()
    stored = "*" + TRITON_NAME[torch.bfloat16]
    return [
        Specialisation(
            name=f"token_mask {TRITON_NAME[torch.bfloat16]}",
            kernel=_token_mask,
            signature={
                "logits": stored,
                "stride": "i32",
                "samples": "*i32",
                "bits": "*i32",
                "words": "i32",
                "vocab": "i32",
            },
            num_warps=constexprs.pop("num_warps"),
            num_stages=constexprs.pop("num_stages"),
            constexprs=constexprs,
            register_ceiling=64,
            expects=("st.global",),
        )
    ]
