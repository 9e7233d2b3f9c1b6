"""The features of a step's time, by name.

The same features are computed from a plan, to predict, and from the `steps` table of a recording, to fit. Two parts are
timed separately. The *step* lasts from the launch to the sampled tokens. The *cpu* work between steps is to take in
tokens, to schedule and to make tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.serving.cost_model import padded, padded_tokens
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import AGGREGATES, StepPlan
from tokentwin.traces.tables import has_value, numbers

Floats = NDArray[np.float64]

STEP_FEATURES = {
    "launch": "every step",
    "decode_rows_padded": "decode rows after padding to a bucket",
    "decode_context": "KV tokens read by decode rows",
    "prefill_rows": "prompts in the step",
    "prefill_tokens": "prompt tokens in the step, with the padding of a mixed step that is a graph",
    "prefill_context": "KV tokens read by prompts",
    "prefill_pairs": "query-key pairs of prompts",
    "sampling": "every step",
    "sampled_rows": "rows that get a token",
}
SAMPLING = slice(7, 9)  # the features of sampling, which a real engine times separately
DRAFT_FEATURES = {
    "verification": "steps that verify drafts",
    "draft_tokens": "draft tokens verified",
    "drafting": "every step",
    "drafted_rows": "rows that get a token, and may get a draft",
    "draft_prompt_tokens": "prompt tokens that a draft model takes in",
    "draft_context": "KV tokens of decode rows that a draft model reads",
}
"""The features that an engine with speculative decoding has in addition to STEP_FEATURES."""
DRAFTING = slice(11, 15)  # the features of drafting, which a real engine times separately
KNEES = (64, 128, 256, 512, 1024)
TOKEN_FEATURES = {f"tokens_above_{knee}": f"tokens of a step, padding included, above {knee}" for knee in KNEES}
"""The features that a step on a GPU has in addition to STEP_FEATURES.

