"""Settings of a deployment by name, as options like `--vary max_num_seqs=64,256` give them.

A name is a dotted path (`scheduler.max_num_seqs`, `fleet.router`). `scheduler.` may be left out if only the scheduler
has the setting. Values are YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from serving.data_file import parse_yaml
from serving.deployments.config import Deployment, SchedulerConfig, parse
from serving.errors import UserError


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
