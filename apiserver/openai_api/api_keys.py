"""API keys, host names and addresses, by which requests are authorised."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address
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


def check_host(host: str, origin: str | None, allowed: Collection[str]) -> None:
    """Raise Refusal unless the headers `Host` and, of a web page, `Origin` have one of the names `allowed`.

    A web page can give the server's address a name of its own, and could then send requests in a visitor's browser.
    Some requests it could send under the right name, too.
    """
    from tokentwin.apiserver.openai_api.refusal import Refusal

    if host_name(host) not in allowed:
        raise Refusal(400, f"Host: {host[:256]} is not a name of this server; its operator can allow it")
    if origin is not None and host_name(origin.partition("//")[2]) not in allowed:
        raise Refusal(403, f"Origin: {origin[:256]} is not a name of this server; its operator can allow it")


def host_name(address: str) -> str | None:
    """Return a host's name without its port; None if `address` has none."""
    try:
        return urlsplit(f"//{address}").hostname
    except ValueError:
        return None


def is_local(host: str) -> bool:
    """Return whether `host` always means this machine: no web page can give itself such a name."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def check_operator(path: str, remote: str | None, headers: Mapping[str, str]) -> None:
    """Raise Refusal unless a request without a key comes from this machine, and not through a proxy."""
    from tokentwin.apiserver.openai_api.refusal import Refusal

    proxied = "X-Forwarded-For" in headers or "Forwarded" in headers
    if proxied or not is_local(remote or ""):
        what = f"{path} is for operators; call it on the server's machine, or start the server with --api-key-file"
        raise Refusal(403, what)
