"""Conversion of text to token ids and back, of chats to prompts, and of generated tokens to a stream of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokentwin.serving.data_file import parse_json
from tokentwin.serving.errors import UserError

_INCOMPLETE = "\ufffd"
_SHOWN = 20  # maximum number of messages whose roles an error shows


class Tokenizer:
    """The tokenizer of a model folder: tokenizer.json, and the chat template if there is one.

    The template is the file chat_template.jinja (transformers 5) or `chat_template` in tokenizer_config.json
    (transformers 4).
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        try:
            self._tokenizer = Loaded.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError("model", str(folder), f"tokenizer.json cannot be read: {error}") from None
        config = _read_config(folder / "tokenizer_config.json")
        self._source = _template(folder / "chat_template.jinja", config)
        self._special = {key: _text(config[key]) for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-sequence token; None if tokenizer_config.json does not name it."""
        token_id: int | None = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        return token_id

    @property
    def template(self) -> str:
        """The source of the chat template; empty for a model without one."""
        return self._source or ""

    @cached_property
    def longest(self) -> int:
        """The largest number of characters in a token; names have at least as many characters as their text."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        If `special`, add the model's special tokens, such as a begin-of-sequence token.
        """
        # of the ways to encode, only batches let other threads run
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`, including special tokens if `special`; incomplete characters become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's name of each of `ids`; an unknown id gets an empty name."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a prompt; the arguments are those of `chat_text`."""
        return self.encode(*self.chat_text(messages, **options))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> tuple[str, bool]:
        """Return a prompt that asks for the assistant's next message, or to continue the last message.

        The second result says whether special tokens must be added to its tokens: `special`, or True for a model
        without a template, whose prompt is the plain text of the messages. `tools` and `more` are passed to the
        template, which writes them as the model was trained to read them. Raises UserError if the template refuses the
        messages; some templates require that user and assistant alternate.
        """
        if self._source is None:
            return "\n".join(message["content"] for message in messages) + "\n", True
        given = {**(more or {}), "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(**{**self._special, **given})
        except Exception as error:  # the template is a program, and its input comes from users, so any error may occur
            roles = ", ".join(message["role"] for message in messages[:_SHOWN])
            raise UserError("messages", roles, f"the model's chat template refuses them: {error}") from None
        if continue_final_message:
            last = messages[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)] if last in text else text
        return text, special

    @cached_property
    def _template(self) -> Any:
        """The chat template, compiled in the environment of transformers, but without today's date."""
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(reason: str) -> None:
            raise TemplateError(reason)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        return environment.from_string(self._source or "")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError("model", str(path.parent), f"{path.name} {error}") from None
    if not isinstance(config, dict):
        raise UserError("model", str(path.parent), f"{path.name} is not a JSON object; fetch the model again")
    return config


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):  # several templates by name; "default" is the one for plain chats
        given = next((template.get("template") for template in given if template.get("name") == "default"), None)
    return given if isinstance(given, str) else None


def _text(token: Any) -> str:
    """Return a special token's text; older configs wrap the text in an object."""
    return str(token["content"] if isinstance(token, dict) else token)


class Detokenizer:
    """A decoder that takes tokens one by one and returns text as soon as it is certain.

    Text that may end in an incomplete character, or may be the beginning of a stop string, is held back. When a stop
    string is complete, `stopped_by` is that string, and the text ends before it or, if `keeps_stop`, after it. If there
    are several stop strings, the one that is complete first counts, however the text is split into tokens. The first
    `min_tokens` tokens cannot complete a stop string. Without a stop string, all pieces together are the decoded text
    without an incomplete character at its end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stopped_by: str | None = None
        self._decode = decode
        self._stop = [text for text in stop if text]
        self._keeps_stop = keeps_stop
        self._unstoppable = min_tokens  # number of tokens left that cannot complete a stop string
        self._context: list[int] = []  # tokens before a character boundary: decoding may depend on the previous token
        self._pending: list[int] = []  # tokens after the boundary
        self._given = 0  # number of characters of the pending tokens that were already returned
        self._withheld = ""  # text that may be the beginning of a stop string

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete."""
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """Take `token` and return the text that has become certain."""
        if self.stopped:
            return ""
        self._unstoppable -= 1
        self._pending.append(token)
        text = self._decode_pending()
        # An incomplete character can turn complete characters next to it into U+FFFD, too (byte-fallback vocabularies).
        # So while the text ends in U+FFFD, nothing from the first U+FFFD on is certain.
        whole = text[: text.index(_INCOMPLETE)] if text.endswith(_INCOMPLETE) else text
        certain, self._given = whole[self._given :], len(whole)
        if whole == text:
            self._context = self._pending if text else [*self._context, *self._pending]
            self._pending, self._given = [], 0
        return self._release(certain)

    def finish(self) -> str:
        """Return the text that was held back, after the last token; an incomplete character is dropped."""
        if self.stopped:
            return ""
        text = self._release(self._decode_pending().rstrip(_INCOMPLETE)[self._given :]) + self._withheld
        self._pending, self._given, self._withheld = [], 0, ""
        return text

    def _decode_pending(self) -> str:
        return self._decode([*self._context, *self._pending])[len(self._decode(self._context)) :]

    def _release(self, text: str) -> str:
        text = self._withheld + text
        complete = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in self._stop if stop in text]
        if complete and self._unstoppable < 0:
            ends, begins, self.stopped_by = min(complete)
            self._withheld = ""
            return text[: ends if self._keeps_stop else begins]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
