"""One fleet of a plan, simulated once more on the plan's traffic, and recorded with every step."""

from __future__ import annotations

from pathlib import Path

from planning.plan.pricing import priced_candidates
from planning.plan.request import PlanRequest
from planning.priced_scenario import price_scenario
from planning.progress import Tell, quiet
from planning.simulation import SimulatedRun, recorded
from serving.errors import UserError


def record_fleet(
    request: PlanRequest, engine: str, replicas: int, out: Path, *, overwrite: bool = False, tell: Tell = quiet
) -> SimulatedRun:
    """Record `replicas` of the candidate named `engine`. Raises UserError if it is unknown, or if `out` exists."""
    workload = request.workload(at_named_rate=True)
    candidates = {candidate.name: candidate for candidate in priced_candidates(request, workload).engines}
    if engine not in candidates:
        raise UserError("engine", engine, f"is not a candidate; choose one of {', '.join(candidates)}")
    chosen = candidates[engine]
    gpu = chosen.gpu if chosen.gpu in (request.gpus or ()) else None  # otherwise the calibrated one
    deployment = chosen.deployment.model_copy(update={"fleet": chosen.fleet(replicas, request.router)})
    scenario = price_scenario(workload, request.calibration, gpu, deployment, prices=request.prices)
    return recorded(scenario, out, overwrite=overwrite, tell=tell)
