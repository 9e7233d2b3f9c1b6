"""Plans and single fleets as jobs: what `planning.jobs` runs for the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dashboard.plan_page.traffic import check_few_enough
from planning.jobs.files import write_json
from planning.plan import planner
from planning.plan.fleet_run import record_fleet
from planning.plan.request import PlanRequest
from planning.progress import Tell
from serving.deployments.config import parse

PLAN = "dashboard.plan_page.tasks:plan"
FLEET = "dashboard.plan_page.tasks:fleet"
COARSE = "coarse.json"


def plan(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """The whole answer as `plan_document` has it; first ones, each better, are left in `out` as `COARSE` on the way."""
    request = parse(PlanRequest, settings, where="plan")
    check_few_enough(request)
    return planner.plan(request, first=lambda answer: write_json(out / COARSE, answer), tell=tell).as_json()


def fleet(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """One fleet of a plan, recorded in `out/run`: `plan` (a `PlanRequest`), `engine` (its name), `replicas`."""
    request = parse(PlanRequest, settings["plan"], where="plan")
    done = record_fleet(request, settings["engine"], settings["replicas"], out / "run", overwrite=True, tell=tell)
    return {"duration_s": done.recording.run["duration_ns"] / 1e9, **done.standing}
