"""Names of hosts, as browsers and other clients send them in the header `Host`."""

from __future__ import annotations

import re
from ipaddress import ip_address

from tokentwin.serving.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)


def check_host_name(field: str, name: str) -> None:
    """Raise UserError about `field` if `name` is neither a name nor an address, so that no client could call it."""
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        if not _NAME.fullmatch(name):
            raise UserError(field, name, "is no host name; leave out scheme, port and path") from None
