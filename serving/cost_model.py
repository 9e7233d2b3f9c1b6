"""The cost model: how long a step takes, and the sizes that steps are padded to.

The real engine measures step times, calibration fits the cost model to them, and the simulator asks the cost model.
Durations are integer nanoseconds. The engine pads steps, because CUDA graphs require it and CPU kernels run faster. The
cost model must include the same padding: decode rows are padded to a batch size, and the tokens of mixed steps that run
as CUDA graphs are padded to a bucket. A throttled GPU, or a pool with another speed, has a paced cost model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.step_prices import DecodeRun

DECODE_BUCKETS = (1, 2, 4, *range(8, 1025, 8))
TOKEN_BUCKETS = (16, 32, 64, 128, *(step * (1 << power) for power in range(5, 9) for step in (5, 6, 8)))
MASK_NS = 50_000
"""Default CPU time of the mask of one structured token, if it was not measured. llguidance states about 50 us for a
vocabulary of 128,000 tokens.
"""


class CostModel(Protocol):
    """The time of one step: `cpu_ns` from planning to launch, and `step_ns` from launch until its tokens are there.

    The times depend only on the plan's aggregates, never on earlier calls.
    """

    def cpu_ns(self, plan: StepPlan) -> int:
        """Return the CPU time before the step can start; in an overlapped loop it passes while the previous step runs.

        For pure decode steps it depends only on the number of rows.
        """

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time from the start of the step until its tokens are there."""

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        """Return `cpu_ns + step_ns` for each of `steps` consecutive pure decode steps.

        The values are exactly those that the two methods return step by step. Before the first step, `context` is the
        sum of the rows' computed tokens, and `squares` the sum of their squares. Each step adds `rows` to `context` and
        leaves the variance unchanged. If prices grow linearly, a `DecodeRun` is the fastest answer.
        """


@runtime_checkable
class PipelinedCost(CostModel, Protocol):
    """A cost model of an engine with pipeline stages. Its `step_ns` is for a step that has the pipeline to itself."""

    def stages_ns(self, plan: StepPlan) -> list[int]:
        """Return the time of the step on each pipeline stage, in order."""

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        """Return the transfer time of the step's activations from each stage to the next; the last stage has none."""


@runtime_checkable
class NetworkedCost(CostModel, Protocol):
    """A cost model of an engine that sends data between nodes."""

    def network_ns(self, tokens: int) -> int:
        """Return how long the collectives of a step of `tokens` tokens keep a device's network adapter busy."""


def decode_plans(rows: int, context: int, squares: int, steps: int) -> Iterator[StepPlan]:
    """Yield the plan of each step that `decode_run_ns` prices."""
    for _ in range(steps):
        yield StepPlan.from_amounts(decode_rows=rows, decode_context=context, decode_squares=squares, sampled_rows=rows)
        context, squares = context + rows, squares + 2 * context + rows


class TokenCost:
    """A constant price of a step, plus a price per token, plus a price per query-key pair.

    The oracle recordings (vllm-policy) use this cost: `base_ns + per_token_ns * tokens + per_pair_ps * pairs // 1000`.
    `plan_ns` is the CPU time of each plan.
    """

    def __init__(self, base_ns: int, per_token_ns: int, per_pair_ps: int, plan_ns: int = 0) -> None:
        self.base_ns = base_ns
        self.per_token_ns = per_token_ns
        self.per_pair_ps = per_pair_ps
        self.plan_ns = plan_ns

    def cpu_ns(self, plan: StepPlan) -> int:
        return self.plan_ns

    def step_ns(self, plan: StepPlan) -> int:
        return self.base_ns + self.per_token_ns * plan.tokens + self.per_pair_ps * plan.pairs // 1000

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        fixed_ns = self.plan_ns + self.base_ns + self.per_token_ns * rows
        growth_ps = self.per_pair_ps * rows
        return DecodeRun(1000 * fixed_ns + self.per_pair_ps * context + growth_ps, growth_ps, steps)


def padded(rows: int) -> int:
    """Return the smallest bucket that holds `rows` decode rows; 0 for no rows."""
    return DECODE_BUCKETS[bisect_left(DECODE_BUCKETS, rows)] if 0 < rows <= DECODE_BUCKETS[-1] else rows


def padded_tokens(tokens: int) -> int:
    """Return the number of tokens of the smallest CUDA graph that holds a mixed step of `tokens` tokens.

    Steps larger than every CUDA graph keep their size, because they run eagerly.
    """
    return TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, tokens)] if tokens <= TOKEN_BUCKETS[-1] else tokens


class Paced:
    """A cost model with `factor` times the times of `cost`, including CPU time. Sums are rounded to nanoseconds."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    def cpu_ns(self, plan: StepPlan) -> int:
        return round(self._cost.cpu_ns(plan) * self._factor)

    def step_ns(self, plan: StepPlan) -> int:
        cpu_ns = self._cost.cpu_ns(plan)
        return round((cpu_ns + self._cost.step_ns(plan)) * self._factor) - round(cpu_ns * self._factor)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [round(ns * self._factor) for ns in self._cost.decode_run_ns(rows, context, squares, steps)]


class PacedPipeline(Paced):
    """A paced cost model of an engine with pipeline stages. The time of each stage is rounded separately."""

    def __init__(self, cost: PipelinedCost, factor: float) -> None:
        super().__init__(cost, factor)
        self._staged = cost

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return [round(ns * self._factor) for ns in self._staged.stages_ns(plan)]

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return [round(ns * self._factor) for ns in self._staged.transfers_ns(plan)]


def paced(cost: CostModel, factor: float) -> CostModel:
    """Return a cost model with `factor` times the times of `cost`; `cost` itself if the factor is 1."""
    if factor == 1:
        return cost
    return PacedPipeline(cost, factor) if isinstance(cost, PipelinedCost) else Paced(cost, factor)
