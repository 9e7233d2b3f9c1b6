"""Beam search: the likeliest answers to a prompt, by requests of one token each, as in vLLM's server.

Each beam is a request whose prompt is the prompt and the beam so far; its KV is in the prefix cache, except for the
last block. A step asks for twice as many alternatives as there are beams, and keeps the likeliest continuations.
Probabilities are the model's own, before penalties and temperature. An ended beam has the score of its logprob divided
by its length to the power of `length_penalty`; as in vLLM, the length includes the prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tokentwin.apiserver.messages import Output
from tokentwin.apiserver.openai_api.protocol import MOST_LOGPROBS, ChatRequest, CompletionRequest
from tokentwin.apiserver.openai_api.refusal import Refusal
from tokentwin.realengine.logit_rules import Logprob

Ask = Callable[[Sequence[list[int]]], Awaitable[list[Output]]]
"""It returns the outputs to several prompts, each with one token and its logprob with alternatives."""

_UNUSED = (
    *("stop", "stop_token_ids", "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "prompt_logprobs", "kv_transfer_params"),
)


def check_beams(body: CompletionRequest | ChatRequest) -> None:
    """Raise Refusal if `body` has a field that beam search cannot follow."""
    if not body.use_beam_search:
        if body.length_penalty != 1:
            raise Refusal(400, "length_penalty is for use_beam_search; leave it out", "length_penalty")
        return
    if body.stream:
        raise Refusal(400, "beam search has no streams; set stream to false", "stream")
    if 2 * (body.n or 1) > MOST_LOGPROBS:
        raise Refusal(400, f"n must be at most {MOST_LOGPROBS // 2} with use_beam_search", "n")
    wrong = [name for name in _UNUSED if getattr(body, name)]
    if body.repetition_penalty not in (None, 1):
        wrong.append("repetition_penalty")
    if body.constraint:
        wrong.append("tool_choice" if getattr(body, "calls", None) else "response_format")
    if body.drawn > (body.n or 1):
        wrong.append("best_of")
    if body.prompt_alternatives is not None:
        wrong.append("echo")  # with logprobs
    if wrong:
        raise Refusal(400, f"{wrong[0]} cannot be combined with use_beam_search; leave it out", wrong[0])


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens of an answer and their logprobs. `total` is the sum of all logprobs, also that of the end token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    total: float = 0.0
    finish: str = ""

    def followed(self, token: int, logprob: Logprob, finish: str = "") -> Beam:
        """Return the beam with one more token."""
        return Beam([*self.tokens, token], [*self.logprobs, logprob], self.total + logprob.logprob, finish)


async def beam_search(
    ask: Ask, prompt: list[int], width: int, most: int, end: int | None, penalty: float, keeps_end: bool
) -> list[Beam]:
    """Return the `width` best answers of up to `most` tokens, the best one first.

    Token `end` ends an answer, which has it only if it `keeps_end`; None: no token does. If the server aborts a
    request, the search ends with the beams so far.
    """
    beams, ended = [Beam()], list[Beam]()
    for _ in range(most):
        outputs = await ask([prompt + beam.tokens for beam in beams])
        if any(output.finish == "abort" for output in outputs):
            beams = [Beam(beam.tokens, beam.logprobs, beam.total, "abort") for beam in beams]
            break
        longer: list[Beam] = []
        for beam, output in zip(beams, outputs, strict=True):
            for token, logprob in _candidates(output).items():
                if token != end:
                    longer.append(beam.followed(token, logprob))
                    continue
                with_end = beam.followed(token, logprob, "stop")
                ended.append(with_end if keeps_end else Beam(beam.tokens, beam.logprobs, with_end.total, "stop"))
        beams = sorted(longer, key=lambda beam: -beam.total)[:width]
    of_prompt = len(prompt)

    def score(beam: Beam) -> float:
        return beam.total / max(of_prompt + len(beam.tokens) - (beam.tokens[-1:] == [end]), 1) ** penalty

    whole = [beam if beam.finish else Beam(beam.tokens, beam.logprobs, beam.total, "length") for beam in beams]
    return sorted([*ended, *whole], key=score, reverse=True)[:width]


def _candidates(output: Output) -> dict[int, Logprob]:
    """Return the tokens that may follow: the drawn token and the likeliest ones, each with its logprob."""
    assert output.logprobs is not None
    token, drawn = output.tokens[0], output.logprobs[0]
    others = {other: Logprob(logprob, drawn.top) for other, logprob in drawn.top}
    return {token: drawn, **others}
