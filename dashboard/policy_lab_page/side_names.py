"""What two sides are called: their policies, and what else tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planning.compare.document import Side

_MOST = 2  # settings in a name; more are in the deployments that the page shows


def side_names(a: Side, b: Side) -> tuple[str, str]:
    """Short names of two sides of a document: `vllm, max_num_seqs 64`. A setting is named where they differ in it."""
    names = []
    for mine, other in ((a, b), (b, a)):
        own = list(_differing(_flat(mine), _flat(other)))
        more = [f"{len(own) - _MOST} more"] if len(own) > _MOST else []
        names.append(", ".join([mine.deployment.policy, *own[:_MOST], *more]))
    return names[0], names[1]


def _flat(side: Side) -> dict[str, Any]:
    """Settings by their last name, of the scheduler too, and of the fleet as a whole."""
    deployment = side.deployment.as_json()
    run = {name: value for name, value in (("replicas", side.replicas), ("router", side.router)) if value is not None}
    return {**run, **deployment, **deployment["scheduler"], "policy": None, "scheduler": None}


def _differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name, value in mine.items():
        if value == other.get(name):
            continue
        if name == "fleet":
            yield "a fleet" if value else "no fleet"
        elif name == "router":
            yield str(value)
        elif isinstance(value, int | float | str):
            yield f"{value} replica{'' if value == 1 else 's'}" if name == "replicas" else f"{name} {value}"
