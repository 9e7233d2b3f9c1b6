"""The steps of a closed loop, which are the same however long they take.

A client of a closed loop sends a request when it has the answer to the one before. The sequence of steps is therefore
the same, whatever time each step takes. A run is simulated once, with all steps equally long; its TTFT and TPOT are
then sums of step times. So no further simulation is needed to see how a cost model's parameters change TTFT and TPOT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.serving.cost_model import padded
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.kv_layout import most_held
from tokentwin.serving.errors import UserError
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

Floats = NDArray[np.float64]

_UNIT_NS = 1_000_000  # time of every step; the arrivals, 1 ns apart, all fall into less than one step
_NOTED = ("prefill_rows", "prefill_tokens", "prefill_context", "prefill_pairs", "decode_rows", "decode_context")
SIZES = (*_NOTED, "sampled_rows")
_GRAPH_TOKENS = 512  # the limit of `tokentwin.calibration.steps.operation_cost`
_PADDED = np.array([padded(tokens) for tokens in range(_GRAPH_TOKENS + 1)], dtype=np.float64)  # as for CUDA graphs
_FINE = 4.0  # number of bins of a size within a factor of two


@dataclass(frozen=True)
class Schedule:
    """Kinds of steps of a run, and how many steps of each kind a request waits for.

    Attributes:
        sizes: mean sizes of each kind `[kinds]`
        dense: number of tokens that its dense operations run, padded as for CUDA graphs `[kinds]`
        ttft: mean number of steps of each kind in a request's time to first token `[kinds]`
        tpot: mean number of steps of each kind for a token after the first `[kinds]`
    """

    sizes: StepSizes
    dense: Floats
    ttft: Floats
    tpot: Floats

    def drafting(self, drafts: SpeculativeConfig, prompt: float) -> Schedule:
        """Return the same steps, each of which also verifies drafts; `prompt` is the mean prompt length in tokens."""
        each_step, rows = drafts.tokens_per_step, np.asarray(self.sizes.decode_rows)
        before = np.maximum(self.sizes.decode_context - rows * prompt, 0)  # output tokens
        sizes = replace(
            self.sizes,
            decode_context=self.sizes.decode_context + (each_step - 1) * before,
            draft_tokens=rows * drafts.num_speculative_tokens,
        )
        return replace(self, sizes=sizes, dense=as_run(np.asarray(sizes.tokens)), tpot=self.tpot / each_step)


class _Counting:
    """A cost model in which every step takes one unit of time, and which notes each step's sizes."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, ...]] = []  # sizes `_NOTED`, sampled rows, and number of such steps

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0

    def step_ns(self, plan: StepPlan) -> int:
        self.noted.append((*(getattr(plan, name) for name in _NOTED), plan.sampled_rows, 1))
        return _UNIT_NS

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        if steps > 1:
            self.noted.append((0, 0, 0, 0, rows, context + rows * (steps - 1) // 2, rows, steps))
        else:
            self.noted.append((0, 0, 0, 0, rows, context, rows, 1))
        return [_UNIT_NS] * steps


def is_plain_loop(workload: Workload) -> bool:
    """Return whether clients send as soon as they have an answer, and prompts share no prefixes."""
    waits = workload.concurrency is not None and not workload.shares_prefixes
    return waits and all(request.arrival_ns == 0 for request in workload.requests)


def schedule(workload: Workload, deployment: Deployment) -> Schedule:
    """Return the steps with which an engine of `deployment` serves `workload`, a closed loop without shared prefixes.

    With drafts, every step gives a request the average number of tokens, and the simulated KV grows by one token a
    step. A pipeline runs a step in all of its stages before it begins the next. Raises UserError if the engine would
    reject requests.
    """
    if workload.concurrency is None or not is_plain_loop(workload):
        raise ValueError("only the steps of a closed loop do not depend on how long they take")
    scheduler, drafts = deployment.scheduler, deployment.scheduler.speculative
    each_step = drafts.tokens_per_step if drafts else 1.0
    sent = tuple(
        (one.prompt_len, round(1 + (one.output_len - 1) / each_step), one.max_tokens is not None)
        for one in workload.requests
    )
    longest = max(prompt + outputs for prompt, outputs, _ in sent)
    settings = deployment.staged_settings.model_copy(
        update={"speculative": None, "max_loras": None, "decode_stagger": 1}
    )
    whole = scheduler.kv_reservation == "max_model_len"
    held = most_held(settings, scheduler.max_model_len if whole else longest + scheduler.kv_reserved_max_tokens)
    enough = workload.concurrency * (held + 2) + 1  # more KV blocks change nothing
    settings = settings.model_copy(update={"num_blocks": min(scheduler.num_blocks, enough)})
    plain = Deployment(policy=deployment.policy).model_copy(update={"scheduler": settings})
    alone = _schedule(sent, workload.concurrency, workload.stagger_ns > 0, plain.model_dump_json())
    return alone.drafting(drafts, sum(prompt for prompt, _, _ in sent) / len(sent)) if drafts else alone


@cache
def _schedule(
    sent: tuple[tuple[int, int, bool], ...], concurrency: int, staggered: bool, deployment_json: str
) -> Schedule:
    """Return the schedule for requests of these lengths, cached because many runs differ only by model and GPU.

    `sent` has prompt and output length of each request, and whether its output might have ended before `max_tokens`.
    """
    deployment = Deployment.model_validate_json(deployment_json)
    requests = [
        WorkloadRequest(at, 0, ((PRIVATE, prompt),), outputs, max_tokens=outputs if limited else None)
        for at, (prompt, outputs, limited) in enumerate(sent)
    ]
    workload = Workload(requests, concurrency=concurrency, shares_prefixes=False, stagger_ns=int(staggered))
    noted, table = _counted(deployment, workload, leaps=True)
    finish_ns = table["finish_ns"].drop_null()
    rejected = table.num_rows - len(finish_ns)
    if rejected:
        remedy = f"rejects {rejected} of the measured requests; check max_model_len and num_blocks"
        raise UserError(workload.name, f"max_model_len {deployment.scheduler.max_model_len}", remedy)
    # a sequence of decode steps that was priced at once (a leap) was cut short, so some counted steps did not run
    if noted[:, -1].sum() != round(max(finish_ns.to_pylist()) / _UNIT_NS):
        noted, table = _counted(deployment, workload, leaps=False)
    count = noted[:, -1].astype(np.int64)
    ends = np.cumsum(count)
    arrival, first, finish = (
        table[name].to_numpy().astype(np.float64) / _UNIT_NS for name in ("arrival_ns", "first_token_ns", "finish_ns")
    )
    outputs = table["output_tokens"].to_numpy()
    if ends[-1] != round(float(finish.max())):
        raise ValueError(f"{ends[-1]} steps were priced, and {finish.max():g} taken")
    waiting = _during(arrival, first, np.ones_like(first), ends[-1]) / len(first)
    several = outputs > 1
    per_token = 1.0 / (outputs[several] - 1.0)
    decoding = _during(first[several], finish[several], per_token, ends[-1]) / max(int(several.sum()), 1)
    starts = ends - count
    return _by_kind(noted[:, :-1], *(np.add.reduceat(weights, starts) for weights in (waiting, decoding)))


def _counted(deployment: Deployment, workload: Workload, leaps: bool) -> tuple[Floats, pa.Table]:
    """Return the sizes that `_Counting` noted in a run, and the run's requests."""
    cost, sink = _Counting(), TableSink()
    Cluster(deployment, cost, sink, shares_prefixes=workload.shares_prefixes, steps=not leaps).run(workload)
    return np.array(cost.noted, dtype=np.float64), sink.requests


def _during(start: Floats, end: Floats, weight: Floats, steps: int) -> Floats:
    """Return, for each step, the sum of the weights of the requests that are between `start` and `end` in it."""
    change = np.zeros(steps + 1)
    np.add.at(change, np.rint(start).astype(np.int64), weight)
    np.add.at(change, np.rint(end).astype(np.int64), -weight)
    return np.asarray(np.cumsum(change)[:-1])


def as_run(tokens: Floats) -> Floats:
    """Return the number of tokens that dense operations run, padded as for CUDA graphs."""
    at = np.minimum(np.ceil(tokens), _GRAPH_TOKENS).astype(np.int64)
    return np.where(tokens <= _GRAPH_TOKENS, _PADDED[at], tokens)


def kinds_of(sizes: Mapping[str, Floats]) -> tuple[Floats, NDArray[np.int64]]:
    """Return the padded tokens of each step's dense operations, and a kind number that steps of similar sizes share."""
    tokens = sizes["prefill_tokens"] + sizes["decode_rows"]
    dense = as_run(tokens)
    coarse = [
        np.rint(_FINE * np.log2(1.0 + sizes[name])) for name in sizes if name not in ("decode_rows", "sampled_rows")
    ]
    rows = np.where(tokens <= _GRAPH_TOKENS, dense, np.rint(4 * _FINE * np.log2(tokens)))
    keys = np.column_stack([*coarse, rows, np.rint(2 * _FINE * np.log2(1.0 + sizes["decode_rows"]))])
    return dense, np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def _by_kind(noted: Floats, waiting: Floats, decoding: Floats) -> Schedule:
    """Return a schedule in which steps of similar sizes are one kind, with their mean sizes."""
    sizes = dict(zip(SIZES, noted.T, strict=True))
    dense, kind = kinds_of(sizes)
    weight = waiting / max(waiting.sum(), 1e-12) + decoding / max(decoding.sum(), 1e-12)
    whole = np.bincount(kind, weight)
    used = whole > 0

    def mean(values: Floats) -> Floats:
        return np.asarray(np.bincount(kind, weight * values)[used] / whole[used])

    return Schedule(
        StepSizes(**{name: mean(values) for name, values in sizes.items()}, draft_tokens=np.zeros(int(used.sum()))),
        mean(dense),
        np.asarray(np.bincount(kind, waiting)[used], dtype=np.float64),
        np.asarray(np.bincount(kind, decoding)[used], dtype=np.float64),
    )
