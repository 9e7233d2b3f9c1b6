"""The command that shows the gain of a change: `tokentwin compare` of the run with and without the change."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

_MEMORY = "gpu_memory_utilization"


def compare_command(
    run: str, calibration: str | None, gpu: str | None, both: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """Return the command for the recording in the directory `run`.

    Both sides get the settings `both`, and side B also gets `settings`. If weights or KV change, the KV blocks of both
    sides follow from the share of the memory that the run had.
    """
    if len(settings) > 1 and _MEMORY in settings:
        both = {**both, _MEMORY: settings[_MEMORY]}
    words = ["tokentwin", "compare", "--trace", run, "--deployment", run]
    words += [] if calibration is None else ["-c", calibration]
    words += [] if gpu is None else ["--gpu", gpu]
    for side, own in (("--a", both), ("--b", {**both, **settings})):
        for pair in pairs(own):
            words += [side, pair]
    return shlex.join(words)


def pairs(settings: Mapping[str, Any]) -> list[str]:
    """Return settings in the form of option values, `NAME=VALUE`."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def named(settings: Mapping[str, Any]) -> str:
    """Return the name of a change, without the share of memory, which is the same on both sides."""
    return " ".join(pairs({name: value for name, value in settings.items() if name != _MEMORY} or settings))
