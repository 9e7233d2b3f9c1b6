"""Jobs of `tokentwin.planning.jobs` for the pages: plans and single fleets, and how much traffic they accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokentwin.planning.jobs.files import read_json, write_json
from tokentwin.planning.plan import planner
from tokentwin.planning.plan.most_clients import most_clients
from tokentwin.planning.plan.pricing import priced_candidates
from tokentwin.planning.plan.request import FleetRequest, PlanRequest
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.planning.progress import Tell, quiet
from tokentwin.planning.simulation import SimulatedRun, recorded
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload

PLAN = "tokentwin.dashboard.plan_page.tasks:plan"
MOST_CLIENTS = "tokentwin.dashboard.plan_page.tasks:most"
FLEET = "tokentwin.dashboard.plan_page.tasks:fleet"
COARSE = "coarse.json"
# Maximum number of requests in one plan. Each is simulated on every fleet that is tried, about twenty times in all,
# which takes about an hour.
MOST_REQUESTS = 100_000


def plan(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Return the answer of a plan.

    Messages during the search go to `COARSE` as `said`; the last of them is a first answer. After the search, the
    `answer` stands there without the curves around it, which are simulated last.
    """
    request = parse(PlanRequest, settings, where="plan")
    check_few_enough(request)
    known: dict[str, Any] = read_json(out / COARSE) or {}  # of a plan that was ended early, and is started again

    def write(**more: Any) -> None:
        known.update(more)
        write_json(out / COARSE, known)

    return planner.plan(
        request,
        say=lambda line: write(said=line),
        on_tables=lambda answer: write(answer=answer.as_json()),
        tell=tell,
    ).as_json()


def most(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Return how many clients a fleet bears; `settings` are the fields of a `FleetRequest`."""
    request = parse(FleetRequest, settings, where="plan")
    check_few_enough(request)
    return most_clients(request, tell=tell).as_json()


def fleet(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Record one fleet of a plan in `out/run`: `plan` (a `PlanRequest`), `engine` (its name), `replicas`."""
    request = parse(PlanRequest, settings["plan"], where="plan")
    done = record_fleet(request, settings["engine"], settings["replicas"], out / "run", overwrite=True, tell=tell)
    return {"duration_s": done.recording.run["duration_ns"] / 1e9, **done.trust._asdict()}


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


def check_few_enough(request: PlanRequest) -> None:
    """Raise UserError for too many requests; a specification is checked before any request is made."""
    requests, remedy = request.expected_requests, "lower the rate or the number of users, or simulate fewer minutes"
    if requests is None:
        requests, remedy = len(list(request.workload().requests)), "choose a shorter period of the trace"
    if requests > MOST_REQUESTS:
        allowed = f"are too many to plan for; {MOST_REQUESTS:,} are allowed: {remedy}"
        raise UserError("traffic", f"{requests:,.0f} requests", allowed)


def glance(request: PlanRequest, most: int) -> Workload:
    """Return the first requests, up to `most` for a specification; all requests of a trace, which are there already.

    Clients who wait for answers have all their requests, because the first ones are only their warm-up. Raises
    UserError as `check_few_enough` and the readers do.
    """
    check_few_enough(request)
    if (request.expected_requests or 0) > most and request.loop is None:
        request = request.model_copy(update={"limit": most})
    return request.workload(at_named_rate=True)
