"""What measured engines teach about engines in general: the calibration behind every blind prediction.

A few numbers say how engines differ from their kernels: factors on like operations, time added per step and row, and
CPU time that only an overlapped loop hides. They are fitted to the figures of all measured runs at once, by Gauss and
Newton's method on log errors with the simulator in the loop, each number drawn towards its prior.

*No run is predicted with what it taught*: for every source there is a second set of numbers, fitted to all the others.
How far those miss is also the interval that blind predictions come with, the one for a source by the misses of the
others: each of them predicted by the rest.

`python -m calibration.validation.external.teaching --data DIR --write calibration/steps/blind.json` makes the bundled
file; `--keep` learns its intervals only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibration.steps.correction import COMPUTE, Correction
from calibration.steps.external_calibration import ExternalCalibration
from calibration.steps.interval import SURE, StepInterval, factors_of
from calibration.steps.operation_cost import HostTimes
from calibration.steps.predict import blind, predicted_cost
from calibration.validation.external.case import Case, load_cases, source_of
from calibration.validation.external.scoring import simulated_figures
from calibration.validation.external.spread import most_of_one_more, reach
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model
from traces.measured.run import MeasuredRun

Floats = NDArray[np.float64]

# Prior value, and standard deviation of its logarithm.
_PRIORS: dict[str, tuple[float, float]] = {
    "weights": (1.0, 0.05),
    "compute": (1.1, 0.15),
    "decode attention": (1.0, 0.15),
    "prompt attention": (1.0, 0.15),
    "experts": (1.0, 0.15),
    "expert compute": (1.0, 0.5),
    "elementwise": (1.0, 0.3),
    "collectives": (1.0, 0.3),
    "step": (4e5, 0.8),
    "decode row": (1.5e4, 0.8),
    "host step": (1e6, 0.8),
    "host row": (1e4, 0.8),
}
_FIGURES = ("tpot_ms.mean", "ttft_ms.mean")
_LEAST_TTFT_MS = 80.0  # below that a client's own milliseconds are too much of it
_SHORT_TTFT_MS = 100.0  # up to there the client's share is large enough to be seen
_NOISE = 0.08  # log errors that need no explanation
_OUTLIER = 0.25  # log errors beyond this count less and less: queueing amplifies
_ROUNDS = 3
_STEP = 0.1  # of a logarithm, for the derivatives
_RUNS = 12  # of a source, spread evenly


@dataclass(frozen=True)
class Lesson:
    """One measured run of one source, ready to be simulated; `figures` are the ones that teach."""

    source: str
    run: MeasuredRun
    gpu: str
    deployment: Deployment
    figures: tuple[str, ...]


def lessons(cases: Sequence[Case], data: Path) -> list[Lesson]:
    """Some runs of every source, those of a caution left out."""
    by_source: dict[str, list[Lesson]] = {}
    for case in cases:
        if case.is_of_steps:
            continue
        for run in case.format.read(data):
            deployment, stated = case.deployment_of(run)
            gpu = run.gpu or case.gpu
            if not stated:
                blocks = kv_capacity(find_model(deployment.model), find_gpu(gpu), deployment).num_blocks
                deployment = deployment.rescheduled(num_blocks=blocks)
            teaching = tuple(
                name
                for name in _FIGURES
                if run.figures.get(name, 0) > 0 and not (name.startswith("ttft") and _is_the_clients(run))
            )
            source = source_of(case, deployment)
            if teaching and not run.caution:
                by_source.setdefault(source, []).append(Lesson(source, run, gpu, deployment, teaching))
    chosen = []
    for found in by_source.values():
        step = max(len(found) / _RUNS, 1.0)
        chosen += [found[int(i * step)] for i in range(min(len(found), _RUNS))]
    return chosen


def _is_the_clients(run: MeasuredRun) -> bool:
    """Whether the TTFT of a run says more of its client than of its engine."""
    return run.or_workload is not None or run.figures["ttft_ms.mean"] < _LEAST_TTFT_MS


def calibration_of(logs: Floats, source: str, sure: StepInterval = SURE, client_ms: float = 0.0) -> ExternalCalibration:
    """The engine calibration that numbers `[len(_PRIORS)]`, as logarithms over their priors, stand for."""
    value = {name: prior * float(np.exp(log)) for (name, (prior, _)), log in zip(_PRIORS.items(), logs, strict=True)}
    factors = dict(Correction().factors)
    factors.update({name: value[name] for name in factors if name in value})
    factors.update(dict.fromkeys(COMPUTE, value["compute"]))
    factors["past attention"] = value["prompt attention"]
    added = dict(Correction().added_ns) | {name: value[name] for name in ("step", "decode row")}
    return ExternalCalibration(
        gpu="",
        deployment=Deployment().model_dump_json(),
        correction=Correction(factors=factors, added_ns=added, source=source),
        host=HostTimes(value["host step"], value["host row"]),
        interval=sure.decode,
        prompt_interval=sure.prompts,
        client_ms=client_ms,
        source=source,
        created="",
    )


def log_errors(taken: Sequence[Lesson], logs: Floats) -> Floats:
    """Log of predicted over measured, of every figure of every lesson in order."""
    calibration = calibration_of(logs, "")
    found = []
    for lesson in taken:
        simulated = _simulated(lesson, calibration)
        found += [np.log(simulated[name] / lesson.run.figures[name]) for name in lesson.figures]
    return np.array(found)


def _simulated(lesson: Lesson, calibration: ExternalCalibration) -> dict[str, float]:
    cost = predicted_cost(lesson.gpu, lesson.deployment, calibration)
    return simulated_figures(lesson.run, lesson.deployment, cost)


def teach(taken: Sequence[Lesson], say: bool = False) -> dict[str, Floats]:
    """The numbers that all lessons teach, under the empty name, and for every source those of all others."""
    logs = np.zeros(len(_PRIORS))
    for round_ in range(_ROUNDS):
        learnt = _linearised(taken, logs)
        if say:
            print(f"round {round_}: root mean square log error {np.sqrt(np.mean(learnt.at**2)):.3f}", flush=True)
        logs = learnt.without()
    return {"": logs} | {name: learnt.without(name) for name in learnt.sources}


def calibrations(
    taken: Sequence[Lesson], numbers: Mapping[str, Floats], say: bool = False
) -> dict[str, ExternalCalibration]:
    """The calibrations of `numbers`, each with how far off a further source may be, by the sources that taught it."""
    learnt = _linearised(taken, numbers[""])
    late_ms = _late_ms(taken, numbers)
    found = {}
    for left_out, logs in numbers.items():
        others = ", ".join(name for name in learnt.sources if name != left_out)
        source = f"measured runs other than {left_out}" if left_out else f"measured runs: {others}"
        interval = learnt.interval(left_out)
        client_ms = most_of_one_more([ms for name, ms in late_ms.items() if name != left_out])
        found[left_out] = calibration_of(logs, source, interval, client_ms)
        if say:
            print(f"{source}: {interval}, {client_ms:.1f} ms of a client", flush=True)
    return found


@dataclass(frozen=True)
class Linearised:
    """The figures' log errors `at` the numbers `logs`, their `slopes` there, and which figures are of which source."""

    at: Floats
    slopes: Floats
    logs: Floats
    source: NDArray[np.str_]
    is_tpot: NDArray[np.bool_]

    @property
    def sources(self) -> list[str]:
        return sorted(set(self.source.tolist()))

    def without(self, *left_out: str) -> Floats:
        """The numbers that all sources but these teach: one step of Gauss and Newton's from `logs`.

        Every source weighs the same, large errors less.
        """
        used = ~np.isin(self.source, left_out)
        spread = np.array([sd for _, sd in _PRIORS.values()])
        names, count = np.unique(self.source[used], return_counts=True)
        share = dict(zip(names.tolist(), (1.0 / np.sqrt(count)).tolist(), strict=True))
        weight = np.array([share.get(name, 0.0) for name in self.source.tolist()]) / _NOISE
        weight *= np.sqrt(1.0 / (1.0 + (self.at / _OUTLIER) ** 2)) * used * np.sqrt(np.median(count))
        rows = np.vstack([self.slopes * weight[:, None], np.diag(1.0 / spread)])
        wanted = np.concatenate([-(self.at - self.slopes @ self.logs) * weight, np.zeros(len(self.logs))])
        solution: Floats = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        return np.clip(solution, self.logs - 1.0, self.logs + 1.0)

    def interval(self, left_out: str) -> StepInterval:
        """How far off a further source may be, by all but `left_out`, each of them predicted by the rest.

        TPOT tells of decode steps, TTFT of prompts. An error counts as that of the step times behind it, as queueing
        near saturation multiplies it. All numbers are times or factors of times, so that the sum of a figure's slopes
        is what it does when every step takes longer.
        """
        amplified = np.maximum(self.slopes.sum(axis=1), 1.0)
        of_decode, of_prompts = {}, {}
        for name in self.sources:
            if name != left_out:
                missed = (self.at + self.slopes @ (self.without(name, left_out) - self.logs)) / amplified
                theirs = self.source == name
                of_decode[name], of_prompts[name] = missed[theirs & self.is_tpot], missed[theirs & ~self.is_tpot]
        return StepInterval(factors_of(reach(of_decode)), factors_of(reach(of_prompts)))


