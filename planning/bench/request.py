"""The server that a workload is sent to, and the way in which it is sent."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from tokentwin.planning.request import Request
from tokentwin.serving.errors import UserError

_FIRST = 1000  # lower token ids are often special


def base_url(url: str) -> str:
    """Return the URL of a server without a final `/v1`, which may be given or not. Raises ValueError if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    _ = parts.port  # raises ValueError if it is none
    return url.rstrip("/").removesuffix("/v1")


class BenchTarget(Request):
    """A server that speaks OpenAI's API."""

    url: str = Field(
        description="URL of an OpenAI-compatible server to send the requests to; the recording has what its client sees"
    )
    endpoint: Literal["completions", "chat"] = Field(
        "completions", description="completions sends prompts as token ids, chat sends them as text"
    )
    api_key: SecretStr | None = Field(None, description="API key for the server; it is not recorded")
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="maximum time to wait for an answer, in seconds")
    vocab_size: int = Field(20_000, ge=2, description="size of the model's vocabulary; prompts use smaller token ids")

    @field_validator("url")
    @classmethod
    def _base(cls, url: str) -> str:
        return base_url(url)

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key is not None:
            if not self.api_key.get_secret_value().isprintable():
                raise UserError("api_key", None, "must be one line; remove line breaks from it")
            if "@" in urlsplit(self.url).netloc:
                raise UserError("api_key", None, "cannot be combined with a user name in the URL; leave one out")
        return self

    @property
    def first_token(self) -> int:
        """The lowest token id that a prompt uses."""
        return min(_FIRST, self.vocab_size // 2)
