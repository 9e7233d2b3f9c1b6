"""A workload's prompts for a server that does not know segments: equal segments become equal token ids, or words.

A prompt that quotes the answer to another request quotes the server's actual answer, as far as it came, so that the
server's prefix cache can hit.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from realengine.offered_workload import SegmentTokens, named_segments
from serving.workload import WorkloadRequest

_OUT = "out:"
# Common words; with the space before it, each is one token of most vocabularies.
_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through back years where much your way well down should because "
    "each just those people how too little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come since against go "
    "came right used take three"
)
_WORDS = _COMMON.split()


def quoted(requests: Iterable[WorkloadRequest]) -> set[int]:
    """Return the ids of the requests whose answers other prompts quote."""
    names = {name for request in requests for name, _ in request.prompt if name.startswith(_OUT)}
    return {int(name.removeprefix(_OUT)) for name in names if name.removeprefix(_OUT).isdigit()}


class TokenPrompts:
    """Prompts of token ids, with exactly the workload's lengths."""

    def __init__(self, tokens: SegmentTokens, quoted: set[int]) -> None:
        self._tokens = tokens
        self._quoted = quoted
        self._answers: dict[str, list[int]] = {}

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        """Return the fields of a request's body that hold its prompt: `prompt`."""
        ids = []
        for name, count in named_segments(request):
            said = self._answers.get(name, [])[:count]
            ids += said + self._tokens.segment(name, count)[len(said) :]
        return {"prompt": ids}

    def answered(self, request: WorkloadRequest, text: str, tokens: list[int]) -> None:
        """Keep the answer to `request`; `tokens` is empty if the server does not give them."""
        if request.id in self._quoted:
            self._answers[f"{_OUT}{request.id}"] = tokens


class ChatPrompts:
    """Conversations with about the workload's lengths, one token a word; the template of the model adds some."""

    def __init__(self, quoted: set[int], salt: str = "") -> None:
        self._tokens = SegmentTokens(len(_WORDS), salt=salt)
        self._quoted = quoted
        self._answers: dict[str, str] = {}

    def body(self, request: WorkloadRequest) -> dict[str, Any]:
        """Return `messages`: quoted answers are the assistant's, all other text is the user's."""
        messages = []
        for is_answer, group in groupby(named_segments(request), key=lambda segment: segment[0].startswith(_OUT)):
            text = " ".join(self._text(*segment) for segment in group)
            messages.append({"role": "assistant" if is_answer else "user", "content": text})
        return {"messages": messages}

    def _text(self, name: str, count: int) -> str:
        said = self._answers.get(name)
        return said or " ".join(_WORDS[token] for token in self._tokens.segment(name, count))

    def answered(self, request: WorkloadRequest, text: str, tokens: list[int]) -> None:
        if request.id in self._quoted:
            self._answers[f"{_OUT}{request.id}"] = text


Prompts = TokenPrompts | ChatPrompts
