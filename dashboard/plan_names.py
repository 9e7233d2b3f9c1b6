"""What a plan is called where there are several: by what is served, what arrives, what must hold, and the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboard.plan_words import carriers
from dashboard.prose import prose
from serving.errors import UserError
from serving.model_spec import ModelSpec

EXAMPLE = "example"  # the bundled plan, in a link
LOOKED_AT = "plan_looked_at"  # of a tab: the plan that its Plan page last showed the answer of


def plan_name(settings: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """One line that tells it from the others. `settings` are those of a `PlanRequest`."""
    best = answer["recommendation"]
    fleet = carriers(best, answer["spares"]) if best else "no fleet"
    slos = ", ".join(prose(objective) for objective in answer["objectives"])
    return f"{fleet}: {model_name(settings['model'])}, {_traffic(settings['traffic'], answer)}, {slos}"


def model_name(model: str) -> str:
    """A model of the catalogue by its name, a pasted one by its architecture and size."""
    if Path(model).name == model:
        return model
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        spec = ModelSpec.from_hf_config(config, "pasted")
    except (OSError, ValueError, UserError):
        return "a model that is gone"
    size = spec.parameters / 1e9
    return f"{config['architectures'][0]}, {f'{size:.3g} B' if size >= 1 else f'{1000 * size:.3g} M'}"


def _traffic(traffic: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    rate = traffic.get("arrivals", {}).get("rate") or answer.get("requests_per_s")
    said = f" at {rate:,.3g} requests/s" if rate else ""
    return f"{traffic.get('name', 'a trace')}{said}"