With few tokens a GEMM is limited by reading weights, and with many by arithmetic (roofline, Williams et al. 2009). Its
time is thus a convex function of the tokens. The function is piecewise linear here, and each knee has a price, which is
added to the slope above the knee.
"""
ADAPTER_FEATURES = {
    "adapted": "steps with a LoRA adapter",
    "adapters": "LoRA adapters in the step",
    "adapted_tokens": "tokens with a LoRA adapter",
}
"""The features that a step with LoRA adapters has in addition; the simulator adds their times to the others."""
ADAPTER_CPU_FEATURES = {
    "adapter_loads": "LoRA adapters loaded from disk",
    "adapter_copies": "LoRA adapters copied into a slot",
}
FEATURES = STEP_FEATURES | DRAFT_FEATURES | TOKEN_FEATURES | ADAPTER_FEATURES
CPU_FEATURES = {
    "plan": "every step",
    "rows": "requests in the step",
    "prefill_tokens": "prompt tokens in the step",
}
_ON_EITHER_SIDE = 2
_IDLE_NS = 5_000_000  # a longer gap before the next plan means that the engine had no requests
REGIMES = ("prefill", "decode", "mixed")


def step_features(step: StepPlan | StepSizes, rows: Any, padding: Any = 0) -> tuple[Any, ...]:
    """Return STEP_FEATURES of one plan or of many steps, in order.

    `rows` is the number of decode rows after padding. `padding` is the number of tokens that a graph adds to a mixed
    step.
    """
    return (
        1,
        rows,
        step.decode_context + rows,
        step.prefill_rows,
        step.prefill_tokens + padding,
        step.prefill_context + step.prefill_tokens,
        step.prefill_pairs,
        1,
        step.sampled_rows,
    )


def draft_features(step: StepPlan | StepSizes) -> tuple[Any, ...]:
    """Return DRAFT_FEATURES of one plan or of many steps, in order."""
    return (
        (step.draft_tokens > 0) * 1,
        step.draft_tokens,
        1,
        step.sampled_rows,
        step.prefill_tokens,
        step.decode_context + step.decode_rows,
    )


def token_features(step: StepPlan | StepSizes, rows: Any, padding: Any = 0) -> tuple[Any, ...]:
    """Return TOKEN_FEATURES of one plan or of many steps, in order; arguments are as in `step_features`."""
    tokens = rows + step.prefill_tokens + step.draft_tokens + padding
    return tuple((tokens > knee) * (tokens - knee) for knee in KNEES)


def feature_names(drafts: bool, knees: bool) -> dict[str, str]:
    """Return the features of an engine with their meanings; `drafts` and `knees` add draft and token features."""
    return STEP_FEATURES | (DRAFT_FEATURES if drafts else {}) | (TOKEN_FEATURES if knees else {})


def cpu_features(step: StepPlan | StepSizes) -> tuple[Any, ...]:
    """Return CPU_FEATURES of one plan or of many steps, in order."""
    return (1, step.decode_rows + step.prefill_rows, step.prefill_tokens)


def regimes(sizes: StepSizes) -> NDArray[np.int64]:
    """Return the index into REGIMES of every step."""
    prompts, rows = np.asarray(sizes.prefill_tokens), np.asarray(sizes.decode_rows)
    return np.where(prompts > 0, np.where(rows > 0, 2, 0), 1)


def recorded_sizes(steps: pa.Table) -> StepSizes:
    """Return the steps of a recording as arrays.

    The spread of decode contexts is not recorded, so the contexts are assumed to be equal.
    """
    return StepSizes(**{name: pc.fill_null(steps[name].cast(pa.float64()), 0.0).to_numpy() for name in AGGREGATES})


def pads_mixed_steps(deployment: Deployment) -> bool:
    """Return True if our engine runs mixed steps as CUDA graphs.

    It does so on a GPU, if its attention kernel can be captured for any mix of rows.
    """
    return deployment.device == "cuda" and not deployment.enforce_eager and deployment.attention in ("auto", "triton")


def mixed_padding(step: StepPlan | StepSizes, rows: int) -> int:
    """Return the number of padding tokens in the graph of a mixed step; `rows` is the padded number of decode rows."""
    more = int(step.prefill_tokens + step.draft_tokens)
    return padded_tokens(rows + more) - rows - more if more else 0


def feature_rows(
    sizes: StepSizes, drafts: bool = False, graphs: bool | NDArray[np.bool_] = False, knees: bool = False
) -> Floats:
    """Return the features of many steps, `[steps, features]`, in the order of `feature_names`.

    Args:
        graphs: True for steps that run as CUDA graphs; one value, or one for each step
    """
    rows = np.array([padded(int(n)) for n in sizes.decode_rows], dtype=np.float64)
    padding = np.zeros_like(rows)
    for at in np.flatnonzero(np.broadcast_to(graphs, rows.shape)):
        mixed = StepSizes(prefill_tokens=sizes.prefill_tokens[at], draft_tokens=sizes.draft_tokens[at])
        padding[at] = mixed_padding(mixed, int(rows[at]))
    features = step_features(sizes, rows, padding) + (draft_features(sizes) if drafts else ())
    return _columns(features + (token_features(sizes, rows, padding) if knees else ()))


def _columns(features: tuple[Any, ...]) -> Floats:
    return np.column_stack(np.broadcast_arrays(*features)).astype(np.float64)


def sums_around(values: Floats, reach: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the sum of each value and up to `reach` neighbours on either side, and the number of summed values."""
    until = np.concatenate(([0.0], np.cumsum(values)))
    place = np.arange(len(values))
    first, last = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(values))
    return until[last] - until[first], last - first


def by_replica(steps: pa.Table) -> list[pa.Table]:
    """Return the steps of each engine of a recording, sorted by engine."""
    replicas = pc.unique(steps["replica"]).to_pylist() if "replica" in steps.column_names else []
    if len(replicas) < 2:
        return [steps]
    return [steps.filter(pc.equal(steps["replica"], replica)) for replica in sorted(replicas)]


