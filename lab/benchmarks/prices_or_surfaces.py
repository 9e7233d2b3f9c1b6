"""How far linear prices and corrected surfaces are off for steps of recordings that taught them nothing.

    python -m lab.benchmarks.prices_or_surfaces dashboard/samples/demo/real-*
    python -m lab.benchmarks.prices_or_surfaces RECORDINGS... --gpu H200 --kernels kernels.parquet

Each recording is predicted by a fit to the others (of fewer than five recordings, each fifth by the rest). The
exponents of a slow machine and a CPU's balance are fitted without it, too. It prints the median absolute error of each
kind of step in percent: blind, and with the machine's speed known.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.steps.features import REGIMES, Floats, MeasuredSteps
from tokentwin.calibration.steps.fit import LINEAR, SURFACES, linear, unseen_by
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.surface_fit import best_balance, surfaces_for
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.serving.answers.markdown import markdown_table
from tokentwin.traces.recording import Recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--gpu", default="", help="name of the GPU, for recordings of one")
    parser.add_argument("--kernels", type=Path, help="the engine's own kernel times")
    given = parser.parse_args()
    runs = [Recording.load(path) for path in given.recordings]
    engine = recorded_deployment(runs[0])
    steps = MeasuredSteps([run.steps for run in runs], knees=engine.device == "cuda")
    tried = surfaces_for(steps, engine, given.gpu, given.kernels)

    def corrected(used: NDArray[np.bool_]) -> tuple[Floats, MachineSlowdown]:
        best = best_balance(tried, used)
        learnt = best.learnt(used)
        return best.predicted_ns(learnt), learnt.machine

    unseen = {LINEAR: unseen_by(steps, linear(steps)), SURFACES: unseen_by(steps, corrected)}
    cells = []
    for kind, regime in enumerate(REGIMES):
        mine = steps.regime == kind
        if mine.any():
            missed = [
                100 * np.median(np.abs(predicted[mine] / steps.step_ns[mine] - 1))
                for one in unseen.values()
                for predicted in (one.blind_ns, one.known_ns)
            ]
            cells.append([regime, f"{mine.sum():,}", *(f"{error:.1f}" for error in missed)])
    columns = [f"{name}, {known}" for name in unseen for known in ("blind", "speed known")]
    print(markdown_table(["kind", "steps", *columns], cells))


if __name__ == "__main__":
    main()
