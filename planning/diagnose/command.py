"""The command that shows what a change buys: `tokentwin compare` of a run as it was with the run as it would be."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

_MEMORY = "gpu_memory_utilization"


def compare_command(
    run: str, calibration: str | None, gpu: str | None, both: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """Of the recording in the directory `run`; `both` sides have some settings, B has `settings` beside them.

    Where weights or KV change, KV blocks follow on both sides from the share of the memory that the run had.
    """
    if len(settings) > 1 and _MEMORY in settings:
        both = {**both, _MEMORY: settings[_MEMORY]}
    words = ["tokentwin", "compare", "--trace", run, "--deployment", run]
    words += [] if calibration is None else ["-c", calibration]
    words += [] if gpu is None else ["--gpu", gpu]
    for side, held in (("--a", both), ("--b", {**both, **settings})):
        for pair in pairs(held):
            words += [side, pair]
    return shlex.join(words)


def pairs(settings: Mapping[str, Any]) -> list[str]:
    """Settings as options take them, `NAME=VALUE`."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def named(settings: Mapping[str, Any]) -> str:
    """How a change is called; that KV blocks follow from the same share of memory goes without saying."""
    return " ".join(pairs({name: value for name, value in settings.items() if name != _MEMORY} or settings))
