"""Structured output: the tokens that may come next so that an answer follows a JSON schema or a regular expression.

The package llguidance does the work. A grammar reads the sampled tokens of its request one by one, and gives the tokens
that may come next as a mask of the vocabulary. When the answer is complete, only end-of-sequence tokens may follow.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.serving.errors import UserError, one_line

_SHOWN = 80  # maximum number of characters of a request that an error shows
ANY_OBJECT: dict[str, Any] = {"type": "object"}
ENDLESS_OBJECTS: dict[str, Any] = {"type": "array", "items": ANY_OBJECT, "minItems": 10**9}
"""A schema that no answer completes, for a replay in which the length of the answer is fixed."""

Bits = NDArray[np.int32]


class Grammar:
    """The grammar of one answer, and its state after the tokens so far."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, vocab_size: int) -> Bits:
        """Return the mask `[ceil(vocab_size / 32)]`.

        Bit t % 32 of number t // 32 says whether token t may come next.
        """
        bits: Bits = np.empty(-(-vocab_size // 32), dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits

    def take(self, token: int) -> bool:
        """Advance by `token`, which the mask allowed; return whether the answer is complete.

        Nothing may follow a complete answer.
        """
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())

    @property
    def failed(self) -> bool:
        """Whether the grammar gave up: a mask or a token took more work than llguidance allows.

        From then on it allows only the end of the answer.
        """
        return bool(self._matcher.is_error())

    def advance(self, tokens: list[int]) -> int:
        """Advance by as many of `tokens` as the grammar allows, and return their number; `take_back` undoes this."""
        return int(self._matcher.try_consume_tokens(tokens))

    def take_back(self, tokens: int) -> None:
        """Undo the last `tokens` tokens."""
        self._matcher.rollback(tokens)


def json_grammar(schema: dict[str, Any]) -> str:
    """Return, in llguidance's notation, the grammar of JSON answers that follow `schema`.

    It allows no white space that JSON does not need, because a model could write white space for ever. Raises UserError
    for a schema that it cannot express.
    """
    given = json.dumps(schema)
    try:
        written = library().LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False})
    except ValueError:  # a number of hundreds of digits
        raise _refused("json_schema", given, "has a value that no grammar can express") from None
    return _valid("json_schema", given, written)


def regex_grammar(pattern: str) -> str:
    """Return the grammar of answers that match `pattern` as a whole; raise UserError for an invalid pattern."""
    return _valid("regex", pattern, library().LLMatcher.grammar_from_regex(pattern))


def grammar_of_rules(rules: str) -> str:
    """Return the grammar that is written as `rules`, in GBNF (`root ::= ...`) or in Lark's notation.

    Raises UserError for rules that are not valid.
    """
    library()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        written = library().LLMatcher.grammar_from_lark(any_to_lark(rules))
    except Exception as error:  # the converter raises what its parser meets
        raise _refused("grammar", rules, f"is not valid: {one_line(str(error))}") from None
    return _valid("grammar", rules, written)


def _valid(field: str, given: str, written: str) -> str:
    if wrong := library().LLMatcher.validate_grammar(written):
        reasons = [line.removeprefix("error: ") for line in wrong.splitlines() if line.startswith("error: ")]
        raise _refused(field, given, f"cannot be kept to: {(reasons or wrong.splitlines())[0]}")
    return str(written)


def _refused(field: str, given: str, remedy: str) -> UserError:
    return UserError(field, given if len(given) <= _SHOWN else f"{given[:_SHOWN]}...", remedy)


def library() -> Any:
    """Return the package llguidance; raise UserError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UserError("structured output", "asked for", "needs llguidance: pip install 'tokentwin[engine]'") from None
    return llguidance