def _linearised(taken: Sequence[Lesson], logs: Floats) -> Linearised:
    at = log_errors(taken, logs)
    slopes = np.column_stack([(log_errors(taken, logs + _STEP * unit) - at) / _STEP for unit in np.eye(len(logs))])
    source = np.array([lesson.source for lesson in taken for _ in lesson.figures])
    is_tpot = np.array([name.startswith("tpot") for lesson in taken for name in lesson.figures])
    return Linearised(at, slopes, logs, source, is_tpot)


def _late_ms(taken: Sequence[Lesson], numbers: Mapping[str, Floats]) -> dict[str, float]:
    """By how much the TTFT of a source's client is longer than predicted by what the other sources taught, on average.

    Of the quarter of its runs with the shortest TTFT: a long one says nothing of the client.
    """
    found = {}
    for source in dict.fromkeys(lesson.source for lesson in taken):
        unloaded = [each for each in taken if each.source == source and each.run.by_client and not each.run.or_workload]
        unloaded.sort(key=_ttft_ms)
        shortest = [each for each in unloaded[: max(len(unloaded) // 4, 1)] if _ttft_ms(each) < _SHORT_TTFT_MS]
        calibration = calibration_of(numbers[source], "")
        late_ms = [_ttft_ms(each) - _simulated(each, calibration)["ttft_ms.mean"] for each in shortest]
        if late_ms:
            found[source] = float(np.mean(late_ms))
    return found


def _ttft_ms(lesson: Lesson) -> float:
    return lesson.run.figures.get("ttft_ms.mean", np.inf)


def save(found: Mapping[str, ExternalCalibration], path: Path) -> None:
    """Write the file that `calibration.steps.predict.blind` reads."""
    path.write_text(json.dumps({name: asdict(c) for name, c in found.items()}, indent=1) + "\n", encoding="utf-8")


def numbers_of(known: ExternalCalibration) -> Floats:
    """What `calibration_of` was given."""
    value: dict[str, float] = {**known.correction.factors, **known.correction.added_ns}
    value |= {"compute": known.correction.factors[COMPUTE[0]]}
    value |= {"host step": known.host.step_ns, "host row": known.host.row_ns}
    return np.log([value[name] / prior for name, (prior, _) in _PRIORS.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="../shared/data", type=Path)
    parser.add_argument("--write", default=Path(__file__).parents[2] / "steps" / "blind.json", type=Path)
    parser.add_argument("--keep", action="store_true", help="Keep the bundled numbers, and only learn their errors.")
    given = parser.parse_args()
    taken = lessons(load_cases(), given.data)
    if given.keep:
        names = ["", *sorted({lesson.source for lesson in taken})]
        numbers = {name: numbers_of(blind(without=name)) for name in names}
    else:
        numbers = teach(taken, say=True)
    found = calibrations(taken, numbers, say=True)
    save(found, given.write)
    for name, value in {
        **found[""].correction.factors,
        **found[""].correction.added_ns,
        **vars(found[""].host),
    }.items():
        print(f"{name:24} {value:,.3f}")


if __name__ == "__main__":
    main()
