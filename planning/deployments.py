"""Deployments that a user states in a file, as flags, or as settings by name.

A name is a dotted path (`scheduler.max_num_seqs`, `fleet.router`), as in `--vary max_num_seqs=64,256`. `scheduler.` may
be left out if only the scheduler has the setting. Values are YAML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from tokentwin.realengine.attention import ATTENTION
from tokentwin.serving.data_file import parse_yaml
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, load_deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.plugins import check_name

SCHEDULER_FLAGS = (
    "max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens",
    "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "prefill_schedule_interval",
    "max_model_len", "block_size", "num_blocks",
)  # fmt: skip
FLAGS = (
    "model", "device", "dtype", "threads", "attention", "quantization", "kv_cache_dtype", "tensor_parallel_size",
    "prefill_context_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization",
    "policy",
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
    from tokentwin.traces.recording import Recording  # loads pyarrow

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

    If `stated` names no model, it gets the model and the device of `otherwise`. If it states no number of KV blocks, it
    gets the share of memory of `otherwise`.
    """
    if stated is None:
        return otherwise
    known, taken = stated.model_fields_set, dict[str, Any]()
    if "model" not in known:
        taken = {name: getattr(otherwise, name) for name in ("model", "device") if name not in known}
    if not {"gpu_memory_utilization", "num_blocks"} & {*known, *stated.scheduler.model_fields_set}:
        taken["gpu_memory_utilization"] = otherwise.gpu_memory_utilization
    return stated.model_copy(update=taken) if taken else stated


def served() -> Deployment:
    """Return the default deployment on a GPU."""
    return Deployment(model="Llama-3.1-8B", device="cuda", gpu_memory_utilization=0.9)


def named_value(option: str, pair: str, many: bool = False) -> tuple[str, Any]:
    """Parse `NAME=VALUE`; if `many` is set, the value is the list in `NAME=VALUE,VALUE`. Raises UserError."""
    name, equals, text = pair.partition("=")
    if not name or not equals:
        raise UserError(option, pair, "must be NAME=VALUE, e.g. max_num_seqs=" + ("64,256" if many else "64"))
    try:
        return name, parse_yaml(f"[{text}]" if many else text)
    except ValueError as error:
        raise UserError(f"{option} {name}", text, str(error)) from None


def named_values(option: str, pairs: Sequence[str], many: bool = False) -> dict[str, Any]:
    """Parse pairs with `named_value`, and return values by name. Raises UserError, also for a repeated name."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, value = named_value(option, pair, many)
        if name in values:
            raise UserError(option, pair, "must name each setting once" + (", with different values" if many else ""))
        values[name] = value
    return values


def with_settings(base: Deployment, settings: Mapping[str, Any]) -> Deployment:
    """Return `base` with all settings applied. Raises a UserError that names a setting that is wrong or set twice."""
    data = base.model_dump(mode="json", exclude_unset=True)  # the engine's defaults fill in the other settings
    whole, known = base.model_dump(mode="json"), dict[tuple[str, ...], str]()
    for path, value in settings.items():
        bare = path in SchedulerConfig.model_fields and path not in Deployment.model_fields
        *way, last = ("scheduler", path) if bare else path.split(".")
        if (other := known.setdefault((*way, last), path)) != path:
            raise UserError(path, value, f"is set twice, also as {other}; leave one of them out")
        node, known_there = data, whole
        for name in way:
            there = known_there.get(name) or {}
            if not isinstance(there, dict):
                raise UserError(path, value, f"cannot be set, because {name} is a single value")
            node[name] = {} if node.get(name) is None else node[name]
            node, known_there = node[name], there
        node[last] = value
    if ("scheduler", "num_blocks") in known:
        if data.get("gpu_memory_utilization") is not None and ("gpu_memory_utilization",) in known:
            path = known["scheduler", "num_blocks"]
            remedy = "cannot be combined with gpu_memory_utilization; give one of them"
            raise UserError(path, data["scheduler"]["num_blocks"], remedy)
        data["gpu_memory_utilization"] = None  # the blocks are stated, so they do not follow from memory
    return parse(Deployment, data, where="deployment")


def overridden(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with each value set at its path; missing mappings along the path are created."""
    config = deepcopy(base)
    for path, value in overrides.items():
        *way, last = path.split(".")
        node: Any = config
        for name in way:
            if isinstance(node, dict) and node.get(name) is None:
                node[name] = {}
            node = _child(node, name, path)
        if isinstance(node, list):
            _child(node, last, path)
            node[int(last)] = deepcopy(value)
        elif isinstance(node, dict):
            node[last] = deepcopy(value)
        else:
            raise UserError(path, node, "is a single value in base; make it a mapping there, or vary the whole of it")
    return config


def found_at(config: Any, path: str, otherwise: Any = None) -> Any:
    node = config
    for name in path.split("."):
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return otherwise
    return node


def _child(node: Any, name: str, path: str) -> Any:
    try:
        return node[int(name)] if isinstance(node, list) else node[name]
    except (ValueError, IndexError, KeyError, TypeError):
        remedy = "is not in base; give the number of an entry for a list, and no further path for a single value"
        raise UserError(path, name, remedy) from None
