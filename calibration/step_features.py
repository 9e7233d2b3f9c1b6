"""What the time of a step depends on, by name.

The same quantities from a plan (to predict) and from the `steps` of a recording (to fit). Two parts are timed
apart: the *step*, from launch to tokens, and the *cpu* work between steps: taking tokens in, scheduling, making
tensors.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from serving.decode_buckets import padded
from serving.errors import UserError
from serving.step_plan import StepPlan

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
REGIMES = ("prefill", "decode", "mixed")


def regime(plan: StepPlan) -> str:
    """`prefill`, `decode` or `mixed`."""
    if not plan.prefill_rows:
        return "decode"
    return "mixed" if plan.decode_rows else "prefill"


def step_features(plan: StepPlan) -> tuple[int, ...]:
    """STEP_FEATURES of one plan, in order."""
    rows = padded(plan.decode_rows)
    return (
        1,
        rows,
        plan.decode_context + rows,
        plan.prefill_rows,
        plan.prefill_tokens,
        plan.prefill_context + plan.prefill_tokens,
        plan.prefill_pairs,
        1,
        plan.sampled_rows,
    )


def cpu_features(plan: StepPlan) -> tuple[int, ...]:
    """CPU_FEATURES of one plan, in order."""
    return (1, plan.decode_rows + plan.prefill_rows, plan.prefill_tokens)


class MeasuredSteps:
    """The steps of recordings, one after the other, as arrays.

    step, cpu        features `[steps, len(STEP_FEATURES)]` and `[steps, len(CPU_FEATURES)]`
    step_ns, cpu_ns  measured times `[steps]`; cpu_ns is NaN after an idle gap, where nothing was waiting for it
    sample_ns        of step_ns, the time spent sampling `[steps]`; NaN where it was not timed apart
    regime           index into REGIMES `[steps]`
    recording        which of the recordings a step is of `[steps]`
    """

    def __init__(self, tables: list[pa.Table], idle_ns: int = 5_000_000) -> None:
        parts = [_Measured(table, idle_ns) for table in tables if table.num_rows]
        if not parts:
            raise UserError("steps", 0, "the recordings hold no step; were all requests rejected?")
        self.step: Floats = np.concatenate([p.step for p in parts])
        self.cpu: Floats = np.concatenate([p.cpu for p in parts])
        self.step_ns: Floats = np.concatenate([p.step_ns for p in parts])
        self.cpu_ns: Floats = np.concatenate([p.cpu_ns for p in parts])
        self.sample_ns: Floats = np.concatenate([p.sample_ns for p in parts])
        self.regime: NDArray[np.int64] = np.concatenate([p.regime for p in parts])
        self.recording: NDArray[np.int64] = np.repeat(np.arange(len(parts)), [len(p.step_ns) for p in parts])

    def __len__(self) -> int:
        return len(self.step_ns)


class _Measured:
    """One recording's steps."""

    def __init__(self, table: pa.Table, idle_ns: int) -> None:
        def column(name: str) -> Floats:
            return table.column(name).to_numpy().astype(np.float64)

        decode = column("decode_rows")
        rows = np.array([padded(int(n)) for n in decode], dtype=np.float64)
        prefill_tokens = column("prefill_tokens")
        self.step = np.column_stack(
            (
                np.ones_like(decode),
                rows,
                column("decode_context") + rows,
                column("prefill_rows"),
                prefill_tokens,
                column("prefill_context") + prefill_tokens,
                column("prefill_pairs"),
                np.ones_like(decode),
                column("sampled_rows"),
            )
        )
        self.cpu = np.column_stack((np.ones_like(decode), decode + column("prefill_rows"), prefill_tokens))
        start, end, plan = column("start_ns"), column("end_ns"), column("plan_ns")
        self.step_ns = end - start
        self.sample_ns = column("sample_ns")
        before = np.concatenate(([np.nan], end[:-1]))
        idle = np.concatenate(([True], plan[1:] - end[:-1] > idle_ns))
        host = column("host_ns") if "host_ns" in table.column_names else np.full_like(decode, np.nan)
        between = np.where(idle, np.nan, start - before)  # in the plain loop the device waits for the host
        self.cpu_ns = np.where(np.isnan(host), between, host)
        mixed = (decode > 0) & (prefill_tokens > 0)
        self.regime = np.where(mixed, 2, np.where(prefill_tokens > 0, 0, 1))
