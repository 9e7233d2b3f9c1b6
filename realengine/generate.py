"""The engine's answer to a chat, as a stream of text pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokentwin.realengine.engine import Engine
from tokentwin.realengine.sampling import SamplingParams
from tokentwin.realengine.tokenizer import Detokenizer, Tokenizer
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Status
from tokentwin.serving.workload import WorkloadRequest


def stream(
    engine: Engine,
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
    sampling: SamplingParams,
    stop: Sequence[str] = (),
    grammar: str = "",
) -> Iterator[str]:
    """Yield pieces of the assistant's answer to `messages`, each `{"role": ..., "content": ...}`.

    If a `grammar` is given, as `tokentwin.realengine.grammar` writes it, the answer follows it. The answer ends at the
    model's end-of-sequence token, at a stop string, or after `max_tokens`. Raises UserError if the model has no
    tokenizer or the prompt does not fit.
    """
    if engine.folder is None:
        remedy = "has random weights, so it cannot answer a prompt; use smollm2 or a model folder"
        raise UserError("model", engine.source, remedy)
    tokenizer = Tokenizer(engine.folder)
    prompt = tokenizer.chat(messages)
    ready: list[str] = []
    detokenizer = Detokenizer(tokenizer.decode, stop)

    def take(token: int, logprob: float | None) -> bool:
        if token not in engine.spec.eos_ids:
            ready.append(detokenizer.push(token))
        return detokenizer.stopped

    request = engine.add(
        WorkloadRequest(0, 0, (("", len(prompt)),), max_tokens, structured=bool(grammar)),
        prompt,
        sampling=sampling,
        stop_ids=engine.spec.eos_ids,
        on_token=take,
        grammar=grammar,
    )
    if request.status is Status.REJECTED:
        raise UserError("prompt", f"{len(prompt)} tokens", request.reason)
    try:
        while not request.ended:
            engine.step()
            yield "".join(ready)
            ready.clear()
        yield detokenizer.finish()
    finally:
        engine.abort(request.id)
