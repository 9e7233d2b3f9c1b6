"""Text to token ids and back, and chats to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from serving.errors import UserError


class Tokenizer:
    """The tokenizer of a model folder: tokenizer.json, and chat_template.jinja where there is one."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        try:
            self._tokenizer = Loaded.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError("model", str(folder), f"tokenizer.json cannot be read: {error}") from None
        template = folder / "chat_template.jinja"
        self._template = template.read_text(encoding="utf-8") if template.is_file() else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out; bytes that are no character yet come out as U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids that ask the model for the assistant's next message; plain text where there is no template."""
        if self._template is None:
            return self.encode("\n".join(message["content"] for message in messages) + "\n")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        rendered = environment.from_string(self._template).render(messages=messages, add_generation_prompt=True)
        return self.encode(rendered)
