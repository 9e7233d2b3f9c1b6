"""The routing of tokens to experts in two launches: the choice of each token, then a stable sort by expert.

A program of the first kernel has the scores of one token in registers, and takes the largest k times. A program of the
second has one expert. It counts the choices of lower experts, which gives the place of its first choice, and writes its
own choices in their order. So the sort needs neither atomics nor a histogram, and always gives the same order.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentwin.realengine.kernels.launches import F32, Specialisation, dependent_launch, shaped

_SORT_BLOCK = 1024


class Rules(NamedTuple):
    """How a router chooses and weights experts.

    Attributes:
        topk: number of experts of a token
        normed: True to divide the weights of a token's experts by their sum
        factor: factor of the weights
    """

    topk: int
    normed: bool
    factor: float = 1.0


@triton.jit
def _choose(
    logits, bias, chosen, shares, factor, EXPERTS: tl.constexpr, TOPK: tl.constexpr, BIASED: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    inside = experts < EXPERTS
    logit = tl.load(logits + token * EXPERTS + experts, mask=inside, other=float("-inf")).to(tl.float32)
    if BIASED:
        scores = tl.sigmoid(logit)
        ranked = scores + tl.load(bias + experts, mask=inside, other=0.0)
        ranked = tl.where(inside, ranked, float("-inf"))
    else:
        weights = tl.exp(logit - tl.max(logit, axis=0))
        scores = weights / tl.sum(weights, axis=0)
        ranked = tl.where(inside, scores, -1.0)
    places = tl.arange(0, triton.next_power_of_2(TOPK))
    taken = tl.zeros([triton.next_power_of_2(TOPK)], tl.int32)
    kept = tl.zeros([triton.next_power_of_2(TOPK)], tl.float32)
    for place in tl.static_range(TOPK):
        best = tl.min(tl.where(ranked == tl.max(ranked, axis=0), experts, EXPERTS - 1), axis=0)
        taken = tl.where(places == place, best, taken)
        kept = tl.where(places == place, tl.sum(tl.where(experts == best, scores, 0.0), axis=0), kept)
        ranked = tl.where(experts == best, float("-inf"), ranked)
    if NORMED:
        kept /= tl.sum(kept, axis=0)
    tl.store(chosen + token * TOPK + places, taken, mask=places < TOPK)
    tl.store(shares + token * TOPK + places, kept * factor, mask=places < TOPK)


@triton.jit(do_not_specialize=["count", "first", "own"])
def _sort(chosen, choices, offsets, count, first, own, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write the choices of the program's expert, and its offset if it is one of the `own` experts from `first` on."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, count, BLOCK):
        one = tl.load(chosen + start + lanes, mask=start + lanes < count, other=2147483647)
        before += (one < expert).to(tl.int32)
    begin = tl.sum(before, axis=0)
    place = begin
    for start in tl.range(0, count, BLOCK):
        one = tl.load(chosen + start + lanes, mask=start + lanes < count, other=2147483647)
        mine = (one == expert).to(tl.int32)
        to = place + tl.cumsum(mine, axis=0) - 1
        tl.store(choices + to, (start + lanes).to(tl.int64), mask=mine > 0)
        place += tl.sum(mine, axis=0)
    number = expert - first
    if (number >= 0) & (number < own):
        tl.store(offsets + number, begin)
        if number == own - 1:
            tl.store(offsets + own, place)


def route(logits: Tensor, bias: Tensor | None, rules: Rules, own: range) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the experts [T, k] int32 of each token, their weights [T, k] fp32, `choices` and `offsets`.

    `choices` and `offsets` are those of `Routing`, for the experts `own` of this rank. Of equal scores the lower expert
    comes first.

    Args:
        logits: [T, experts] bf16, fp16 or fp32, contiguous
        bias: [experts] fp32: scores are then sigmoids, and experts are chosen by score plus bias. None: scores are
            softmaxes
    """
    tokens, experts = logits.shape
    device, count = logits.device, tokens * rules.topk
    chosen = torch.empty(tokens, rules.topk, dtype=torch.int32, device=device)
    shares = torch.empty(tokens, rules.topk, dtype=torch.float32, device=device)
    choices = torch.empty(count, dtype=torch.int64, device=device)
    offsets = torch.empty(len(own) + 1, dtype=torch.int32, device=device)
    pdl = dependent_launch(device)
    _choose[(tokens,)](
        logits, logits if bias is None else bias, chosen, shares, rules.factor, experts, rules.topk, bias is not None,
        rules.normed, **pdl, num_warps=1, num_stages=1,
    )  # fmt: skip
    block = min(_SORT_BLOCK, max(triton.next_power_of_2(count), 128))
    _sort[(experts,)](chosen, choices, offsets, count, own.start, len(own), block, **pdl, num_warps=4, num_stages=1)
    return chosen, shares, choices, offsets


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernels of the routers of Mixtral 8x7B, Qwen3-30B-A3B and dots.llm1, for a decode step and a prompt."""
    chosen, sorted_ = [], []
    for model, experts, topk, biased, tokens in [
        ("8x7B", 8, 2, False, 1), ("30B-A3B", 128, 8, False, 1), ("30B-A3B", 128, 8, False, 8192),
        ("dots.llm1", 128, 6, True, 1),
    ]:  # fmt: skip
        bias = shaped(experts, dtype=F32) if biased else None
        logits = shaped(tokens, experts, dtype=F32 if biased else torch.bfloat16)
        launch = partial(route, logits, bias, Rules(topk, True), range(experts))
        if tokens == 1:
            chosen.append(Specialisation(f"choose {model}", _choose, launch, 64, ("griddepcontrol",)))
        name = f"sort_choices {model}, {tokens} tokens"
        sorted_.append(Specialisation(name, _sort, launch, 64, ("griddepcontrol",)))
    yield from (*chosen, *sorted_)
