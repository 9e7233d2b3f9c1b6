"""A check that a version of vLLM has the scheduler interface that this package needs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tokentwin.serving.errors import UserError

TRIED = ("0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
"""Minor versions of which recordings were made and replayed (docs/vllm.md says how)."""

_LOG = logging.getLogger("vllm.tokentwin")


def release(version: str) -> str:
    """Return the release of a version, which is `0.32.0` for `0.32.0+cpu` or `0.32.0.post1`."""
    return ".".join(version.split("+")[0].split(".")[:3])


def check_interface(version: str, parts: Iterable[tuple[type, Iterable[str]]]) -> None:
    """Check that classes of vLLM `version` have the attributes that are used here.

    Raises UserError if an attribute is missing, and logs a warning for a version that was never tried.
    """
    for owner, names in parts:
        fields = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        if missing := [name for name in names if name not in fields]:
            remedy = f"has another scheduler ({owner.__name__} without {missing[0]}); use one of {', '.join(TRIED)}"
            raise UserError("vllm", version, remedy)
    if not release(version).startswith(tuple(f"{minor}." for minor in TRIED)):
        _LOG.warning("tokentwin: vLLM %s was never tried; its scheduler has the interface of those that were", version)
