"""What releases of vLLM's scheduler do otherwise than the newest that we know, as settings of a scheduler of ours."""

from __future__ import annotations

from typing import Any

_GOES_ON_AFTER_SELF = (0, 33)  # the first in which a request that preempts itself does not end the step


def release_settings(version: str) -> dict[str, Any]:
    """Those of vLLM `version` (0.32.0, 0.32.0+cpu). Raises ValueError for what is no version."""
    major, minor, *_ = version.split(".")
    older = (int(major), int(minor)) < _GOES_ON_AFTER_SELF
    return {"self_preemption_ends_step": True} if older else {}
