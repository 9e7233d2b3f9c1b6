"""The two sides of a comparison, request by request: the same workload, served twice.

A side is one run or several. Several runs have different seeds, or repeat one workload. Runs with different seeds are
independent of one another. Runs of one workload share its arrivals and are not independent, so a block holds the
requests of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.planning.compare.unit_bootstrap import FEWEST_UNITS, Floats, Ints
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.saturation import served_rate, slows_down
from tokentwin.traces.schema import REQUESTS

COLUMNS = tuple(column.name for column in REQUESTS if column.name != "token_times_ns")  # columns that are compared
_BLOCKS = 20  # largest number of blocks in a run
_FEWEST_IN_BLOCK = 10
_QUEUEING = 0.1  # share of their time that requests wait for their first step in an overload


class SideRequests:
    """The requests of one side, in the order of the pairing.

    Attributes:
        tables: dataset `requests` of each run of the side
        labels: a label of each request, by column (`tenant`, `slo_class`)
        finished: mask of the requests that finished
        served: prompt and output tokens of each request that finished before the last arrival of its run; 0 for others
    """

    def __init__(self, tables: Sequence[pa.Table], slo: Mapping[str, float]) -> None:
        self.tables = [table.sort_by("request_id").combine_chunks() for table in tables]
        self.runs = [RunMetrics(table, slo=slo) for table in self.tables]
        self.finished: NDArray[np.bool_] = np.concatenate([run.finished for run in self.runs])
        self.good: NDArray[np.bool_] = np.concatenate([run.meets_slo() for run in self.runs])
        self.arrival_ns: Ints = np.concatenate([table["arrival_ns"].to_numpy() for table in self.tables])
        self.served: Floats = np.concatenate([_served(table) for table in self.tables])

    def values(self, name: str) -> Floats:
        """Return a request metric, NaN for a request without a value."""
        return np.concatenate([run.values(name) for run in self.runs])

    @property
    def overload(self) -> tuple[float, float] | None:
        """The requests per second that arrive and that are served, as means of the overloaded runs.

        None if at most half of the runs are overloaded.
        """
        rates = [rates for run in self.runs if (rates := _overload(run)) is not None]
        if 2 * len(rates) <= len(self.runs):
            return None
        return tuple(float(mean) for mean in np.mean(rates, axis=0))  # type: ignore[return-value]

    def labels(self, column: str) -> NDArray[np.str_]:
        return np.concatenate([np.array(pc.fill_null(t[column], "").to_pylist(), dtype=str) for t in self.tables])


class PairedRuns:
    """The sides `a` and `b`, and the units that their requests belong to.

    Attributes:
        unit: the unit of each request
        units: the number of units
        unit_is: `runs` or `blocks`
        bounds: metrics that have a bound, which requests can meet

    Raises UserError if the sides did not serve the same requests. If arrivals depend on answers (a closed loop, think
    times), `closed` is True, and arrival times may differ.
    """

    def __init__(
        self,
        a: Sequence[pa.Table],
        b: Sequence[pa.Table],
        slo: Mapping[str, float] | None = None,
        closed: bool = False,
    ) -> None:
        if len(a) != len(b) or not a:
            raise UserError("runs", [len(a), len(b)], "must be the same number for A and B, and at least 1")
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            if not (left.num_rows and right.num_rows):
                remedy = "has no requests on at least one side; compare runs with requests"
                raise UserError(f"run {number + 1} of A and B", None, remedy)
        self.bounds = tuple(slo or ())
        self.a, self.b = SideRequests(a, slo or {}), SideRequests(b, slo or {})
        for number, (left, right) in enumerate(zip(self.a.tables, self.b.tables, strict=True)):
            _check_alike(number, left, right, closed)
        self.runs = len(a)
        repeated = self.runs > 1 and not any(_differing(self.a.tables[0], table) for table in self.a.tables[1:])
        if self.runs >= FEWEST_UNITS and not repeated:
            self.unit_is, self.units = "runs", self.runs
            self.unit: Ints = np.repeat(np.arange(self.runs), [table.num_rows for table in self.a.tables])
            return
        self.unit_is = "blocks"
        self.unit, self.units = self._blocks(repeated)

    def _blocks(self, repeated: bool) -> tuple[Ints, int]:
        """Return the block of each request, and the number of blocks."""
        blocks = [_blocks(table["arrival_ns"].to_numpy()) for table in self.a.tables]
        if repeated:
            return np.concatenate(blocks), int(blocks[0].max()) + 1
        firsts = np.cumsum([0, *(int(block.max()) + 1 for block in blocks)])
        unit = np.concatenate([block + first for block, first in zip(blocks, firsts[:-1], strict=True)])
        return unit, int(firsts[-1])


def _overload(run: RunMetrics) -> tuple[float, float] | None:
    """Return the rates of arrivals and of served requests of a run; None if the run keeps up.

    The backlog of a short run grows while the run fills, but then requests neither queue nor take ever longer.
    """
    saturation, times = run.saturation, run.outstanding
    served = served_rate(times[1])
    if saturation is None or saturation.verdict != "OVERLOADED" or served is None or served >= saturation.arrival_rate:
        return None
    latencies = run.values("e2e_ms")
    queues = saturation.waiting_share > _QUEUEING or slows_down(latencies[~np.isnan(latencies)])
    return (saturation.arrival_rate, served) if queues else None


def _check_alike(number: int, a: pa.Table, b: pa.Table, closed: bool) -> None:
    where = f"run {number + 1} of A and B"
    differing = _differing(a, b)
    if differing and not (closed and differing == "arrival_ns"):
        raise UserError(where, differing, "differs; compare runs of the same workload with the same arrivals")


def _differing(a: pa.Table, b: pa.Table) -> str | None:
    """Return the first column in which the workloads of two runs differ; arrivals are checked last."""
    columns = ("request_id", "prompt_tokens", "arrival_ns")
    return next((name for name in columns if not np.array_equal(a[name].to_numpy(), b[name].to_numpy())), None)


def _blocks(arrival_ns: Ints) -> Ints:
    """Return the number of each request's block; a block holds consecutive arrivals, and blocks are equally large."""
    count = len(arrival_ns)
    blocks = max(min(_BLOCKS, count // _FEWEST_IN_BLOCK), 1)
    block = np.empty(count, dtype=np.int64)
    block[np.argsort(arrival_ns, kind="stable")] = np.arange(count) * blocks // count
    return block


def _served(table: pa.Table) -> Floats:
    """Return the tokens of each request that count as service in Jain's index, as in `RunMetrics.jain_fairness`."""
    finish = pc.fill_null(table["finish_ns"], np.iinfo(np.int64).max).to_numpy()
    finished = np.asarray(pc.equal(table["status"], "finished")) & (finish <= table["arrival_ns"].to_numpy().max())
    tokens = table["prompt_tokens"].to_numpy() + table["output_tokens"].to_numpy()
    return np.where(finished, tokens, 0).astype(np.float64)
