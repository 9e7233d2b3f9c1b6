"""The answers to comparison requests: both sides are simulated, recorded, or run on the real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.planning.compare.comparison import compare as compare_pairs
from tokentwin.planning.compare.comparison import ranking
from tokentwin.planning.compare.document import Compared, ComparisonDocument
from tokentwin.planning.compare.request import CompareRecordingsRequest, CompareRequest
from tokentwin.planning.compare.runs import (
    at_known_speed,
    calm,
    check_as_many,
    recorded_pairs,
    recorded_side,
    recordings,
    side_scenarios,
    simulated_pairs,
    simulated_side,
)
from tokentwin.planning.deployments import with_room
from tokentwin.planning.made_up import assumed
from tokentwin.planning.measure.real_engine import check_replays, fitting, load_engines, record_whole
from tokentwin.planning.pooling import check_pooling
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.progress import Tell, quiet
from tokentwin.planning.request import Timing
from tokentwin.planning.resolution import base_deployment
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.errors import UserError
from tokentwin.serving.version import __version__
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording

if TYPE_CHECKING:
    from tokentwin.calibration.validation.disturbance import Disturbance


def compare(request: CompareRequest, tell: Tell = quiet) -> ComparisonDocument:
    """Simulate both sides on the same requests and compare them. Raises UserError if a side cannot be simulated."""
    return _document(request, _simulated(request, _scenarios(request), tell))


def compare_recordings(request: CompareRecordingsRequest, tell: Tell = quiet) -> ComparisonDocument:
    """Compare recordings of both sides; if the request has a timing, also simulate the same runs.

    Raises UserError for recordings that cannot be paired.
    """
    sides = [recordings(name, path) for name, path in (("A", request.a), ("B", request.b))]
    check_as_many(*sides)
    tell("reading the recordings", 0.1)
    if request.timing is None:
        return _document(request, *_recorded(request, sides))
    scenarios = _again(sides, request.timing)
    tell("simulating the same runs", 0.4)
    offered = [list(one.workload.requests) for one in scenarios[0]]
    repeated = all(requests == offered[0] for requests in offered)
    simulated = _simulated(request, [side[:1] for side in scenarios] if repeated else scenarios, quiet)
    return _held_against(request, sides, scenarios, simulated)


def compare_on_engine(
    request: CompareRequest,
    out: Path,
    *,
    repeats: int = 1,
    overwrite: bool = False,
    minutes: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    tell: Tell = quiet,
) -> ComparisonDocument:
    """Simulate both sides, record them on the real engine in `out`, and compare them.

    The sides run in turns (A B, B A, ...), so that a drift of the machine's speed affects both. If the request has
    several seeds, each run has the traffic of another seed; otherwise the same traffic runs `repeats` times. With
    `minutes`, each run sends only its first requests, so many that all runs together fit into this time. `say` is
    called with a line for each run. Raises UserError for a fleet that only the simulator supports, for repeats together
    with several seeds, and before any run if the minutes are too few.
    """
    if request.seeds > 1 and repeats > 1:
        remedy = f"must be 1 with {request.seeds} seeds, because each seed is run once; leave one of the options out"
        raise UserError("repeats", repeats, remedy)
    runs = request.seeds * repeats
    places = {name: [out / name / f"run-{at:0{len(str(runs))}}" for at in range(1, runs + 1)] for name in "ab"}
    for name in "ab":
        for other in sorted((out / name).glob("*/runs.parquet")):
            if other.parent not in places[name]:
                remedy = "is a run of another comparison; choose another directory, or remove the run"
                raise UserError("out", str(other.parent), remedy)
    sides = _scenarios(request)
    for name, side in zip("ab", sides, strict=True):
        check_replays(side[0].workload, _engines(side[0]), places[name], overwrite)
    with closing(load_engines(_engines(sides[0][0]), say)) as engine:
        say(f"{2 * runs} real runs, each of them:")
        offered = [fitting(scenario.workload, engine, minutes, say, 2 * runs) for scenario in sides[0]]
    sides = [[replace(one, workload=workload) for one, workload in zip(side, offered, strict=True)] for side in sides]
    simulated = _simulated(request, sides, tell)
    sides = [side * repeats for side in sides]
    for number in range(runs):
        in_turn = sorted(zip("ab", sides, strict=True), reverse=number % 2 == 1, key=lambda pair: pair[0])
        for name, side in in_turn:
            say(f"real run {number + 1} of {runs} of {name.upper()}")
            with closing(load_engines(_engines(side[number]), say)) as engine:
                record_whole(side[number].workload, engine, places[name][number], overwrite=overwrite)
    recorded = [[Recording.load(place) for place in places[name]] for name in "ab"]
    return _held_against(request, recorded, sides, simulated)


def _engines(scenario: PricedScenario) -> Deployment:
    """Return the deployment for the real engine; a fleet is added only for several engines or a named router."""
    if scenario.engines == 1 and not scenario.router and scenario.deployment.fleet is None:
        return scenario.deployment
    return scenario.deployment.model_copy(update={"fleet": scenario.routed_fleet})


def _held_against(
    request: CompareRequest | CompareRecordingsRequest,
    sides: Sequence[Sequence[Recording]],
    scenarios: Sequence[Sequence[PricedScenario]],
    simulated: Compared,
) -> ComparisonDocument:
    """Return the comparison of the recorded `sides`, with the `simulated` comparison beside it.

    The runs are also simulated with the machine's slowdown during each recording, if it is known.

    Args:
        scenarios: scenarios in which the recordings of each side were simulated
    """
    same = at_known_speed(sides, scenarios)
    in_it = _simulated(request, same, quiet) if same else None
    firsts = [side[0] for side in scenarios]
    return _document(request, *_recorded(request, sides, firsts), simulated, in_it)


def _document(
    request: CompareRequest | CompareRecordingsRequest,
    compared: Compared,
    disturbance: Disturbance | None = None,
    simulated: Compared | None = None,
    same_weather: Compared | None = None,
) -> ComparisonDocument:
    """Return the document of the comparison `compared`.

    If the same runs were `simulated`, their comparison stands beside it, and the document also says whether the
    simulator's ranking holds. For real runs it says whether the machine was disturbed. `same_weather` compares the runs
    simulated with the machine's slowdown during the real runs.
    """
    return ComparisonDocument(
        **dict(compared),
        disturbed=disturbance is not None and disturbance.disturbed,
        disturbance=disturbance.evidence if disturbance is not None else "",
        simulated=simulated,
        same_weather=same_weather,
        ranking=None if simulated is None else tuple(ranking(simulated.rows, compared.rows)),
        assumed=assumed(request.traffic) if isinstance(request, CompareRequest) else "",
        version=__version__,
        inputs=request.as_json(),
    )


def _scenarios(request: CompareRequest) -> list[list[PricedScenario]]:
    """Return the scenarios of each side, one for each seed."""
    timing = request.timing
    workloads = request.workloads()
    everything = Workload([request for workload in workloads for request in workload.requests])
    sides = []
    for side in (request.a, request.b):
        calibration, gpu = side.calibration or timing.calibration, side.gpu or timing.gpu
        base = base_deployment(calibration)
        if timing.model is not None:
            if timing.model not in models():
                raise UserError("model", timing.model, f"must be one of {', '.join(models())}")
            named = {"model": timing.model, "tensor_parallel_size": timing.tensor_parallel_size}
            base = base.model_copy(update=named)
        deployed = side.deployed(base)
        if assumed(request.traffic):
            deployed = with_room(deployed, everything)
        check_pooling(everything, (deployed.model,), request.bounds)
        sides.append(side_scenarios(workloads, calibration, gpu, deployed, side.replicas, side.router))
    return sides


def _again(sides: Sequence[Sequence[Recording]], timing: Timing) -> list[list[PricedScenario]]:
    """Return a scenario for each recorded run. All runs of a side get the deployment of its first recording."""
    for side in sides:
        if side[0].run["clock"] != "wall":
            remedy = "is simulated; leave -c and --gpu out, or give recordings of the real engine"
            raise UserError("recording", str(side[0].path), remedy)
    workloads = [recording.workload() for recording in sides[0]]
    return [
        side_scenarios(workloads, timing.calibration, timing.gpu, recorded_deployment(recording))
        for recording, *_ in sides
    ]


def _simulated(
    request: CompareRequest | CompareRecordingsRequest,
    sides: Sequence[Sequence[PricedScenario]],
    tell: Tell,
) -> Compared:
    runs = sum(map(len, sides))
    stage = f"simulating {runs} runs"
    tell(stage, 0.02)
    pairs = simulated_pairs(sides, request.bounds, lambda done: tell(stage, 0.9 * done / runs))
    tell("separating differences from chance", 0.92)
    a, b = (simulated_side(first) for first, *_ in sides)
    return compare_pairs(pairs, a, b, request.threshold)


def _recorded(
    request: CompareRequest | CompareRecordingsRequest,
    sides: Sequence[Sequence[Recording]],
    scenarios: Sequence[PricedScenario] = (),
) -> tuple[Compared, Disturbance | None]:
    """Compare recorded sides, and return the comparison and the disturbance of the machine.

    `scenarios` are the scenarios in which the recordings were simulated, if they were.
    """
    a, b = sides
    pairs = recorded_pairs(a, b, request.bounds)
    disturbance = calm(sides, scenarios)
    side_a, side_b = recorded_side(a, disturbance), recorded_side(b, disturbance)
    return compare_pairs(pairs, side_a, side_b, request.threshold), disturbance
