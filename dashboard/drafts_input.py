"""The input of drafts (speculative decoding) of an engine, as widgets whose values live in the URL."""

from __future__ import annotations

import re
from typing import Any

from tokentwin.dashboard.url import amount, choose, number, text
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.errors import UserError

_METHODS = {"": "none", "mtp": "MTP", "eagle": "EAGLE", "ngram": "n-gram", "draft_model": "a draft model"}
_METHOD = "The method that proposes draft tokens, which a step verifies. MTP: the model's own layer."
_ACCEPTED = "The probability that a draft token is accepted, if all before it were."
_PASS = "Time of a drafting pass, in per cent of the step before it."
_BY_SIZE = (
    "Ranges of requests in a step with their number of draft tokens, as vLLM's "
    "num_speculative_tokens_per_batch_size. Larger steps draft as the last range. Empty: always the same number."
)
_RANGE = re.compile(r"(\d{1,6})-(\d{1,6}): *(\d{1,2})")


def drafts_input(prefix: str = "") -> dict[str, Any] | None:
    """Draw the input, and return the fields of `scheduler.speculative`; None for no drafts.

    The names of the URL's parameters begin with `prefix`. Raises UserError for wrong ranges of batch sizes.
    """
    method = choose("Drafts", list(_METHODS), f"{prefix}drafts", _METHODS.__getitem__, _METHOD)
    if not method:
        return None
    drafts: dict[str, Any] = {"method": method}
    if method == "draft_model":
        drafts["model"] = choose("Draft model", sorted(models()), f"{prefix}draft_model")
    drafts["num_speculative_tokens"] = number("Draft tokens", f"{prefix}draft_tokens", 1, 64, 3)
    drafts["acceptance_rate"] = amount("Accepted (%)", f"{prefix}accepted", 0, 100, 70, 5, help=_ACCEPTED) / 100
    if method in ("eagle", "ngram"):
        drafts["draft_step_share"] = amount("Pass (% of a step)", f"{prefix}pass", 0, 1000, 5, 1, help=_PASS) / 100
    typed = text("Draft tokens by batch size", f"{prefix}by_size", placeholder="1-16: 3, 17-64: 1", help=_BY_SIZE)
    if typed:
        drafts["num_speculative_tokens_per_batch_size"] = _ranges(typed)
    return drafts


def _ranges(typed: str) -> list[list[int]]:
    found = [_RANGE.fullmatch(part.strip()) for part in typed.split(",")]
    if not all(found):
        raise UserError("Draft tokens by batch size", typed, "must be ranges such as 1-16: 3, 17-64: 1")
    return [[int(number) for number in match.groups()] for match in found if match]
