"""The command that shows what a change gains: `tokentwin compare` of the run as it was and as it would be."""

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

    `both` sides have some settings, and B also has `settings`. If weights or KV change, KV blocks on both sides follow
    from the share of the memory that the run had.
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
    """Return settings in the form of options, `NAME=VALUE`."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def named(settings: Mapping[str, Any]) -> str:
    """Return the name of a change; the share of memory is left out, because KV blocks follow from the same share."""
    return " ".join(pairs({name: value for name, value in settings.items() if name != _MEMORY} or settings))
