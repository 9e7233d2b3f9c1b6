"""The machine: its devices, the names and versions that describe it, and the data type that is faster on its CPU."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter_ns

import torch

from tokentwin.realengine.devices.device import Device
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError

_DRIVER = Path("/proc/driver/nvidia/version")
_TIMED_SHAPE = 1536, 576  # a projection of SmolLM2
_TIMED_ROWS = 1, 8, 32
_TRIES = 5
# float32 must be this many times as fast, because a smaller gain may be noise, and a GPU would run bfloat16
_CLEARLY = 1.5


def require_devices(deployment: Deployment) -> None:
    """Raise UserError unless every rank of `deployment` has its own device."""
    if deployment.device == "cpu":
        return
    here, wanted = torch.cuda.device_count(), deployment.tensor_parallel_size
    if here == 0:
        raise UserError("device", "cuda", "this machine has no CUDA device; use cpu")
    if here < wanted:
        raise UserError("tensor_parallel_size", wanted, f"this machine has only {here} CUDA devices; lower it")


def find_device(deployment: Deployment, rank: int = 0) -> Device:
    """Return the device of `rank`; raise UserError if it does not exist."""
    require_devices(deployment)
    if deployment.device == "cuda":
        from tokentwin.realengine.devices.cuda_device import CudaDevice

        return CudaDevice(rank)
    from tokentwin.realengine.devices.cpu_device import CpuDevice

    return CpuDevice(threaded=deployment.scheduler.async_scheduling)


def describe(device: str) -> dict[str, str | int]:
    """Return the names and versions of hardware and software, for recordings and calibrations."""
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
    """Return the version of the NVIDIA driver by the file `path`, or "" if the file does not state it."""
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


def with_fast_dtype(deployment: Deployment) -> tuple[Deployment, str]:
    """Return the deployment, with the faster dtype if it runs on the CPU and states none, and the reason if changed."""
    if deployment.device != "cpu" or deployment.states("dtype"):
        return deployment, ""
    torch.set_num_threads(deployment.threads)
    times_ns = {name: _time_ns(getattr(torch, name)) for name in ("bfloat16", "float32")}
    gain = times_ns["bfloat16"] / times_ns["float32"]
    if gain < _CLEARLY:
        return deployment, ""
    reason = f"float32, which this CPU computes {gain:.1f} times as fast as bfloat16; state dtype to choose"
    return deployment.model_copy(update={"dtype": "float32"}), reason


def _time_ns(dtype: torch.dtype) -> int:
    """Return the time in ns of one projection summed over all batch sizes, each the fastest of a few tries."""
    weight = torch.ones(_TIMED_SHAPE, dtype=dtype)
    total = 0
    for rows in _TIMED_ROWS:
        inputs = torch.ones(rows, _TIMED_SHAPE[1], dtype=dtype)
        tries = []
        for _ in range(_TRIES):
            began = perf_counter_ns()
            torch.nn.functional.linear(inputs, weight)
            tries.append(perf_counter_ns() - began)
        total += min(tries)
    return total
