"""The metrics of the steps of a recorded run: one value a step, in the order of the dataset `steps`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from traces.numeric_columns import Floats, has_value, known, known_or_zero, ratio, stored, weighted_mean
from traces.recording import Recording
from traces.step_work import COLUMNS as WORK_COLUMNS
from traces.step_work import StepWork

STEP_METRICS = ("step_ms", "batch_tokens", "running", "waiting", "kv_usage", "kv_pressure", "mfu", "mbu")
COLUMNS = [
    "replica", "start_ns", "end_ns", "prefill_tokens", "decode_rows", "running", "waiting", "used_blocks",
    "waiting_blocks",
]  # fmt: skip
RARE_COLUMNS = ["stages_ns", "draft_tokens", "longest_free_blocks"]  # of most runs null throughout
_PIECE = 1 << 18  # steps whose work is computed at once: touching memory for millions takes longer than the sums


class _Used(NamedTuple):
    """Of what the GPUs could do at most, the share that each step used, and the seconds of it that all steps did."""

    shares: Floats
    seconds: float | None


class StepMetrics:
    """Of the table `steps`, with `COLUMNS` and whichever of `RARE_COLUMNS`; without a table, of no step.

    Without `work`, MFU and MBU are not known. What that follows from is read from `recording`, or is in the table.
    """

    def __init__(
        self,
        steps: pa.Table | None,
        num_blocks: float | None,
        work: StepWork | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._steps = steps
        self._work = work
        self._recording = recording
        self._num_blocks = float(num_blocks or math.nan)

    def values(self, name: str) -> Floats:
        """The values of one of STEP_METRICS; NaN where a step has none."""
        if self._steps is None:
            return np.empty(0)
        of = self._column
        match name:
            case "step_ms":
                return self._step_ms
            case "batch_tokens":
                tokens = np.add(of("prefill_tokens"), of("decode_rows"), dtype=np.float64)
                tokens += known_or_zero(self._steps, "draft_tokens")
                return tokens
            case "kv_usage":
                return of("used_blocks") / self._num_blocks
            case "kv_pressure":
                demanded = np.add(of("used_blocks"), of("waiting_blocks"), dtype=np.float64)
                return np.divide(demanded, self._num_blocks, out=demanded)
            case "mfu" | "mbu":
                return self._used[name].shares
            case _:
                return of(name).astype(np.float64, copy=False)

    def at(self, rows: NDArray[np.int64]) -> StepMetrics:
        """The metrics of these steps alone, but for their work."""
        return StepMetrics(None if self._steps is None else self._steps.take(pa.array(rows)), self._num_blocks)

    def mean(self, name: str, weigh: bool = True) -> float | None:
        """Of the steps that have a value, each weighing as long as it took, if that is told; None without any."""
        count, sums = 0, np.zeros(3)
        for values, step_ms in self._by_pieces(name):
            filled = ~(np.isnan(values) | np.isnan(step_ms))
            if not filled.all():
                values, step_ms = values[filled], step_ms[filled]
            count += len(values)
            sums += values.sum(), (values * step_ms).sum(), step_ms.sum()
        if not count:
            return None
        return float(sums[1] / sums[2] if weigh and sums[2] > 0 else sums[0] / count)

    def peak(self, name: str) -> float | None:
        """The highest value of any step."""
        peaks = [float(found.max()) for values, _ in self._by_pieces(name) if len(found := known(values))]
        return max(peaks, default=None)

    def _by_pieces(self, name: str) -> Iterator[tuple[Floats, Floats]]:
        """Values of a metric and of `step_ms`, of some steps at a time: those of millions would fill the memory."""
        steps = pa.table({}) if self._steps is None else self._steps
        for first in range(0, steps.num_rows, _PIECE):
            piece, alone = slice(first, first + _PIECE), StepMetrics(steps.slice(first, _PIECE), self._num_blocks)
            yield self.values(name)[piece] if name in ("mfu", "mbu") else alone.values(name), self._step_ms[piece]

    def used_s(self, name: str) -> float | None:
        """The seconds that all GPUs would take for all steps at their peak: of FLOPs (`mfu`) or memory (`mbu`).

        None where the work or the peak is not known.
        """
        return self._used[name].seconds

    @cached_property
    def _used(self) -> dict[str, _Used]:
        shares = np.full((2, 0 if self._steps is None else self._steps.num_rows), math.nan)
        seconds: list[float | None] = [None, None]
        at, work = 0, self._work
        for piece in self._pieces() if work is not None else ():
            assert work is not None
            under_way_s = self.under_way_ms[at : at + piece.num_rows] / 1e3
            flops_s, moved_s = work.flops(piece) / work.flop_per_s, work.moved_bytes(piece) / work.bytes_per_s
            for kind, used_s in enumerate((flops_s, moved_s)):
                shares[kind, at : at + piece.num_rows] = ratio(used_s, under_way_s)
                if len(told := known(used_s)):
                    seconds[kind] = (seconds[kind] or 0.0) + float(told.sum())
            at += piece.num_rows
        return {name: _Used(*of) for name, *of in zip(("mfu", "mbu"), shares, seconds, strict=True)}

    def _pieces(self) -> Iterator[pa.Table]:
        """What the work of the steps follows from, of some of them at a time."""
        if self._recording is not None:
            rows = self._recording.group_rows("steps")
            before = [0, *accumulate(rows)]
            for _, groups in groupby(range(len(rows)), key=lambda group: before[group] // _PIECE):
                yield self._recording.table("steps", WORK_COLUMNS, list(groups))
        elif self._steps is not None:
            yield from (self._steps.slice(at, _PIECE) for at in range(0, self._steps.num_rows, _PIECE))

    @cached_property
    def _step_ms(self) -> Floats:
        taken = np.subtract(self._column("end_ns"), self._column("start_ns"), dtype=np.float64)
        return np.divide(taken, 1e6, out=taken)

    @cached_property
    def under_way_ms(self) -> Floats:
        """Of each step, the time in which no step before it on its replica was under way still.

        Steps of a replica start and end in order; only in a pipeline do they overlap.
        """
        if self._stages_ns is None:
            return self.values("step_ms")
        start, end, replica = (self._column(name) for name in ("start_ns", "end_ns", "replica"))
        order = np.lexsort((start, replica))
        follows = np.diff(replica[order], prepend=np.nan) == 0
        before = np.where(follows, np.concatenate(([0.0], end[order][:-1])), 0.0)
        own = np.empty(len(start))
        own[order] = end[order] - np.maximum(start[order], before)
        return own / 1e6

    def pipeline_bubble(self) -> float | None:
        """Idle share of stage time while a step is under way (Huang et al., "GPipe", 2019); None without stages."""
        if self._stages_ns is None:
            return None
        stages = pc.cast(pc.list_value_length(self._stages_ns), pa.float64()).to_numpy()
        worked = pc.sum(pc.list_flatten(self._stages_ns)).as_py()
        return 1.0 - worked / 1e6 / float(np.nansum(stages * self.under_way_ms))

    def external_fragmentation(self) -> float | None:
        """1 - longest free run / free blocks, each step weighing as long as it took; None where KV is paged."""
        if self._steps is None or not has_value(self._steps, "longest_free_blocks"):
            return None
        free = self._num_blocks - self._column("used_blocks")
        scattered = free - self._column("longest_free_blocks")
        shares = np.divide(scattered, free, out=np.zeros(len(free)), where=free > 0)
        return weighted_mean(shares, self._step_ms)

    @property
    def _stages_ns(self) -> pa.ChunkedArray | None:
        """Each step's time on each stage; None where no step was on several."""
        if self._steps is None or not has_value(self._steps, "stages_ns"):
            return None
        return self._steps.column("stages_ns")

    def _column(self, name: str) -> NDArray[Any]:
        return stored(self._steps, name)
