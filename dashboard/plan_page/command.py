"""The command line for the same plan as on the Plan page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from tokentwin.planning.plan.request import FleetRequest, PlanRequest
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError

_SPEC, _DEPLOYMENT = "traffic.yaml", "deployment.yaml"
_APART = {"traffic", "slos", "vary", "prices", "spot", "deployment"}  # fields with a form of their own
_CALLED = {"gpus": "gpu", "tensor_parallel_sizes": "tp", "policies": "policy", "splits": "split"}


def plan_command(inputs: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the `tokentwin plan` command for a page's inputs, and the files that it reads; empty if there is none."""
    try:
        request = parse(FleetRequest if "replicas" in inputs else PlanRequest, dict(inputs), where="inputs")
    except UserError:
        return "", {}
    said, files, traffic = request.as_json(), {}, _SPEC
    if isinstance(request.traffic, str):
        traffic = request.traffic
    elif isinstance(request.traffic, tuple):
        return "", {}
    else:
        files[_SPEC] = yaml.safe_dump(request.traffic.model_dump(mode="json", exclude_none=True), sort_keys=False)
    words = ["tokentwin", "plan", traffic]
    for name, field in type(request).model_fields.items():
        value = getattr(request, name)
        if name not in _APART and value != field.default:
            listed = ",".join(map(str, value)) if isinstance(value, tuple) else value
            option = f"--{_CALLED.get(name, name).replace('_', '-')}"
            words += [option] if value is True else [option, repr(listed) if isinstance(listed, float) else str(listed)]
    for slo in request.slos:
        words += ["--slo", slo]
    for name, values in (request.vary or {}).items():
        shown = (value if isinstance(value, str) else json.dumps(value) for value in values)
        words += ["--vary", f"{name}={','.join(shown)}"]
    for option, prices in (("--price", request.prices), ("--spot", request.spot or {})):
        words += [word for gpu, usd in prices.items() for word in (option, f"{gpu}={usd!r}")]
    if "deployment" in said:
        files[_DEPLOYMENT] = yaml.safe_dump(said["deployment"], sort_keys=False)
        words += ["--deployment", _DEPLOYMENT]
    return shlex.join(words), files
