"""The answer to `POST /v1/embeddings`: for each input a vector of length 1, as vLLM makes it.

The vector is the final hidden state of the input's last token, divided by its length. A twin's vectors mean nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, Literal

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from pydantic import Field, StrictBool

from tokentwin.apiserver.engine_client import Answer
from tokentwin.apiserver.openai_api.delivery import Cut, refusal_for, write_json
from tokentwin.apiserver.openai_api.json_pieces import json_pieces
from tokentwin.apiserver.openai_api.limited import Limited
from tokentwin.apiserver.openai_api.protocol import Prompt
from tokentwin.apiserver.openai_api.refusal import Refusal

Format = Literal["float", "base64"]


class EmbeddingRequest(Limited):
    """The body of `POST /v1/embeddings`, with OpenAI's and vLLM's names."""

    model: str | None = Field(None, max_length=256)
    input: Prompt
    encoding_format: Format = "float"
    dimensions: int | None = Field(None, strict=True, ge=1)
    user: str | None = Field(None, max_length=256)
    priority: int = Field(0, strict=True, gt=-(2**31), lt=2**31)
    add_special_tokens: StrictBool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The texts or lists of token ids; each of them gets a vector."""
        several = isinstance(self.input, list) and not isinstance(next(iter(self.input), None), int)
        return self.input if several else [self.input]  # type: ignore[list-item, return-value]


async def pooled(answer: Answer) -> list[float]:
    """Return the hidden state that ends an answer. Raises Refusal if the engine refuses the request or crashes."""
    state: list[float] | None = None
    async for output in answer:
        if output.finish in ("refused", "crashed"):
            raise refusal_for(output)
        if output.finish == "cut":
            raise Cut
        state = output.pooled
    if state is None:
        raise Refusal(503, "the request was aborted", retry_after_s=1)
    return state


async def write_embeddings(
    request: web.Request,
    answers: Sequence[Answer],
    states: Sequence[Sequence[float]],
    style: Format,
    model: str,
    prompt_tokens: int,
) -> web.StreamResponse:
    """Send the vectors of `states`, in order, as one document."""
    made_ns = monotonic_ns()
    data = (
        {"object": "embedding", "index": index, "embedding": _encoded(_normalised(state), style)}
        for index, state in enumerate(states)
    )
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    document = {"object": "list", "data": data, "model": model, "usage": usage}
    response = await write_json(request, json_pieces(document))
    for answer in answers:
        answer.delivered(made_ns, monotonic_ns(), made_ns)
    return response


def _normalised(state: Sequence[float]) -> NDArray[np.float32]:
    vector = np.asarray(state, dtype=np.float64)
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)


def _encoded(vector: NDArray[np.float32], style: Format) -> Any:
    """Return the vector as numbers, or as base64 of its little-endian float32 elements."""
    if style == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