class MeasuredSteps:
    """The steps of recordings as arrays: recordings in order, and within each recording one engine after another.

    Attributes:
        features: names of the features, as `feature_names` gives them
        sizes: sizes of the steps; the spread of decode contexts is not recorded
        step, cpu: features `[steps, len(features)]` and `[steps, len(CPU_FEATURES)]`
        step_ns, cpu_ns: measured times `[steps]`; cpu_ns is NaN after an idle gap. In the overlapped loop a step may be
            planned while another one runs; it then begins when the other one ends
        own_ns: part of step_ns that was CPU time of the computing thread `[steps]`; equal to step_ns if it is not
            recorded
        speed: speed of the machine `[steps]`: geometric mean over the step and two steps on either side, because one
            measurement is too noisy; 1 if it is not recorded
        sample_ns: part of step_ns spent sampling `[steps]`; NaN if it was not timed separately
        draft_ns: part of step_ns spent drafting `[steps]`; NaN without speculative decoding
        mask_ns: mean host time of one masked row, which cpu_ns excludes; None if no row was masked
        load_ns, copy_ns: mean time to load a LoRA adapter from disk, and to copy one into a slot, which the other times
            exclude; None if none was
        regime: index into REGIMES `[steps]`
        recording: index of the step's recording and engine `[steps]`

    `drafts` adds draft features; the default is True if any recording has speculative decoding. `knees` adds the token
    features of a GPU. Adapter features are added if any step has a LoRA adapter.
    """

    def __init__(self, tables: list[pa.Table], drafts: bool | None = None, knees: bool = False) -> None:
        tables = [of_one for table in tables for of_one in by_replica(table) if of_one.num_rows]
        if not tables:
            raise UserError("steps", 0, "the recordings hold no step; check whether all requests were rejected")

        def column(name: str) -> Floats:
            of_each = [
                numbers(table, name) if name in table.column_names else np.full(table.num_rows, np.nan)
                for table in tables  # a recording may be older than the column
            ]
            return np.concatenate(of_each)

        self.recording = np.repeat(np.arange(len(tables)), [table.num_rows for table in tables])
        first = np.diff(self.recording, prepend=-1) > 0
        self.sizes = sizes = recorded_sizes(pa.concat_tables([table.select(list(AGGREGATES)) for table in tables]))
        self.draft_ns = column("draft_ns")
        if drafts is None:
            drafts = not np.isnan(self.draft_ns).all()
        self.features = tuple(feature_names(drafts, knees))
        self.step = feature_rows(sizes, drafts, column("graph") == 1, knees)
        count, tokens, loads, load_ns, copies, copy_ns = (
            np.concatenate([_of_adapters(table, field) for table in tables])
            for field in ("adapters", "tokens", "loads", "load_ns", "copies", "copy_ns")
        )
        if count.any():
            self.features += tuple(ADAPTER_FEATURES)
            self.step = np.column_stack([self.step, count > 0, count, tokens])
        self.load_ns = float(load_ns.sum() / loads.sum()) if loads.any() else None
        self.copy_ns = float(copy_ns.sum() / copies.sum()) if copies.any() else None
        self.cpu, self.regime = _columns(cpu_features(sizes)), regimes(sizes)
        start, end, own, speed, host = map(column, ("start_ns", "end_ns", "thread_ns", "speed", "host_ns"))
        masked, mask_ns = (np.nan_to_num(column(name)) for name in ("masked_rows", "mask_ns"))
        self.mask_ns = float(mask_ns.sum() / masked.sum()) if masked.any() else None
        before = np.concatenate(([np.nan], end[:-1]))
        behind = ~(first | np.isnan(host)) & (column("plan_ns") < before)
        began = np.where(behind, before + copy_ns, start)
        self.step_ns, self.sample_ns = end - began, column("sample_ns")
        self.own_ns = np.where(np.isnan(own), self.step_ns, own * self.step_ns / (end - start))
        logs = np.log(np.where(np.isnan(speed), 1.0, speed))
        of_each = (sums_around(one, _ON_EITHER_SIDE) for one in np.split(logs, np.flatnonzero(first)[1:]))
        self.speed = np.exp(np.concatenate([sums / counts for sums, counts in of_each]))
        idle = first | (column("plan_ns") - before > _IDLE_NS)
        between = np.where(idle, np.nan, start - before)  # the device waits for the host in the plain loop
        self.cpu_ns = np.where(np.isnan(host), between - copy_ns, host) - mask_ns - load_ns

    def __len__(self) -> int:
        return len(self.step_ns)


def _of_adapters(steps: pa.Table, field: str) -> Floats:
    """Return a field of the column `adapters`, with 0 for null."""
    if not has_value(steps, "adapters"):
        return np.zeros(steps.num_rows)
    return pc.fill_null(pc.struct_field(steps["adapters"], field).cast(pa.float64()), 0.0).to_numpy()
