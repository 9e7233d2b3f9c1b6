"""The next run to measure: the one that narrows the predicted latencies of a deployment most.

How much a run would narrow the belief (the posterior of the fitted parameters) is known before it is measured, because
that depends only on the slopes of its figures: their derivatives by these parameters (a linear update). The candidates
are closed loops with the planned lengths at several concurrencies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.steps.evidence import Belief, Evidence, own_origin
from tokentwin.calibration.steps.interval import Factors, factors_of
from tokentwin.calibration.validation.external.case import Case
from tokentwin.calibration.validation.external.predicted_run import FIGURES, PredictedRun, predicted_run, taught
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.measured.run import MeasuredRun

_WAVES = 5  # requests per client of a simulated closed loop
_LADDER = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class NextRun:
    """A closed loop to measure, and the 90 % intervals of mean TPOT and TTFT before and after it, as factors.

    The intervals are those of a closed loop at the planned concurrency.
    """

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    tpot: tuple[Factors, Factors]
    ttft: tuple[Factors, Factors]


def next_run(
    evidence: Evidence, gpu: str, deployment: Deployment, prompt_tokens: int, output_tokens: int, running: int
) -> NextRun:
    """Return the most informative run for `deployment`, which serves about `running` requests at a time.

    Lengths are the means of the planned traffic. Raises UserError if the deployment cannot serve them.
    """

    def loop(concurrency: int) -> PredictedRun:
        return _loop(gpu, deployment, prompt_tokens, output_tokens, concurrency)

    most = deployment.scheduler.max_num_seqs
    target = loop(min(max(running, 1), most))
    belief = evidence.belief(target.origin)
    noise = np.array([evidence.noise[name] ** 2 for name in FIGURES])
    wanted = _slopes(target, belief)
    ladder = sorted({target.measured_run.workload.concurrency or 1, *(c for c in _LADDER if c <= most)})
    best: tuple[float, int, Belief] | None = None
    for concurrency in ladder:
        after = belief.updated(taught(target.origin, [_as_predicted(loop(concurrency), belief)], belief.logs))
        left = float(np.log(after.variance(wanted) + noise).sum())
        if best is None or left < best[0] - 1e-9:
            best = left, concurrency, after
    assert best is not None
    _, concurrency, after = best
    rows = evidence.own_rows(target.origin) + 1
    before_after = [
        tuple(
            factors_of(evidence.reach(name, target.origin, own_rows) * float(np.sqrt(known.variance(slope) + variance)))
            for known, own_rows in ((belief, rows - 1), (after, rows))
        )
        for name, slope, variance in zip(FIGURES, wanted, noise, strict=True)
    ]
    (tpot, ttft) = before_after
    return NextRun(concurrency, prompt_tokens, output_tokens, (tpot[0], tpot[1]), (ttft[0], ttft[1]))


def _loop(gpu: str, deployment: Deployment, prompt: int, output: int, concurrency: int) -> PredictedRun:
    requests = [WorkloadRequest(at, 0, ((PRIVATE, prompt),), output) for at in range(_WAVES * concurrency)]
    workload = Workload(requests, name="next", concurrency=concurrency, shares_prefixes=False)
    run = MeasuredRun("next", workload, dict.fromkeys(FIGURES, 1.0), by_client=True)
    stated = deployment.model_dump(exclude_unset=True, exclude={"fleet", "engine"})
    case = Case(
        name="next",
        title="a run to measure",
        source="",
        engine=str(deployment.engine_name),
        gpu=gpu,
        deployment=stated,
        measured={"format": "csv", "file": ""},
        shown=(),
    )
    made = predicted_run(case, run)
    return replace(made, origin=own_origin(made.origin))


def _slopes(run: PredictedRun, belief: Belief) -> NDArray[np.float64]:
    return run.predicted(belief.logs)[1]


def _as_predicted(run: PredictedRun, belief: Belief) -> PredictedRun:
    """Return the run with its predicted figures as measured ones."""
    figures = dict(zip(run.figures, run.predicted(belief.logs)[0].tolist(), strict=True))
    return replace(run, measured_run=replace(run.measured_run, figures=figures))
