"""A claim on the real engine, at the size of this machine: both sides in turn, several times, so that noise is seen.

What a machine does meanwhile disturbs the two runs of a pair alike, so the figure is the median of the pairs' ratios,
between the least and the greatest of them. The noise is how much the same side differs from run to run.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from planning.claims.claim import Claim, Experiment
from planning.claims.document import TriedOnEngine
from planning.claims.figures import gain, of_run
from planning.measure.real_engine import load_engine
from planning.settings import overridden
from serving.deployments.config import parse
from serving.errors import UserError
from traces.recording import Recording
from traces.run_metrics import RunMetrics

if TYPE_CHECKING:
    from realengine.engine import Engine

PAIRS = 3


def on_engine(claim: Claim) -> TriedOnEngine | None:
    """What the engine of this machine says; None of a claim that states no experiment for it.

    Raises UserError where torch is missing or the engine cannot do what is asked.
    """
    if claim.engine is None:
        return None
    settings = overridden(claim.experiment, claim.engine.set)
    sides = parse(Experiment, settings, "engine").sides
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        engines = []
        for side in sides:
            engines.append(load_engine(side.serves, lambda said: None))
            stack.callback(engines[-1].close)
        runs = [
            [_measured(*pair, folder / f"{turn}-{at}") for at, pair in enumerate(zip(sides, engines, strict=True))]
            for turn in range(PAIRS)
        ]
    found = [run[0] if len(run) == 1 else gain(sides[0].figure, *run) for run in runs]
    first = [run[0] for run in runs]
    return TriedOnEngine(
        when=claim.engine.when,
        value=median(found),
        low=min(found),
        high=max(found),
        noise=max(first) / min(first) - 1 if min(first) else None,
        unit=claim.expects.unit,
        holds=claim.expects.judge(min(found), max(found)),
    )


def _measured(side: Experiment, engine: Engine, out: Path) -> float:
    """The figure of one run."""
    from realengine.replay import record

    if side.offered is None:
        raise UserError("engine.offered", None, f"is missing; figure {side.figure} is measured under traffic")
    done = record(side.offered.workload(), engine, out)
    if done.status != "complete":
        raise KeyboardInterrupt
    recording = Recording.load(out)
    return of_run(side, recording.requests, RunMetrics.of(recording, side.slo))
