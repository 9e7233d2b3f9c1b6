"""What machine and which libraries a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe(device: str) -> dict[str, str | int]:
    """Names and versions, for recordings and calibrations."""
    found: dict[str, str | int] = {
        "device": device,
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda or ""
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
