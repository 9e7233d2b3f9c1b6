"""The devices of this machine, by the request of a deployment."""

from __future__ import annotations

import torch

from realengine.device import Device
from serving.deployments.config import Deployment
from serving.errors import UserError


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
        from realengine.cuda_device import CudaDevice

        return CudaDevice(rank)
    from realengine.cpu_device import CpuDevice

    return CpuDevice(threaded=deployment.scheduler.async_scheduling)
