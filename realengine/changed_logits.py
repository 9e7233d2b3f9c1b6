"""Logits changed by requests' rules: see `realengine.logit_rules`. Nothing waits for the device."""

from __future__ import annotations

import torch

from realengine.logit_rules import StepChanges


def changed_logits(logits: torch.Tensor, changes: StepChanges, last_tokens: torch.Tensor) -> torch.Tensor:
    """Return `logits` `[S, vocab]` in float32 with `changes`.

    `last_tokens` `[S]` are the last sampled tokens of each sample's request. If every token would be forbidden, none
    is.
    """
    on_device = [torch.from_numpy(part).to(logits.device) for part in changes]
    samples, numbers, unseen, limited, prompt, outputs, bias, biases, banned, allowed = on_device
    samples = samples.long()
    presence, frequency, repetition, floor = numbers.unsqueeze(2).unbind(1)
    last = last_tokens[samples].long()
    whole = logits.float()
    ruled = whole[samples]

    counts = torch.zeros_like(ruled)
    _add(counts, outputs[:, 0], outputs[:, 1], outputs[:, 2].float())
    counts.scatter_add_(1, last.unsqueeze(1), unseen.float().unsqueeze(1))
    seen = counts.clone()
    _add(seen, prompt[:, 0], prompt[:, 1], torch.ones_like(prompt[:, 0], dtype=torch.float32))

    _add(ruled, bias[:, 0], bias[:, 1], biases)
    repeated = torch.where(ruled > 0, ruled / repetition, ruled * repetition)
    ruled = torch.where(seen > 0, repeated, ruled)
    ruled -= frequency * counts
    ruled -= presence * (counts > 0)

    forbidden = torch.zeros_like(ruled)
    number, token, after = banned.unbind(1)
    _add(forbidden, number, token, ((after < 0) | (after == last[number.long()])).float())
    only = torch.zeros_like(ruled)
    _add(only, allowed[:, 0], allowed[:, 1], torch.ones_like(allowed[:, 0], dtype=torch.float32))
    left = ruled.masked_fill((forbidden > 0) | (limited.unsqueeze(1) & (only == 0)), -torch.inf)
    left = left.masked_fill(left < left.amax(1, keepdim=True) + floor, -torch.inf)
    nothing = (left == -torch.inf).all(1, keepdim=True)
    whole = whole.clone() if whole is logits else whole
    whole[samples] = torch.where(nothing, ruled, left)
    return whole


def _add(to: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, numbers: torch.Tensor) -> None:
    to.index_put_((rows.long(), tokens.long()), numbers, accumulate=True)
