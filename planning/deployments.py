"""Deployments that a user states in a file or as flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from realengine.attention import ATTENTION
from serving.deployments.config import Deployment, load_deployment, parse
from serving.errors import UserError
from serving.user_code.plugins import check_name

SCHEDULER_FLAGS = (
    "max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens",
    "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "prefill_schedule_interval",
    "max_model_len", "block_size", "num_blocks",
)  # fmt: skip
FLAGS = (
    "model", "device", "dtype", "threads", "attention", "quantization", "kv_cache_dtype", "tensor_parallel_size",
    "pipeline_parallel_size", "gpu_memory_utilization", "policy",
)  # fmt: skip
ENGINES = ("tokentwin", "vllm")  # engines that can make a real run
_OF_THE_REAL_ENGINE = ("device", "threads", "attention")


def read_deployment(
    deployment_file: str | None, flags: dict[str, Any], otherwise: Deployment | None = None
) -> Deployment:
    """Return the deployment in the file (else `otherwise`, else the default), with all given flags applied."""
    stated = stated_deployment(deployment_file) if deployment_file else None
    data = completed(stated, otherwise or Deployment()).model_dump(exclude_unset=True)  # the rest may be chosen later
    if flags.get("num_blocks") is not None:
        if flags.get("gpu_memory_utilization") is not None:
            remedy = "cannot be combined with gpu_memory_utilization; give one of them"
            raise UserError("num_blocks", flags["num_blocks"], remedy)
        data["gpu_memory_utilization"] = None
    elif flags.get("gpu_memory_utilization") is not None:
        data.get("scheduler", {}).pop("num_blocks", None)
    data.update({name: flags[name] for name in FLAGS if flags.get(name) is not None})
    scheduler = (*SCHEDULER_FLAGS, "async_scheduling")
    data.setdefault("scheduler", {}).update({name: flags[name] for name in scheduler if flags.get(name) is not None})
    deployment = parse(Deployment, data, where=deployment_file or "deployment")
    if deployment.attention != "auto":
        check_name("attention", deployment.attention, ATTENTION)
    return deployment


def on_engine(deployment: Deployment, engine: str | None) -> Deployment:
    """Return `deployment` set to make real runs on `engine`, one of `ENGINES`; None keeps the stated engine."""
    if engine is None:
        return deployment
    return deployment.model_copy(update={"engine": "vllm" if engine == "vllm" else None})


def stated_deployment(path: str | Path) -> Deployment:
    """Return the deployment in a YAML file, or the deployment of a recording with the number of KV blocks that it had.

    Raises a UserError that names `path` if it is neither.
    """
    if not Path(path).is_dir():
        return load_deployment(path)
    from traces.recording import Recording  # loads pyarrow

    run = Recording.load(path).run
    made = parse(Deployment, json.loads(run["deployment"] or "{}"), where=f"{run['run_id']}.deployment")
    if made.gpu_memory_utilization is None or not run["num_blocks"]:
        return made
    known = made.rescheduled(num_blocks=run["num_blocks"] + 1)
    return known.model_copy(update={"gpu_memory_utilization": None})


def refuse_engine_flags(flags: dict[str, Any]) -> None:
    """Raise UserError for a flag that only the real engine supports.

    The kernel tables of a GPU have no such choice, except between tiled and unfused attention.
    """
    for name in _OF_THE_REAL_ENGINE:
        if flags.get(name) is not None and flags[name] != "unfused":
            raise UserError(name, flags[name], "works only on the real engine; leave it out with --gpu")


def completed(stated: Deployment | None, otherwise: Deployment) -> Deployment:
    """Return `stated`, or `otherwise` if it is None.

    If `stated` names no model, it gets the model of `otherwise` and the settings that go with the model.
    """
    if stated is None:
        return otherwise
    if "model" in stated.model_fields_set:
        return stated
    taken = {name: getattr(otherwise, name) for name in ("model", "device") if name not in stated.model_fields_set}
    if stated.gpu_memory_utilization is None and "num_blocks" not in stated.scheduler.model_fields_set:
        taken["gpu_memory_utilization"] = otherwise.gpu_memory_utilization
    return stated.model_copy(update=taken)


def served() -> Deployment:
    """Return the default deployment on a GPU."""
    return Deployment(model="Llama-3.1-8B", device="cuda", gpu_memory_utilization=0.9)
