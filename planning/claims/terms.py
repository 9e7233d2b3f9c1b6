"""What the end-to-end time of a request is made of, term by term, in a run in which nobody waits for another.

Queue, the CPU before each step, and of the steps every part by regime, as `tokentwin explain` names them. These terms
add up to the mean E2E of the engine. The last is what comes before and after it, as measured servers teach.
"""

from __future__ import annotations

import numpy as np

from calibration.steps.predict import blind, predicted_cost
from calibration.steps.run_explanation import explain_run
from planning.claims.claim import Experiment
from planning.claims.document import Term
from planning.claims.figures import scenario_of
from sim.cluster import Cluster
from sim.run_log import TableSink
from traces.numeric_columns import numbers

OUTSIDE = "around the engine: tokenise, detokenise, stream, client"  # no measured run tells these four apart


def terms_of(experiment: Experiment) -> tuple[Term, ...]:
    """In the order in which they come, those of prompts before those of decoding. The requests come one at a time."""
    scenario = scenario_of(experiment)
    sink = TableSink()
    scenario.cluster(Cluster, sink, steps=True).run(scenario.workload)
    arrival, scheduled, finish = (numbers(sink.requests, f"{at}_ns") for at in ("arrival", "scheduled", "finish"))
    count = len(finish)
    whole, before = float(np.sum(finish - arrival)), float(np.sum(scheduled - arrival))
    found = [("until its first step", before)]
    parts = explain_run(predicted_cost(experiment.gpu, scenario.deployment), sink.steps).parts_ns
    for regime, of in parts.items():
        found += [(f"{regime}: {part}", ns) for part, ns in sorted(of.items(), key=lambda item: -item[1])]
    found.append(("between its steps", whole - sum(ns for _, ns in found)))
    outside = Term(name=OUTSIDE, ms=blind(experiment.gpu, scenario.deployment).request_ms)
    return (*(Term(name=name, ms=ns / count / 1e6) for name, ns in found if ns > 0), outside)
