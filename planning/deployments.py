"""Deployments that a user states in a file, as flags, or as settings by name.

A name is a dotted path (`scheduler.max_num_seqs`, `fleet.router`), as in `--vary max_num_seqs=64,256`. `scheduler.` may
be left out if only the scheduler has the setting. Values are YAML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from tokentwin.realengine.attention import ATTENTION
from tokentwin.serving.data_file import parse_yaml
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, load_deployment, over, parse
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.plugins import check_name
from tokentwin.serving.workload import Workload

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
_ROUND = 1024  # the length of the longest request is rounded up to a multiple of this number of tokens
_NOT_BOTH = "cannot be combined with gpu_memory_utilization; give one of them"


def read_deployment(
    deployment_file: str | None, flags: dict[str, Any], otherwise: Deployment | None = None
) -> Deployment:
    """Return the deployment in the file (else `otherwise`, else the default), with all given flags applied."""
    stated = stated_deployment(deployment_file) if deployment_file else None
    flagged = {name: value for name, value in flags.items() if value is not None}
    if flagged.keys() >= {"num_blocks", "gpu_memory_utilization"}:
        raise UserError("num_blocks", flagged["num_blocks"], _NOT_BOTH)
    changes = {name: flagged[name] for name in FLAGS if name in flagged}
    scheduler = {name: flagged[name] for name in (*SCHEDULER_FLAGS, "async_scheduling") if name in flagged}
    data = over(described(stated, otherwise or Deployment()).as_stated(), changes | {"scheduler": scheduler})
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


def described(stated: Deployment | None, base: Deployment) -> Deployment:
    """Return `base` with all settings that are `stated`. Raises a UserError that names one that does not go with it."""
    return base if stated is None else parse(Deployment, over(base.as_stated(), stated.as_stated()), where="deployment")


def long_enough(deployment: Deployment, workload: Workload) -> Deployment:
    """Return `deployment` with room for the longest request, rounded up to 1,024 tokens, if the model allows it."""
    longest = max((request.prompt_len + request.output_limit for request in workload.requests), default=1)
    fitting = min(-(-longest // _ROUND) * _ROUND, find_model(deployment.model).max_positions)
    return deployment.rescheduled(max_model_len=fitting)


def with_room(deployment: Deployment, workload: Workload) -> Deployment:
    """Return `deployment` with room for the longest request, unless it states `max_model_len`."""
    return deployment if deployment.scheduler.states("max_model_len") else long_enough(deployment, workload)


@cache
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
    paths = dict[str, str]()
    for path, value in settings.items():
        bare = path in SchedulerConfig.model_fields and path not in Deployment.model_fields
        if (other := paths.setdefault(f"deployment.{'scheduler.' * bare}{path}", path)) != path:
            raise UserError(path, value, f"is set twice, also as {other}; leave one of them out")
    changes = {whole: settings[path] for whole, path in paths.items()}
    try:
        data = overridden({"deployment": base.as_stated()}, changes)["deployment"]
    except UserError as error:
        raise UserError(paths[error.field], error.value, error.remedy) from None
    return parse(Deployment, data, where="deployment")


def overridden(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with each value set at its path; missing mappings along the path are created.

    KV blocks and the share of memory of a deployment, or of a pool, replace each other. Raises UserError for both, and
    for a wrong path.
    """
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
    for path in (path for path, value in overrides.items() if value is not None):
        where, _, name = path.rpartition(".")
        if name == "gpu_memory_utilization":
            if overrides.get(blocks := f"{where}.scheduler.num_blocks") is not None:
                raise UserError(blocks, overrides[blocks], _NOT_BOTH)
            if isinstance(scheduler := found_at(config, f"{where}.scheduler"), dict):
                scheduler.pop("num_blocks", None)
        elif path == "deployment.scheduler.num_blocks":  # a pool's blocks precede its share in any case
            config["deployment"]["gpu_memory_utilization"] = None
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
