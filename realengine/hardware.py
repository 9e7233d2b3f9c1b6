"""The machine and the libraries of a measurement."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def describe(device: str) -> dict[str, str | int]:
    """Return names and versions, for recordings and calibrations."""
    machine: dict[str, str | int] = {
        "device": device,
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda or ""
        machine["driver"] = _driver(_DRIVER)
        machine["triton"] = _version("triton")
    return machine


def _driver(path: Path) -> str:
    """Return the NVIDIA driver's version, or "" if the file does not say it."""
    try:
        said = path.read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", said)
    return match[1] if match else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
