"""A calibration from a per-iteration log: the fitted correction, and its errors on held-out steps.

Neighbouring steps are alike, so a whole stretch of time is held out: a fit to the first and the last third of the log
is scored on the middle third.

A per-iteration log has a row for each engine step, as written by aiconfigurator's collector for vLLM. The columns are
the numbers of prompts and of decode rows, their KV tokens, and the step's latency. The log does not say how the prompt
tokens of a step are divided among its prompts, so the prompts are assumed to be equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from tokentwin.calibration.operations import KernelTimes, StepSizes
from tokentwin.calibration.steps.correction import Correction, fit_correction, step_parts
from tokentwin.calibration.steps.external_calibration import ExternalCalibration
from tokentwin.calibration.steps.features import REGIMES, regimes
from tokentwin.calibration.steps.interval import REACH
from tokentwin.calibration.steps.operation_cost import HostTimes
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings

_COLUMNS = (
    "sum_prefill_tokens",
    "num_prefill_requests",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
    "var_decode_kv_tokens",
    "latency_ms",
)


class StepLog(Settings):
    """The entry of a per-iteration log in a case file."""

    format: Literal["iteration-log"]
    file: str


@dataclass(frozen=True)
class IterationLog:
    """Measured steps in order of time: their sizes and their times in ns, `[steps]`."""

    sizes: StepSizes
    measured_ns: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.measured_ns)

    def take(self, chosen: NDArray[np.bool_]) -> IterationLog:
        """Return the steps for which `chosen` is True."""
        fields = {name: value[chosen] if np.ndim(value) else value for name, value in vars(self.sizes).items()}
        return IterationLog(StepSizes(**fields), self.measured_ns[chosen])


def read_iteration_log(path: str | Path) -> IterationLog:
    """Read a CSV (or .csv.gz) log; raise UserError with the file's name if it is not valid."""
    try:
        table = csv.read_csv(Path(path))
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError("iteration log", str(path), f"cannot be read: {str(error).splitlines()[0]}") from None
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise UserError("iteration log", str(path), f"has no column {missing[0]}; is it a per-iteration log?")
    try:
        column = {name: table.column(name).to_numpy().astype(np.float64) for name in _COLUMNS}
    except (ValueError, pa.ArrowInvalid) as error:
        raise UserError("iteration log", str(path), f"has a value that is not a number: {error}") from None
    timed = (column["latency_ms"] > 0) & (column["sum_prefill_tokens"] + column["num_decode_requests"] > 0)
    column = {name: values[timed] for name, values in column.items()}
    if not timed.any():
        raise UserError("iteration log", str(path), "holds no step with tokens and a latency")
    prompts = np.maximum(column["num_prefill_requests"], 1.0)
    tokens, past = column["sum_prefill_tokens"], column["sum_prefill_kv_tokens"]
    mean = tokens / prompts
    sizes = StepSizes(
        prefill_rows=column["num_prefill_requests"],
        prefill_tokens=tokens,
        prefill_context=past,
        prefill_pairs=tokens * past / prompts + prompts * mean * (mean + 1) / 2,
        decode_rows=column["num_decode_requests"],
        decode_context=np.maximum(column["sum_decode_kv_tokens"] - column["num_decode_requests"], 0.0),
        decode_spread=np.sqrt(np.maximum(column["var_decode_kv_tokens"], 0.0)),
        sampled_rows=column["num_decode_requests"] + column["num_prefill_requests"],
        draft_tokens=np.zeros_like(tokens),
    )
    return IterationLog(sizes, 1e6 * column["latency_ms"])


_STRETCHES = 5


@dataclass(frozen=True)
class StepErrors:
    """Errors of one regime's held-out steps in percent: absolute errors, and the error of their total time (bias)."""

    steps: int
    median_pct: float
    p95_pct: float
    bias_pct: float


class PricedLog:
    """A log with the uncorrected parts of every step; a correction can be fitted to some steps and scored on others."""

    def __init__(self, log: IterationLog, model: ModelSpec, deployment: Deployment, kernels: KernelTimes) -> None:
        self.log = log
        self.parts = step_parts(model, deployment, kernels, log.sizes)

    def fit(self, chosen: NDArray[np.bool_], source: str) -> Correction:
        """Fit a correction to the steps for which `chosen` is True."""
        log = self.log.take(chosen)
        parts = {name: ns[chosen] for name, ns in self.parts.items()}
        return fit_correction(parts, log.sizes, log.measured_ns, source)

    def predict(self, correction: Correction, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the predicted nanoseconds of each chosen step."""
        parts = {name: ns[chosen] for name, ns in self.parts.items()}
        return np.sum(list(correction.apply(parts, self.log.take(chosen).sizes).values()), axis=0)

    def score(self, correction: Correction, chosen: NDArray[np.bool_]) -> dict[str, StepErrors]:
        """Return the errors of the chosen steps for each regime that has steps."""
        log = self.log.take(chosen)
        predicted, regime = self.predict(correction, chosen), regimes(log.sizes)
        errors = {}
        for index, name in enumerate(REGIMES):
            mine = regime == index
            if mine.any():
                error = 100 * np.abs(predicted[mine] / log.measured_ns[mine] - 1)
                total = log.measured_ns[mine].sum()
                errors[name] = StepErrors(
                    steps=int(mine.sum()),
                    median_pct=float(np.median(error)),
                    p95_pct=float(np.percentile(error, 95)),
                    bias_pct=float(100 * (predicted[mine].sum() / total - 1)),
                )
        return errors


def middle_third(log: IterationLog) -> NDArray[np.bool_]:
    """Return a mask of the steps in the middle third of the log in time."""
    return np.asarray(np.arange(len(log)) * 3 // len(log) == 1)


def calibrate_from_log(
    log: IterationLog,
    gpu: str,
    model: ModelSpec,
    deployment: Deployment,
    kernels: KernelTimes,
    source: str,
    created: str,
) -> ExternalCalibration:
    """Return the calibration of the engine that wrote `log`; raise UserError if the log is too short."""
    priced = PricedLog(log, model, deployment, kernels)
    middle = middle_third(log)
    scored = priced.score(priced.fit(~middle, "first and last third"), middle)
    residuals = {name: {**asdict(errors), "steps": float(errors.steps)} for name, errors in scored.items()}
    everything = np.ones(len(log), dtype=np.bool_)
    return ExternalCalibration(
        gpu=gpu,
        deployment=deployment.model_dump_json(),
        correction=priced.fit(everything, source),
        host=HostTimes(),  # a logged latency is the time from step to step, so it includes visible CPU time
        interval=_interval(priced),
        source=source,
        created=created,
        residuals=residuals,
    )


def _interval(priced: PricedLog) -> tuple[float, float]:
    """Return the interval of total times, from fifths of the log that were predicted from the other fifths."""
    stretch = np.arange(len(priced.log)) * _STRETCHES // len(priced.log)
    logs = []
    for index in range(_STRETCHES):
        mine = stretch == index
        predicted = priced.predict(priced.fit(~mine, ""), mine)
        logs.append(np.log(priced.log.measured_ns[mine].sum() / predicted.sum()))
    reach = float(REACH * np.sqrt(np.mean(np.square(logs)) * (1 + 1 / _STRETCHES)))
    return float(np.exp(-reach)), float(np.exp(reach))
