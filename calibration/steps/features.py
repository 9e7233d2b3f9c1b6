"""What the time of a step depends on, by name.

The same quantities from a plan (to predict) and from the `steps` of a recording (to fit). Two parts are timed
apart: the *step*, from launch to tokens, and the *cpu* work between steps: taking tokens in, scheduling, making
tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from calibration.operations import StepSizes
from serving.deployments.decode_buckets import padded
from serving.errors import UserError
from serving.step_plan import AGGREGATES, StepPlan

Floats = NDArray[np.float64]

STEP_FEATURES = {
    "launch": "every step",
    "decode_rows_padded": "decode rows after padding to a bucket",
    "decode_context": "KV tokens read by decode rows",
    "prefill_rows": "prompts in the step",
    "prefill_tokens": "prompt tokens in the step",
    "prefill_context": "KV tokens read by prompts",
    "prefill_pairs": "query-key pairs of prompts",
    "sampling": "every step",
    "sampled_rows": "rows that get a token",
}
SAMPLING = slice(7, 9)  # the features of sampling, which a real engine times apart
CPU_FEATURES = {
    "plan": "every step",
    "rows": "requests in the step",
    "prefill_tokens": "prompt tokens in the step",
}
_ON_EITHER_SIDE = 2
REGIMES = ("prefill", "decode", "mixed")


def step_features(step: StepPlan | StepSizes, rows: Any) -> tuple[Any, ...]:
    """STEP_FEATURES of one plan, or of many steps, in order; `rows` are the decode rows after padding."""
    return (
        1,
        rows,
        step.decode_context + rows,
        step.prefill_rows,
        step.prefill_tokens,
        step.prefill_context + step.prefill_tokens,
        step.prefill_pairs,
        1,
        step.sampled_rows,
    )


def cpu_features(step: StepPlan | StepSizes) -> tuple[Any, ...]:
    """CPU_FEATURES of one plan, or of many steps, in order."""
    return (1, step.decode_rows + step.prefill_rows, step.prefill_tokens)


def regimes(sizes: StepSizes) -> NDArray[np.int64]:
    """Index into REGIMES of every step."""
    prompts, rows = np.asarray(sizes.prefill_tokens), np.asarray(sizes.decode_rows)
    return np.where(prompts > 0, np.where(rows > 0, 2, 0), 1)


def recorded_sizes(steps: pa.Table) -> StepSizes:
    """The steps of a recording, as arrays. How uneven decode rows were is not recorded; they are taken for equal."""
    return StepSizes(**{name: pc.fill_null(steps[name].cast(pa.float64()), 0.0).to_numpy() for name in AGGREGATES})


def feature_rows(sizes: StepSizes) -> Floats:
    """STEP_FEATURES of many steps, `[steps, len(STEP_FEATURES)]`."""
    rows = np.array([padded(int(n)) for n in sizes.decode_rows], dtype=np.float64)
    return _columns(step_features(sizes, rows))


def _columns(features: tuple[Any, ...]) -> Floats:
    return np.column_stack(np.broadcast_arrays(*features)).astype(np.float64)


def _around(values: Floats) -> Floats:
    """The mean of each and of up to two on either side."""
    until = np.concatenate(([0.0], np.cumsum(values)))
    place = np.arange(len(values))
    first, last = np.maximum(place - _ON_EITHER_SIDE, 0), np.minimum(place + _ON_EITHER_SIDE + 1, len(values))
    return (until[last] - until[first]) / (last - first)


class MeasuredSteps:
    """The steps of recordings, one after the other, as arrays.

    step, cpu        features `[steps, len(STEP_FEATURES)]` and `[steps, len(CPU_FEATURES)]`
    step_ns, cpu_ns  measured times `[steps]`; cpu_ns is NaN after an idle gap, where nothing was waiting for it
    own_ns           of step_ns, CPU time of the thread that computed it `[steps]`; all of it where that is not recorded
    speed            of the machine around the step, as recorded there and in two steps on either side, in the geometric
                     mean `[steps]`: a single look is too noisy; 1 where it is not recorded
    sample_ns        of step_ns, the time spent sampling `[steps]`; NaN where it was not timed apart
    regime           index into REGIMES `[steps]`
    recording        which of the recordings a step is of `[steps]`
    """

    def __init__(self, tables: list[pa.Table], idle_ns: int = 5_000_000) -> None:
        parts = [_Measured(table, idle_ns) for table in tables if table.num_rows]
        if not parts:
            raise UserError("steps", 0, "the recordings hold no step; check whether all requests were rejected")
        self.step: Floats = np.concatenate([p.step for p in parts])
        self.cpu: Floats = np.concatenate([p.cpu for p in parts])
        self.step_ns: Floats = np.concatenate([p.step_ns for p in parts])
        self.cpu_ns: Floats = np.concatenate([p.cpu_ns for p in parts])
        self.own_ns: Floats = np.concatenate([p.own_ns for p in parts])
        self.speed: Floats = np.concatenate([p.speed for p in parts])
        self.sample_ns: Floats = np.concatenate([p.sample_ns for p in parts])
        self.regime: NDArray[np.int64] = np.concatenate([p.regime for p in parts])
        self.recording: NDArray[np.int64] = np.repeat(np.arange(len(parts)), [len(p.step_ns) for p in parts])

    def __len__(self) -> int:
        return len(self.step_ns)


class _Measured:
    """One recording's steps."""

    def __init__(self, table: pa.Table, idle_ns: int) -> None:
        def column(name: str) -> Floats:
            if name not in table.column_names:  # of a recording that is older than the column
                return np.full(table.num_rows, np.nan)
            return table.column(name).to_numpy().astype(np.float64)

        sizes = recorded_sizes(table)
        self.step, self.cpu = feature_rows(sizes), _columns(cpu_features(sizes))
        self.regime = regimes(sizes)
        start, end, plan = column("start_ns"), column("end_ns"), column("plan_ns")
        self.step_ns = end - start
        own, speed = column("thread_ns"), column("speed")
        self.own_ns = np.where(np.isnan(own), self.step_ns, own)
        self.speed = np.exp(_around(np.log(np.where(np.isnan(speed), 1.0, speed))))
        self.sample_ns = column("sample_ns")
        before = np.concatenate(([np.nan], end[:-1]))
        idle = np.concatenate(([True], plan[1:] - end[:-1] > idle_ns))
        host = column("host_ns")
        between = np.where(idle, np.nan, start - before)  # in the plain loop the device waits for the host
        self.cpu_ns = np.where(np.isnan(host), between, host)
