"""Lower bounds for the number of replicas, by throughput alone, without a simulation.

An objective gives the time by which most requests must have their first or their last token. By then their prompts, or
their output tokens, have passed through steps at the best rate that the cost model has for either; sharing steps with
other work makes neither faster. The bound only skips trials that would fail: it is never an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from planning.plan.candidates import Engine
from planning.plan.objectives import Objective
from planning.plan.trial import Question
from planning.traffic import waits_for_answers
from serving.cost_model import CostModel
from serving.decode_set import DecodeSet
from serving.deployments.config import SchedulerConfig
from serving.step_plan import StepPlan

_SHORTEST_CHUNK = 16  # tokens: prompts of a step are assumed this short, so that they have next to no attention


def least_replicas(question: Question, engine: Engine, cost: CostModel) -> int:
    """Return a number of replicas below which no fleet meets the objectives, if larger steps never take less time."""
    workload, scheduler = question.workload, engine.deployment.scheduler
    prefilling, decoding = engine.split or (1, 1)  # engines of a replica
    if waits_for_answers(workload):
        return 1  # the time of the last arrival is not known
    requests = list(workload.requests)
    span_ms = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e6
    prompts, outputs = question.demand  # the prompt's last step gives the first token
    least = 1.0
    for objective in question.objectives.slos:
        must = len(requests) - objective.allowed(len(requests))
        first_ms, last_ms = _deadlines(objective, outputs[-1])
        if math.isfinite(first_ms):
            work_ms = sum(prompts[:must]) * _prompt_token_ms(cost, scheduler)
            least = max(least, work_ms / prefilling / (span_ms + first_ms))
        if math.isfinite(last_ms):
            work_ms = sum(outputs[:must]) * _output_token_ms(cost, scheduler)
            least = max(least, work_ms / decoding / (span_ms + last_ms))
    return math.ceil(least / engine.deployment.data_parallel_size * (1 - 1e-9))


def _deadlines(objective: Objective, longest: int) -> tuple[float, float]:
    """Return the ms after arrival within which a request that meets the objective has its first and its last token."""
    bounds = dict(objective.bounds)
    e2e = bounds.get("e2e_ms", math.inf)
    first = min(bounds.get("ttft_ms", math.inf), e2e)
    return first, min(e2e, first + bounds.get("tpot_ms", math.inf) * max(longest, 1))


def _prompt_token_ms(cost: CostModel, scheduler: SchedulerConfig) -> float:
    most = max(scheduler.most_step_tokens, _SHORTEST_CHUNK)
    return min(_prefill_ns(cost, tokens) / tokens for tokens in _doubling(_SHORTEST_CHUNK, most)) / 1e6


def _prefill_ns(cost: CostModel, tokens: int) -> int:
    plan = StepPlan(0, DecodeSet(1), 0)
    plan.prefill_tokens = tokens
    plan.prefill_rows = max(tokens // _SHORTEST_CHUNK, 1)
    plan.prefill_pairs = tokens * (_SHORTEST_CHUNK + 1) // 2
    return cost.step_ns(plan)


def _output_token_ms(cost: CostModel, scheduler: SchedulerConfig) -> float:
    """Return the best ms per output token: one token of context each, and every draft token accepted."""
    per_row = 1 + (scheduler.speculative.num_speculative_tokens if scheduler.speculative else 0)
    most = min(scheduler.most_running, scheduler.most_step_tokens)
    times = ((rows, next(iter(cost.decode_run_ns(rows, rows, rows, 1)))) for rows in _doubling(1, most))
    return min(ns / (rows * per_row) for rows, ns in times) / 1e6


def _doubling(first: int, last: int) -> Iterable[int]:
    size = first
    while size < last:
        yield size
        size *= 2
    yield last
