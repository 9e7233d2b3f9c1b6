"""What a plan is called where there are several: by what is served, what arrives, what must hold, and the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboard.plan_page.words import carriers
from dashboard.prose import prose
from planning.plan.document import PlanDocument
from serving.deployments.hf_config import spec_from_hf_config
from serving.errors import UserError

EXAMPLE = "example"  # the bundled plan, in a link
LOOKED_AT = "plan_looked_at"  # of a tab: the plan that its Plan page last showed the answer of


def plan_name(settings: Mapping[str, Any], answer: PlanDocument) -> str:
    """One line that tells it from the others. `settings` are those of a `PlanRequest`."""
    best = answer.recommendation
    fleet = carriers(best, answer.spares) if best else "no fleet"
    slos = ", ".join(prose(objective) for objective in answer.objectives)
    # A calibration may have brought the model.
    served = (candidate.deployment["model"] for candidate in answer.candidates.values())
    model = settings.get("model") or next(served, "no model")
    return f"{fleet}: {model_name(model)}, {_traffic(settings['traffic'], answer)}, {slos}"


def model_name(model: str) -> str:
    """A model of the catalogue by its name, a pasted one by its architecture and size."""
    if Path(model).name == model:
        return model
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        spec = spec_from_hf_config(config, "pasted")
    except (OSError, ValueError, UserError):
        return "a model that is no longer here"
    size = spec.parameters / 1e9
    return f"{config['architectures'][0]}, {f'{size:.3g} B' if size >= 1 else f'{1000 * size:.3g} M'}"


def _traffic(traffic: Any, answer: PlanDocument) -> str:
    """`traffic` is a specification, several of them, or the path of a trace."""
    spec = traffic if isinstance(traffic, Mapping) else {}
    rate = spec.get("arrivals", {}).get("rate") or answer.requests_per_s
    said = f" at {rate:,.3g} requests/s" if rate else ""
    return f"{spec.get('name', 'a trace' if isinstance(traffic, str) else 'a mix')}{said}"
