"""A claim on the real engine of this machine, on its GPU if it has one: both sides run alternately, several times.

Other work on the machine disturbs the two runs of a pair alike. So the figure is the median of the pairs' ratios, with
their minimum and maximum. The noise is the difference between runs of the same side.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lab.claims.claim import Claim, Experiment
from lab.claims.figures import as_fast_as, gain, of_run
from tokentwin.planning.claims.document import TriedOnEngine
from tokentwin.planning.deployments import overridden
from tokentwin.planning.measure.real_engine import load_engines
from tokentwin.planning.priced_scenario import with_fleet
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

if TYPE_CHECKING:
    from tokentwin.planning.measure.real_engine import RealEngines

PAIRS = 3


def machine() -> str:
    """Return the name of the machine: its GPU if it has one, else its CPU; raise UserError if torch is missing."""
    device = _device()
    from tokentwin.realengine.devices.machine import describe

    about = describe(device)
    return f"{about.get('gpu') or '{cpu}, {cores} cores'.format(**about)}, torch {about['torch']}"


def _device() -> str:
    try:
        import torch
    except ImportError:
        raise UserError("torch", None, "is not installed; pip install 'tokentwin[engine]'") from None
    return "cuda" if torch.cuda.is_available() else "cpu"


def on_engine(claim: Claim) -> TriedOnEngine | None:
    """Return the result on this machine's engine; None for a claim without an experiment, or if its GPU is missing.

    Raises UserError if torch is missing or the engine cannot do the experiment.
    """
    if claim.engine is None or (claim.engine.gpu and _device() == "cpu"):
        return None
    on = {"deployment.device": _device(), "deployment.dtype": "bfloat16" if _device() == "cuda" else "float32"}
    settings = overridden(claim.experiment, claim.engine.set)
    sides = parse(Experiment, overridden(settings, on), "engine").sides
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        engines = []
        for side in sides:
            fleet = side.replicas is not None
            served = with_fleet(side.serves, side.replicas, side.router) if fleet else side.serves
            engines.append(load_engines(served, lambda said: None))
            stack.callback(engines[-1].close)
        runs = [
            [_measured(*pair, folder / f"{turn}-{at}") for at, pair in enumerate(zip(sides, engines, strict=True))]
            for turn in range(PAIRS)
        ]
    figures = [run[0] if len(run) == 1 else gain(sides[0].figure, *run) for run in runs]
    first = [run[0] for run in runs]
    return TriedOnEngine(
        when=claim.engine.when,
        value=median(figures),
        low=min(figures),
        high=max(figures),
        noise=max(first) / min(first) - 1 if min(first) else None,
        unit=claim.expects.unit,
        holds=claim.expects.judge(min(figures), max(figures)),
    )


def _measured(side: Experiment, engine: RealEngines, out: Path) -> float:
    """Return the figure of one real run."""
    recording = _recorded(side, engine, out)
    return of_run(side, recording.requests, RunMetrics.from_recording(recording, side.slo))


def _recorded(side: Experiment, engine: RealEngines, out: Path) -> Recording:
    """Record one run, after the run that sets its arrival rate, if there is one."""
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.replay import record

    if side.offered is None:
        raise UserError("engine.offered", None, f"is missing; figure {side.figure} is measured under traffic")
    workload = side.offered.workload()
    if side.paced_by is not None:
        paced = _recorded(side.paced_by, engine, out.with_name(f"{out.name}-pace"))
        workload = as_fast_as(workload, RunMetrics.from_recording(paced))
    done = record(workload, engine, out) if isinstance(engine, Engine) else engine.record(workload, out)
    if done.status != "complete":
        raise KeyboardInterrupt
    return Recording.load(out)
