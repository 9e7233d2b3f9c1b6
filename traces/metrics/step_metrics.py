"""The metrics of the steps of a recorded run: one value a step, in the order of the dataset `steps`.

A run has many steps, so columns are read in pieces, and memory holds no more than two numbers of each step.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from traces.metrics.distribution import Distribution
from traces.metrics.memory_tables import Datasets, MemoryTables
from traces.metrics.step_work import BYTES_OF, FLOPS_OF, StepWork
from traces.numeric_columns import Floats, known, known_or_zero, ratio, stored, weighted_mean

STEP_METRICS = ("step_ms", "batch_tokens", "running", "waiting", "kv_usage", "kv_pressure", "mfu", "mbu")
_COLUMNS = {  # columns that each metric is computed from
    "step_ms": ["start_ns", "end_ns"],
    "batch_tokens": ["prefill_tokens", "decode_rows", "draft_tokens"],
    "running": ["running"],
    "waiting": ["waiting"],
    "kv_usage": ["used_blocks"],
    "kv_pressure": ["used_blocks", "waiting_blocks"],
    "mfu": FLOPS_OF,
    "mbu": BYTES_OF,
}
_RARE_COLUMNS = ["stages_ns", "draft_tokens", "longest_free_blocks"]  # null throughout in most runs
_PIECE = 1 << 18  # steps at a time: touching memory for millions takes longer than the sums


class StepSummary(NamedTuple):
    """The distribution of a metric over the steps, and its mean weighted by step duration (None without values)."""

    distribution: Distribution
    by_time: float | None


class StepMetrics:
    """The metrics of the dataset `steps`. Without `work`, MFU and MBU are not known."""

    def __init__(self, run: Datasets, num_blocks: float | None, work: StepWork | None = None) -> None:
        self._run = run
        self._work = work
        self._num_blocks = float(num_blocks or math.nan)
        self._summaries: dict[str, StepSummary] = {}
        self._seconds: dict[str, float | None] = {}

    @property
    def count(self) -> int:
        return self._run.rows("steps")

    @cached_property
    def _rare(self) -> list[str]:
        return self._run.filled("steps", _RARE_COLUMNS)

    def values(self, name: str) -> Floats:
        """Return the values of one of STEP_METRICS; NaN where a step has none."""
        if name == "step_ms":
            return self._step_ms
        return self._used(name) if name in ("mfu", "mbu") else self._made(name)

    def _made(self, name: str) -> Floats:
        values, at = np.empty(self.count), 0
        for piece in self._run.pieces("steps", self._columns(name), _PIECE):
            values[at : at + piece.num_rows] = self._of(name, piece)
            at += piece.num_rows
        return values

    def _columns(self, *metrics: str) -> list[str]:
        names = dict.fromkeys(name for metric in metrics for name in _COLUMNS[metric])
        return [name for name in names if name not in _RARE_COLUMNS or name in self._rare]

    def _of(self, name: str, steps: pa.Table) -> NDArray[Any]:
        match name:
            case "step_ms":
                return np.subtract(stored(steps, "end_ns"), stored(steps, "start_ns"), dtype=np.float64) / 1e6
            case "batch_tokens":
                tokens = np.add(stored(steps, "prefill_tokens"), stored(steps, "decode_rows"), dtype=np.float64)
                return tokens + known_or_zero(steps, "draft_tokens")
            case "kv_usage":
                return stored(steps, "used_blocks") / self._num_blocks
            case "kv_pressure":
                demanded = np.add(stored(steps, "used_blocks"), stored(steps, "waiting_blocks"), dtype=np.float64)
                return demanded / self._num_blocks
            case _:
                return stored(steps, name)

    def at_rows(self, rows: NDArray[np.int64]) -> StepMetrics:
        """Return the metrics of the steps in these rows alone, without MFU and MBU."""
        steps = self._run.table("steps", self._columns(*STEP_METRICS[:-2])).take(pa.array(rows))
        return StepMetrics(MemoryTables(steps=steps), self._num_blocks)

    def summary(self, name: str, values: Floats | None = None) -> StepSummary:
        """Return the summary of one of STEP_METRICS; `values` are its values, if the caller has them."""
        if name not in self._summaries:
            spent = values is None and name != "step_ms"
            made = self.values(name) if values is None else values
            count, sums = 0, np.zeros(3)
            for first in range(0, len(made), _PIECE):
                part, step_ms = made[first : first + _PIECE], self._step_ms[first : first + _PIECE]
                if math.isnan(weighed := float((part * step_ms).sum())):
                    filled = ~(np.isnan(part) | np.isnan(step_ms))
                    part, step_ms = part[filled], step_ms[filled]
                    weighed = float((part * step_ms).sum())
                count += len(part)
                sums += part.sum(), weighed, step_ms.sum()
            by_time = float(sums[1] / sums[2] if sums[2] > 0 else sums[0] / count) if count else None
            self._summaries[name] = StepSummary(Distribution.from_values(made, spent), by_time)
        return self._summaries[name]

    def used_s(self, name: str) -> float | None:
        """Return the seconds that all GPUs would need for all steps at their peak of FLOPs (`mfu`) or memory (`mbu`).

        None if the work or the peak is not known.
        """
        if name not in self._seconds:
            self.summary(name)
        return self._seconds[name]

    def _used(self, name: str) -> Floats:
        """Return the share of the GPUs' peak that each step used, and note the seconds for `used_s`."""
        shares, at, work = np.full(self.count, math.nan), 0, self._work
        seconds = None
        for piece in self._run.pieces("steps", self._columns(name), _PIECE) if work is not None else ():
            assert work is not None
            flops = name == "mfu"
            used_s = work.flops(piece) / work.flop_per_s if flops else work.moved_bytes(piece) / work.bytes_per_s
            shares[at : at + piece.num_rows] = ratio(used_s, self.under_way_ms[at : at + piece.num_rows] / 1e3)
            at += piece.num_rows
            if len(known_s := known(used_s)):
                seconds = (seconds or 0.0) + float(known_s.sum())
        self._seconds[name] = seconds
        return shares

    @cached_property
    def _step_ms(self) -> Floats:
        return self._made("step_ms")

    @cached_property
    def under_way_ms(self) -> Floats:
        """The time of each step in which no earlier step of its replica was still under way.

        Steps of a replica start and end in order; they overlap only in a pipeline.
        """
        if "stages_ns" not in self._rare:
            return self._step_ms
        start, end, replica = (self._column(name) for name in ("start_ns", "end_ns", "replica"))
        order = np.lexsort((start, replica))
        follows = np.diff(replica[order], prepend=np.nan) == 0
        before = np.where(follows, np.concatenate(([0.0], end[order][:-1])), 0.0)
        own = np.empty(len(start))
        own[order] = end[order] - np.maximum(start[order], before)
        return own / 1e6

    def pipeline_bubble(self) -> float | None:
        """Return the idle share of stage time while a step is under way; None without stages.

        Source: Huang et al., "GPipe", 2019.
        """
        if "stages_ns" not in self._rare:
            return None
        stages_ns = self._run.table("steps", ["stages_ns"]).column(0)
        stages = pc.cast(pc.list_value_length(stages_ns), pa.float64()).to_numpy()
        worked = pc.sum(pc.list_flatten(stages_ns)).as_py()
        return 1.0 - worked / 1e6 / float(np.nansum(stages * self.under_way_ms))

    def external_fragmentation(self) -> float | None:
        """Return 1 - longest free run / free blocks, weighted by step duration; None if KV is paged."""
        if "longest_free_blocks" not in self._rare:
            return None
        free = self._num_blocks - self._column("used_blocks")
        scattered = free - self._column("longest_free_blocks")
        shares = np.divide(scattered, free, out=np.zeros(len(free)), where=free > 0)
        return weighted_mean(shares, self._step_ms)

    def _column(self, name: str) -> NDArray[Any]:
        return stored(self._run.table("steps", [name]), name)
