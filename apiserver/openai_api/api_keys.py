"""API keys and host names, by which requests are authorised."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tokentwin.serving.errors import UserError, reason


def read_keys(path: str | None) -> tuple[bytes, ...]:
    """Return the keys in a file, one per line; none if `path` is None. Raises UserError if the file has no key."""
    if path is None:
        return ()
    try:
        keys = tuple(filter(None, map(bytes.strip, Path(path).read_bytes().splitlines())))
    except OSError as error:
        raise UserError("api_key_file", path, f"cannot be read: {reason(error)}") from None
    if not keys:
        raise UserError("api_key_file", path, "holds no key; write one a line")
    return keys


def check_key(authorization: str, keys: Sequence[bytes]) -> None:
    """Raise Refusal unless the header `Authorization` has one of `keys`. The comparison takes constant time."""
    from tokentwin.apiserver.openai_api.refusal import (
        Refusal,  # imported here, because the supervisor does not load aiohttp
    )

    scheme, _, given = authorization.partition(" ")
    key = (given if scheme.lower() == "bearer" else authorization).encode(errors="surrogateescape")
    if not sum([hmac.compare_digest(key, known) for known in keys]):
        raise Refusal(401, "this server wants a key: send the header `Authorization: Bearer KEY`")


def check_host(host: str, allowed: Collection[str]) -> None:
    """Raise Refusal unless the header `Host`, without its port, is one of `allowed`.

    A web page can give the server's address a name of its own, and could then send requests in a visitor's browser.
    """
    from tokentwin.apiserver.openai_api.refusal import Refusal

    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if name not in allowed:
        raise Refusal(400, f"Host: {host[:256]} is not a name of this server; its operator can allow it")
