"""Plans and single fleets as jobs: what `tokentwin.jobs` runs for the pages.

A plan is answered several times: on its first hundred requests, within seconds, on four times as many, and so on up
to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dashboard.plan_request import PlanRequest
from serving.config import Deployment, parse
from serving.workload import Workload
from tokentwin.jobs.files import write_json
from tokentwin.planning.document import plan_document
from tokentwin.planning.engines import Engine, RuledOut
from tokentwin.planning.frontier import point
from tokentwin.planning.plan import make_plan
from tokentwin.planning.search import search
from tokentwin.planning.workers import Workers

PLAN = "dashboard.plan_tasks:plan"
FLEET = "dashboard.plan_tasks:fleet"
COARSE = "coarse.json"
FIRST_REQUESTS = (100, 400, 1600)  # fewer than the first would say nothing

Tell = Callable[[str, float], None]


def plan(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """The whole answer as `plan_document` has it; first ones, each better, are left in `out` as `COARSE` on the way."""
    request = parse(PlanRequest, settings, where="plan")
    workload = request.workload()
    engines, ruled_out = request.candidates(workload)
    requests = list(workload.requests)
    for at, few in enumerate(count for count in FIRST_REQUESTS if count <= len(requests) // 2):
        tell(f"a first answer, on {few:,} requests", 0.01 + 0.03 * at)
        write_json(out / COARSE, _coarse(request, replace(workload, requests=requests[:few]), engines))
    return _whole(request, workload, engines, ruled_out, tell)


def _coarse(request: PlanRequest, workload: Workload, engines: list[Engine]) -> dict[str, Any]:
    """The cheapest fleet on a few requests, without anything around it; `point` is None if none will do."""
    question, limits = request.question(workload), request.limits
    with Workers(question, jobs=1) as workers:
        found = search(workers, engines, limits.most, limits.spares, keep=1)
    offers = [
        point(entry.engine, trial, limits.spares)
        for entry in found
        for trial in entry.trials
        if trial.replicas == entry.replicas
    ]
    best = min(offers, key=lambda offer: (offer.usd_per_hour, offer.gpus), default=None)
    return {"requests": question.requests, "point": best and asdict(best)}


def _whole(
    request: PlanRequest, workload: Workload, engines: list[Engine], ruled_out: list[RuledOut], tell: Tell
) -> dict[str, Any]:
    question = request.question(workload)
    candidates = "one candidate" if len(engines) == 1 else f"{len(engines)} candidates"
    searching = f"searching {candidates} on {question.requests:,} requests"
    tell(searching, 0.1)
    with Workers(question) as workers:
        found = make_plan(
            workers,
            engines,
            ruled_out,
            request.limits,
            lambda settled: tell(searching, 0.1 + 0.5 * settled / max(len(engines), 1)),
        )
        asked = request.model_dump(mode="json", exclude_none=True)
        return plan_document(workers, found, engines, asked, lambda stage, share: tell(stage, 0.7 + 0.3 * share))


def fleet(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """One fleet of a plan, recorded in `out/run`: `plan` (a `PlanRequest`), `gpu`, `deployment`, `replicas`."""
    from tokentwin.costs import priced
    from tokentwin.fleets import asked_fleet
    from tokentwin.simulating import simulated_run

    request = parse(PlanRequest, settings["plan"], where="plan")
    deployment = parse(Deployment, settings["deployment"], where="deployment")
    own = priced(None, settings["gpu"], lambda _: deployment)
    done = simulated_run(
        out / "run",
        request.workload(),
        own,
        asked_fleet(None, settings["replicas"], request.router),
        [own],
        request.prices,
        overwrite=True,
        tell=tell,
    )
    return {"duration_s": done.recording.run["duration_ns"] / 1e9, **done.standing}
