"""The server's TLS certificate, which is read again when its files change."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from tokentwin.apiserver.log import LOG
from tokentwin.serving.errors import UserError, reason

_LOOK_S = 5.0  # interval at which the files are compared with the certificate in use


def tls_context(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for the PEM files of a certificate and its key; None without a certificate.

    Raises UserError if they cannot be used.
    """
    if cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password="")  # an empty password, so that OpenSSL never asks for one
    except OSError as error:  # ssl.SSLError is an OSError
        raise UserError("tls_cert", cert, f"cannot be used with tls_key {key}: {reason(error)}") from None
    return context


async def follow_certificate(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Use a new certificate for new connections as soon as its files can be used; never end."""
    known = refused = _times(cert, key)
    while True:
        await asyncio.sleep(_LOOK_S)
        if (now := _times(cert, key)) == known:
            continue
        try:
            tls_context(cert, key)  # one of the two files may not be written yet
            context.load_cert_chain(cert, key, password="")
        except (UserError, OSError) as error:
            if now != refused:  # once for each change of the files
                LOG.warning("the certificate stays as it was, because the new one has a fault: %s", error)
            refused = now
            continue
        known = now
        LOG.info("the certificate was read again")


def _times(*paths: str | None) -> list[int]:
    """Return the times of the last change of files; 0 for a file that is not there."""
    times = []
    for path in paths:
        try:
            times.append(Path(path).stat().st_mtime_ns if path else 0)
        except OSError:
            times.append(0)
    return times
