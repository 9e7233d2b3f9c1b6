"""The tensors of one step, made from a plan's rows.

Decode rows come first, padded to a bucket so that step time does not jump with every batch size (CUDA graphs will
need the same); then the prefill chunks, end to end. A padding row is an ordinary row of the dummy request: token 0
at position 0 of the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from serving.decode_buckets import padded
from serving.step_plan import Row


class Span(NamedTuple):
    """The tokens of one row in the step's tensors, and the KV they attend to."""

    first: int  # of the row's tokens in the batch
    tokens: int
    context: int  # tokens of KV after this step's writes
    blocks: torch.Tensor  # [ceil(context / block_size)]
    mask: torch.Tensor | None  # [tokens, context], True where a query may look; None for a single token


class Batch(NamedTuple):
    """One step: `tokens`, `positions` and `slots` are `[T]`; `sampled` indexes the tokens whose logits are wanted.

    `sampled_rows` says which of the plan's rows each of the first `len(sampled_rows)` logits belongs to; logits
    after those belong to padding rows.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: list[Span]
    sampled: torch.Tensor
    sampled_rows: list[int]


def make_batch(rows: Sequence[Row], tokens_of: Sequence[Sequence[int]], block_size: int, device: torch.device) -> Batch:
    """`tokens_of[i]` are the known tokens of `rows[i]`'s request."""
    decode = [i for i, row in enumerate(rows) if row.tokens == 1]
    prefill = [i for i, row in enumerate(rows) if row.tokens > 1]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    sampled: list[int] = []
    sampled_rows: list[int] = []

    def place(index: int) -> None:
        request, start, count, samples = rows[index]
        context = start + count
        blocks = request.blocks[: -(-context // block_size)]
        mask = None
        if count > 1:
            mask = torch.ones(count, context, dtype=torch.bool, device=device).tril(start)
        spans.append(Span(len(tokens), count, context, torch.tensor(blocks, device=device), mask))
        tokens.extend(tokens_of[index][start:context])
        positions.extend(range(start, context))
        slots.extend(blocks[p // block_size] * block_size + p % block_size for p in range(start, context))
        if samples:
            sampled.append(len(tokens) - 1)
            sampled_rows.append(index)

    for index in decode:
        place(index)
    padding = range(len(decode), padded(len(decode)))
    null = torch.zeros(1, dtype=torch.long, device=device)
    for first in padding:
        spans.append(Span(first, 1, 1, null, None))
        tokens.append(0)
        positions.append(0)
        slots.append(0)
    for index in prefill:
        place(index)
    return Batch(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        spans,
        torch.tensor([*sampled, *padding], dtype=torch.long, device=device),
        sampled_rows,
    )
