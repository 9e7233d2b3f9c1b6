"""Answers of a twin that its operator gives: the prompts themselves, or texts from a file."""

from __future__ import annotations

from collections.abc import Mapping

from tokentwin.serving.data_file import read_json_file
from tokentwin.serving.errors import UserError

ECHO = "echo"


class GivenAnswers:
    """The answers in `texts` by prompt; the one to the empty prompt answers all others.

    If `texts` is None, the answer is the prompt. The prompt of a chat is the text of its last message.
    """

    def __init__(self, texts: Mapping[str, str] | None) -> None:
        self._texts = texts

    def knows(self, prompt: str) -> bool:
        """Return whether the operator has stated the answer to this prompt."""
        return self._texts is not None and prompt in self._texts

    def to(self, prompt: str) -> str:
        """Return the answer to a prompt; empty if there is none."""
        if self._texts is None:
            return prompt
        return self._texts.get(prompt, self._texts.get("", ""))


def read_answers(named: str) -> GivenAnswers | None:
    """Return the answers that are `named`: `echo`, or a JSON file with an object of answers; None without a name.

    Raises UserError if the file cannot be read, or has anything but texts.
    """
    if not named:
        return None
    if named == ECHO:
        return GivenAnswers(None)
    texts = read_json_file(named, "answers")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UserError("answers", named, 'is no object of texts; write {"a prompt": "its answer", "": "any other"}')
    return GivenAnswers(texts)
