"""The command line that asks what the Plan page asked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from dashboard.plan_request import PlanRequest, RecordedTraffic
from serving.config import parse
from serving.errors import UserError

_SPEC = "traffic.yaml"
_WHOLE_S = "1e9"  # synthesised traffic is planned for whole


def plan_command(asked: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The `tokentwin plan` of a page's inputs, and the files that it reads; empty where `asked` is no page's."""
    try:
        request = parse(PlanRequest, dict(asked), where="asked")
    except UserError:
        return "", {}
    if isinstance(request.traffic, RecordedTraffic):
        files: dict[str, str] = {}
        words = ["tokentwin", "plan", str(request.traffic.path), "--window-s", f"{request.traffic.window_s:g}"]
        if request.traffic.rate_scale != 1:
            words += ["--rate-scale", repr(request.traffic.rate_scale)]
    else:
        files = {_SPEC: yaml.safe_dump(request.traffic.model_dump(mode="json", exclude_none=True), sort_keys=False)}
        words = ["tokentwin", "plan", _SPEC, "--window-s", _WHOLE_S]
    words += ["--model", request.model, "--gpu", ",".join(request.gpus)]
    words += ["--tp", ",".join(map(str, request.tensor_parallel_sizes))]
    for slo in request.slos:
        words += ["--slo", slo]
    for name, values in (request.vary or {}).items():
        shown = (value if isinstance(value, str) else json.dumps(value) for value in values)
        words += ["--vary", f"{name}={','.join(shown)}"]
    for gpu, usd in request.prices.items():
        words += ["--price", f"{gpu}={usd!r}"]
    usual = PlanRequest.model_fields
    for name, option in (("spares", "--spares"), ("router", "--router"), ("most", "--max-replicas")):
        if getattr(request, name) != usual[name].default:
            words += [option, str(getattr(request, name))]
    return shlex.join(words), files
