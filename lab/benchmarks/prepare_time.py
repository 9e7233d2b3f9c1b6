"""The time in which the host prepares the tensors of a decode step: rows as columns, and one by one.

`python -m lab.benchmarks.prepare_time` prints both for 256 rows of 1,000 tokens, in ms of CPU time (the fastest of many
steps), and their ratio. The engine prepares plain rows as columns; before, it prepared all rows one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time_ns

import numpy as np

from tokentwin.realengine.sampling import SamplingParams
from tokentwin.realengine.seating import Seating
from tokentwin.realengine.sequence import TokenSequence
from tokentwin.realengine.step_input import Ints, Packed, pack
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import Row, StepPlan
from tokentwin.serving.workload import WorkloadRequest

_ROWS, _PROMPT, _STEPS = 256, 1000, 300
_BLOCKS = 128  # of each request


def main() -> None:
    for temperature in (0.0, 0.6):
        rows_ms, columns_ms = (min(times) / 1e6 for times in _times(temperature))
        print(
            f"{_ROWS} rows at temperature {temperature:g}: {columns_ms:.2f} ms as columns, "
            f"{rows_ms:.2f} ms one by one, ratio {columns_ms / rows_ms:.2f}"
        )


def _times(temperature: float) -> tuple[list[int], list[int]]:
    config = SchedulerConfig(max_num_seqs=_ROWS, max_model_len=4096, num_blocks=_ROWS * _BLOCKS)
    requests = [Request(WorkloadRequest(id, 0, (("", _PROMPT),), 1000)) for id in range(_ROWS)]
    seating = Seating(config, lambda request: (range(request.id * _BLOCKS, (request.id + 1) * _BLOCKS),))
    plan = StepPlan(0, DecodeSet(config.block_size), 0)
    plan.admitted = tuple(requests)
    seating.follow(plan)
    sequences = [TokenSequence(request, range(_PROMPT), sampling=SamplingParams(temperature)) for request in requests]

    def one_by_one(rows: list[Row]) -> Packed:
        inputs = [seating.row(row, sequence) for row, sequence in zip(rows, sequences, strict=True)]
        return pack(inputs, config.block_size, _ROWS, _no_tiles)

    def as_columns(rows: list[Row]) -> Packed:
        plain, others = seating.plain(rows, sequences)
        return pack([], config.block_size, _ROWS, _no_tiles, plain, others)

    times: tuple[list[int], list[int]] = ([], [])
    ways: tuple[Callable[[list[Row]], Packed], ...] = (one_by_one, as_columns)
    for step in range(_STEPS):
        rows = [Row(request, _PROMPT + step, 1, True) for request in requests]
        for way, spent in zip(ways, times, strict=True):
            began = thread_time_ns()
            way(rows)
            spent.append(thread_time_ns() - began)
    return times


def _no_tiles(rows: object) -> tuple[Ints, Ints]:
    return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)


if __name__ == "__main__":
    main()
