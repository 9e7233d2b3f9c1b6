"""Measured configurations with their predictions, and the measured rows that cannot be used, with reasons.

A closed loop of N requests in flight serves N requests in the time that one request takes (Little's law). That gives
the throughput from TTFT and TPOT, measured or predicted.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import NamedTuple

from lab.external.leave_out import Scored, leave_out
from lab.external.silicon_table import SiliconTable
from tokentwin.calibration.steps.evidence import bundled_evidence
from tokentwin.calibration.validation.external.case import Case
from tokentwin.calibration.validation.external.predicted_run import FIGURES, PredictedRun, predicted_run
from tokentwin.serving.errors import UserError

TABLES = "aiconfigurator/silicon_sample_*.csv"


class Times(NamedTuple):
    """Mean latencies in milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Configuration:
    """One deployment at one concurrency.

    Attributes:
        lengths: nominal prompt and output tokens of a request
        requests: number of requests in flight
        gpus: number of GPUs
        low, blind, high: prediction without this source's runs (`blind`), and the ends of its 90 % interval
        roofline: prediction with every operation as fast as the datasheet allows
        row: the measured run, for predictions with other evidence
    """

    run: str
    model: str
    gpu: str
    lengths: tuple[int, int]
    requests: int
    gpus: int
    measured: Times
    low: Times
    blind: Times
    high: Times
    roofline: Times
    row: PredictedRun | None = field(default=None, compare=False, repr=False)

    def throughput(self, times: Times) -> float:
        """Return the output tokens a second per GPU."""
        output = self.lengths[1]
        e2e_s = (times.ttft_ms + (output - 1) * times.tpot_ms) / 1e3
        return self.requests * output / e2e_s / self.gpus


class Usable(NamedTuple):
    """The configurations that can be used, and the number of measured rows that were left out, by reason."""

    used: list[Configuration]
    left_out: Counter[str]


def configurations(
    cases: Sequence[Case], data: Path, tell: Callable[[str, float], None] = lambda stage, share: None
) -> Usable:
    """Return the configurations in the tables under `data` that a case describes; raise UserError if there are none.

    Predictions are those of `leave_out` by source: sums over steps, from one simulation for all runs with equal
    requests.
    """
    taken: list[PredictedRun] = []
    left_out, described = Counter[str](), set()
    tables = [case for case in cases if not case.is_of_steps and isinstance(case.format, SiliconTable)]
    for number, case in enumerate(tables):
        runs = list(case.format.read(data))
        for at, run in enumerate(runs):
            tell(case.name, (number + at / len(runs)) / len(tables))
            described.add(run.name)
            if run.caution:
                left_out["its case warns of the measurement itself"] += 1
                continue
            try:
                taken.append(predicted_run(case, run))
            except UserError as error:
                left_out[error.remedy] += 1  # without the run's name, so that equal reasons are counted together
    scored: dict[str, list[Scored]] = {}
    for prediction in leave_out(taken, bundled_evidence(), "source"):
        scored.setdefault(prediction.run.measured_run.name, []).append(prediction)
    used = [_configuration(predictions) for predictions in scored.values() if len(predictions) == len(FIGURES)]
    left_out.update(_undescribed(data, described))
    if not used:
        raise UserError("data", str(data), f"holds no measured configuration that a case describes ({TABLES})")
    return Usable(_once(used, left_out), left_out)


def _configuration(scored: Sequence[Scored]) -> Configuration:
    by_figure = {one.figure: one for one in scored}
    both = [by_figure[figure] for figure in ("ttft_ms.mean", "tpot_ms.mean")]
    run = both[0].run
    slots, lengths, deployment = run.measured_run.workload.concurrency, run.measured_run.lengths, run.deployment
    assert slots is not None and lengths is not None  # a closed loop, as every row of such a table
    engines = sum(pool.replicas for pool in deployment.fleet.pools) if deployment.fleet else 1
    ideal = dict(zip(run.figures, run.at_roofline().tolist(), strict=True))
    low, blind, high = (Times(*(one.predicted * exp(end * one.reach) for one in both)) for end in (-1, 0, 1))
    return Configuration(
        run=run.measured_run.name,
        model=deployment.model,
        gpu=run.gpu,
        lengths=lengths,
        requests=slots if deployment.fleet else slots * deployment.data_parallel_size,
        gpus=engines * deployment.gpus,
        measured=Times(*(run.measured_run.figures[one.figure] for one in both)),
        low=low,
        blind=blind,
        high=high,
        roofline=Times(*(ideal[one.figure] for one in both)),
        row=run,
    )


def _once(rows: Sequence[Configuration], left_out: Counter[str]) -> list[Configuration]:
    """Return each row once, even if it was written twice."""
    kept = {(c.model, c.gpu, c.lengths, c.requests, c.gpus, c.measured): c for c in reversed(rows)}
    left_out["written twice, to the last digit"] += len(rows) - len(kept)
    return list(reversed(kept.values()))


def _undescribed(data: Path, described: set[str]) -> Iterator[str]:
    """Yield, for each row of the tables that no case describes, the reason."""
    for path in sorted(data.glob(TABLES)):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["id"] in described:
                    continue
                if row["mode"] != "agg":
                    yield "prefill and decode on workers of their own"
                else:
                    yield f"no case says how {row['backend']} ran {row['model_path']} in {row['precision']}"
