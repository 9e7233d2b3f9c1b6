"""Plans and single fleets as jobs: what `tokentwin.jobs` runs for the pages.

A plan is answered three times: within seconds, by a small part of each fleet on its part of the traffic; by a larger
part; and then by whole fleets.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from dashboard.plan_request import PlanRequest, RecordedTraffic
from serving.config import Deployment, parse
from serving.workload import Workload
from tokentwin.jobs.files import write_json
from tokentwin.planning.document import plan_document
from tokentwin.planning.draws import drawn_again, reordered
from tokentwin.planning.engines import Engine, RuledOut
from tokentwin.planning.frontier import point
from tokentwin.planning.plan import make_plan
from tokentwin.planning.search import Progress, search
from tokentwin.planning.share import try_share, try_some_alone
from tokentwin.planning.workers import Workers
from tokentwin.progress import Tell

PLAN = "dashboard.plan_tasks:plan"
FLEET = "dashboard.plan_tasks:fleet"
COARSE = "coarse.json"
ENOUGH = (100, 500)  # requests that the part of a fleet gets, at least
_FIRST = ("engine", "replicas", "gpus", "usd_per_hour", "met")  # what a part of a fleet tells of the whole
_CURVES = 30  # simulations that the curves around an answer take, more or less
_UNTOLD = 0.1  # share of the simulations that must be done before it is said how long the rest will take


def plan(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """The whole answer as `plan_document` has it; first ones, each better, are left in `out` as `COARSE` on the way."""
    request = parse(PlanRequest, settings, where="plan")
    workload = request.workload()
    engines, ruled_out = request.candidates(workload)
    pace = _Pace(tell)
    for enough in ENOUGH:
        tell("a first answer", 0.0)
        write_json(out / COARSE, _coarse(request, workload, engines, enough))
    return _whole(request, workload, engines, ruled_out, pace)


class _Pace:
    """Tells the share of the work that is done, in time: simulations still to come take as long as those so far did.

    Tells 0 until enough of them are done to go by.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell, self._began, self._share = tell, perf_counter(), 0.0
        self._simulating: float | None = None

    def __call__(self, stage: str, done: float, left: float) -> None:
        now = perf_counter()
        if self._simulating is None:
            self._simulating = now
        if done > _UNTOLD * (done + left):
            left_s = (now - self._simulating) / done * left
            self._share = max(self._share, (now - self._began) / (now - self._began + left_s))
        self._tell(stage, self._share)


def _coarse(request: PlanRequest, workload: Workload, engines: list[Engine], enough: int) -> dict[str, Any]:
    """The cheapest fleet by a part of each, without anything around it; `point` is None if none will do."""
    question, limits = request.question(workload), request.limits
    with Workers(question, jobs=1) as workers:
        trial = partial(try_share, enough=enough)
        found = search(workers, engines, limits.most, limits.spares, keep=1, trial=trial, alone=try_some_alone)
    offers = [
        point(entry.engine, trial, limits.spares)
        for entry in found
        for trial in entry.trials
        if trial.replicas == entry.replicas
    ]
    best = min(offers, key=lambda offer: (offer.usd_per_hour, offer.gpus), default=None)
    return {"point": best and {name: getattr(best, name) for name in _FIRST}}


def _whole(
    request: PlanRequest, workload: Workload, engines: list[Engine], ruled_out: list[RuledOut], pace: _Pace
) -> dict[str, Any]:
    question = request.question(workload)
    candidates = "one candidate" if len(engines) == 1 else f"{len(engines)} candidates"
    searching = f"searching {candidates} on {question.requests:,} requests"
    so_far = Progress(0, 0, 1)

    def told(progress: Progress) -> None:
        nonlocal so_far
        so_far = progress
        pace(searching, progress.done, progress.left + _CURVES)

    draws = other_draws(request, workload)
    with Workers(question) as workers:
        found = make_plan(workers, engines, ruled_out, request.limits, told, draws)
        searched = so_far.done
        asked = request.as_json()
        return plan_document(
            workers,
            found,
            engines,
            asked,
            lambda stage, share: pace(stage, searched + _CURVES * share, _CURVES * (1 - share)),
        )


def other_draws(request: PlanRequest, planned: Workload) -> list[Workload]:
    """The traffic of the request, drawn again; of a trace it is the same in another order."""
    traffic = request.traffic
    if isinstance(traffic, RecordedTraffic):
        return drawn_again(planned, reordered(planned))
    seed = traffic.seed

    def draw(number: int) -> Workload:
        again = traffic.model_copy(update={"seed": seed + number})
        return request.model_copy(update={"traffic": again}).workload()

    return drawn_again(planned, draw)


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
