"""Importer of per-iteration logs: one row an engine step, as aiconfigurator's collector writes them for vLLM.

The columns count prompts and decodes of a step and their KV tokens, and its latency. The log does not say how a step's
prompt tokens divide over its prompts; the first chunks of a step continue the last ones of the step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from calibration.operations import StepSizes
from serving.errors import UserError
from serving.settings import Settings

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
    """The entry for a log in a case file."""

    format: Literal["iteration-log"]
    file: str


@dataclass(frozen=True)
class IterationLog:
    """Measured steps in time order: sizes of each `[steps]`, and its time in ns."""

    sizes: StepSizes
    measured_ns: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.measured_ns)

    def take(self, chosen: NDArray[np.bool_]) -> IterationLog:
        """Return the steps where `chosen` is true."""
        fields = {name: value[chosen] if np.ndim(value) else value for name, value in vars(self.sizes).items()}
        return IterationLog(StepSizes(**fields), self.measured_ns[chosen])


def read_iteration_log(path: str | Path) -> IterationLog:
    """Read a CSV (or .csv.gz) log; raise UserError that names the file and its fault."""
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
