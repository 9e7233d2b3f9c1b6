"""The parts of a request's end-to-end time, in a run in which no request waits for another.

The terms are the queue, the CPU before each step, and every part of the steps by regime, as `tokentwin explain` names
them. They add up to the mean E2E in the engine. The time before and after the engine is one term, fitted to measured
servers. With a measured front door (API server) it is several terms.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.claims.claim import Experiment
from lab.claims.figures import scenario_of
from tokentwin.calibration.steps.external_calibration import ExternalCalibration, blind, predicted_cost
from tokentwin.calibration.steps.operation_cost import WAITING
from tokentwin.calibration.steps.run_explanation import explain_run
from tokentwin.planning.claims.document import Term
from tokentwin.serving.front_door import FrontDoor
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.tables import numbers

_OF_ENGINES = "measured engines"
_OUTSIDE = "around the engine: tokenise, hand over, detokenise, stream, client"


def terms_of(experiment: Experiment, front_door: FrontDoor | None = None) -> tuple[Term, ...]:
    """Return the terms in order, those of prefill before those of decoding. The requests must come one at a time."""
    scenario = scenario_of(experiment)
    sink = TableSink()
    scenario.cluster(Cluster, sink, steps=True).run(scenario.workload)
    arrival, scheduled, finish = (numbers(sink.requests, f"{at}_ns") for at in ("arrival", "scheduled", "finish"))
    count = len(finish)
    whole, before = float(np.sum(finish - arrival)), float(np.sum(scheduled - arrival))
    known, cost = blind(experiment.gpu, scenario.deployment), predicted_cost(experiment.gpu, scenario.deployment)
    learnt = "extrapolated" if known.untaught else "interpolated"
    steps = scenario.trust().level
    sources = {"host and launch": (_OF_ENGINES, learnt), WAITING: (cost.host.launches.source, steps)}
    terms = [("until its first step", before, _OF_ENGINES, learnt)]
    for regime, parts in explain_run(cost, sink.steps).parts_ns.items():
        for part, ns in sorted(parts.items(), key=lambda item: -item[1]):
            terms.append((f"{regime}: {part}", ns, *sources.get(part, (f"kernels of {experiment.gpu}", steps))))
    terms.append(("between its steps", whole - sum(ns for _, ns, *_ in terms), _OF_ENGINES, learnt))
    inside = [
        Term(name=name, ms=ns / count / 1e6, source=source, level=level) for name, ns, source, level in terms if ns > 0
    ]
    prompt, output = (float(np.mean(numbers(sink.requests, f"{part}_tokens"))) for part in ("prompt", "output"))
    outside = _served(known, learnt) if front_door is None else _measured(front_door, prompt, output)
    return (*inside, *outside)


def _served(known: ExternalCalibration, level: str) -> Iterator[Term]:
    """Yield the time around the engine as one term, because the measured runs do not separate its parts."""
    low, high = (known.request_ms * factor for factor in known.request_interval)
    source = f"TTFT of measured servers beyond their engines', {low:.0f} to {high:.0f} ms"
    yield Term(name=_OUTSIDE, ms=known.request_ms, source=source, level=level)


def _measured(door: FrontDoor, prompt: float, output: float) -> Iterator[Term]:
    """Yield the terms around the engine for a request that is alone, so that each step samples one token."""
    beside = door.engine_step_ns + door.engine_row_ns + door.host_step_ns + door.host_row_ns
    for name, ns in (
        ("client and network", door.client_ns),
        ("tokenise", door.request_ns + door.prompt_token_ns * prompt),
        ("from the engine to the API server", door.outputs_ns),
        ("detokenise and write the last chunk", door.chunk_ns),
        ("end the answer", door.last_ns),
        ("engine slowed by the API server", output * beside),
    ):
        yield Term(name=name, ms=ns / 1e6, source=door.source or "a front door without source", level="measured")
