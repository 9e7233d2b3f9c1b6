"""The rules of vLLM's older schedulers that differ from the newest that we know, as settings of our scheduler."""

from __future__ import annotations

from typing import Any

# vLLM before 0.33: a request that preempts itself ends the step, and `prefill_schedule_interval` spaces the prompts of
# data-parallel ranks alone.
_BEFORE_0_33 = {"self_preemption_ends_step": True, "prefill_schedule_interval": 1}


def release_settings(version: str) -> dict[str, Any]:
    """Return the settings of vLLM `version` (0.32.0, 0.32.0+cpu). Raises ValueError for a text that is no version."""
    major, minor, *_ = version.split(".")
    return dict(_BEFORE_0_33) if (int(major), int(minor)) < (0, 33) else {}
