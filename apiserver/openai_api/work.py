"""The work that one request may imply: one budget, in tokens, for the product of all its factors.

It counts what each answer reads and writes: tokens, logprobs, and the bytes of its constraint. A request at the limit
takes some seconds of one core and some hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokentwin.apiserver.messages import Add, encode
from tokentwin.apiserver.openai_api.protocol import ChatRequest, CompletionRequest
from tokentwin.apiserver.openai_api.refusal import Refusal

BUDGET = 1 << 23
_ANSWER = 1 << 10  # what an answer costs beside its tokens
_LOGPROB = 8  # what a logprob costs: it is written with the text and the rank of its token
_BYTES = 4  # bytes of a grammar and rules that cost as much as a token: each answer carries them
_NUMBERS = 4  # numbers of an embedding that cost as much as a token


def check_answers(answers: int, most: int, field: str) -> None:
    """Raise Refusal if the answers are too many, before prompts are tokenised; an engine makes `most` at a time."""
    most = min(most, BUDGET // _ANSWER)
    if answers > most:
        what = f"{answers} answers are more than {most} and too much for one request"
        raise Refusal(400, f"{field}: {what}; send several requests", field)


def check_work(body: CompletionRequest | ChatRequest, asked: Sequence[Add]) -> None:
    """Raise Refusal if `asked`, the messages for the prompts of `body`, imply more work than one request may.

    The messages have the same grammar and rules. An answer whose length the client does not state becomes at most as
    long as the budget allows.
    """
    answers, read, written, logprobs = 0, 0, 0, 0
    carried = len(encode((asked[0].grammar, asked[0].rules)))
    each = _ANSWER + carried // _BYTES
    for one in asked:
        drawn, prompt, tokens = body.drawn, len(one.prompt), one.max_tokens
        repeated = prompt if body.return_token_ids or body.echo else 0
        of_prompt = 0 if one.prompt_logprobs is None else prompt * (1 + one.prompt_logprobs)
        of_token = 0 if one.logprobs is None else 1 + one.logprobs
        if one.open_ended:
            left = BUDGET // drawn - each - prompt - repeated - _LOGPROB * of_prompt
            tokens = one.max_tokens = max(min(tokens, left // (1 + _LOGPROB * of_token)), one.min_tokens, 1)
        answers += drawn
        read += drawn * prompt
        written += drawn * (tokens + repeated)
        logprobs += drawn * (of_prompt + of_token * tokens)
    if each * answers + read + written + _LOGPROB * logprobs > BUDGET:
        field = _factor(body, asked, _LOGPROB * logprobs > read + written)
        what = f"{answers} answers that read {read} tokens and write {written} tokens and {logprobs} logprobs"
        what += f", each with {carried} bytes of grammar and rules,"
        raise Refusal(400, f"{field}: {what} are too much for one request; lower it, or send several requests", field)


def check_vectors(asked: Sequence[Add], size: int) -> None:
    """Raise Refusal if the vectors of `size` numbers for `asked` are more work than one request may be."""
    read = sum(len(one.prompt) for one in asked)
    if len(asked) * (_ANSWER + size // _NUMBERS) + read > BUDGET:
        what = f"{len(asked)} vectors of {size} numbers for {read} tokens are too much for one request"
        raise Refusal(400, f"input: {what}; send several requests", "input")


def _factor(body: CompletionRequest | ChatRequest, asked: Sequence[Add], logprobs: bool) -> str:
    """Return the field to lower: the number of answers, else that of `logprobs`, prompts or tokens."""
    if body.drawn > 1:
        return body.drawn_by
    if logprobs:
        of_prompt = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        return "top_logprobs" if isinstance(body, ChatRequest) and body.prompt_logprobs is None else of_prompt
    return "prompt" if len(asked) > 1 else "max_tokens"
