"""The time that drafting adds to a step: the passes that propose tokens, which the next step verifies.

As in vLLM, drafting is at the end of a step. A first pass over all tokens of the step, including prompts, gives the
first draft token of every row that sampled. Each further draft token takes one more pass over these rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.operations import Operation, StepSizes
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.errors import UserError
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.serving.step_plan import StepPlan


class DraftCost(Protocol):
    """Time of the drafting at the end of a step; `step` is the time of the step without drafting."""

    def ps(self, plan: StepPlan, step: int) -> int:
        """Return picoseconds for a plan."""
        ...

    def ns(self, sizes: StepSizes, step: Any) -> Any:
        """Return nanoseconds for one step or many."""
        ...

    def operations(self, sizes: StepSizes) -> list[Operation]:
        """Return the operations of drafting, or none if they are not known."""
        ...


class PassCost(CostModel, Protocol):
    """A cost model of the passes of a draft model."""

    def parts(self, sizes: StepSizes) -> dict[str, NDArray[np.float64]]: ...
    def operations(self, sizes: StepSizes) -> list[Operation]: ...


class StatedDraft:
    """Draft passes with a configured cost.

    `eagle` makes one pass for each draft token, or one if no row samples. `ngram` makes one pass if a row samples.
    Raises UserError if the configuration has no cost.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        if config.draft_step_share is None and config.draft_us is None:
            remedy = "is missing; the simulator needs it, or draft_step_share, for a GPU that was not measured"
            raise UserError("scheduler.speculative.draft_us", None, remedy)
        self._config = config
        self._other = int(config.method == "eagle")
        self._share = config.draft_step_share or 0.0
        self._ns = 1000.0 * (config.draft_us or 0.0)

    def ps(self, plan: StepPlan, step: int) -> int:
        passes = self._other
        if plan.sampled_rows:
            passes = max(_drafted_by(self._config, plan), 1) if self._config.method == "eagle" else 1
        return passes * round(self._share * step + 1000 * self._ns)

    def ns(self, sizes: StepSizes, step: Any) -> Any:
        sampling = np.maximum(_drafted(self._config, sizes), 1) if self._config.method == "eagle" else 1
        passes = np.where(np.asarray(sizes.sampled_rows) > 0, sampling, self._other)
        return passes * (self._share * step + self._ns)

    def operations(self, sizes: StepSizes) -> list[Operation]:
        return []


class ModelDraft:
    """A draft model with the target model's kernel times. Its passes after the first are plain decode steps.

    It makes one pass even if no token is to be drafted, because its KV must follow the target's.
    """

    def __init__(self, config: SpeculativeConfig, cost: PassCost) -> None:
        self._cost = cost
        self._config = config

    def ps(self, plan: StepPlan, step: int) -> int:
        rows, again = plan.sampled_rows, _drafted_by(self._config, plan) - 1
        ns = self._cost.step_ns(plan)
        if rows and again > 0:
            context = round(_context(plan))
            ns += sum(self._cost.decode_run_ns(rows, context, context * context // rows, again))
        return 1000 * ns

    def ns(self, sizes: StepSizes, step: Any) -> Any:
        first, *later = (
            count * sum(self._cost.parts(pass_).values()) for count, pass_ in draft_passes(sizes, self._config)
        )
        return first + np.where(np.asarray(sizes.sampled_rows) > 0, sum(later), 0.0)

    def operations(self, sizes: StepSizes) -> list[Operation]:
        passes = draft_passes(sizes, self._config)
        named = zip(("draft", f"draft, {passes[-1][0]} more:"), passes, strict=False)
        return [
            replace(operation, name=f"{which} {operation.name}", count=count * operation.count)  # type: ignore[type-var]
            for which, (count, pass_) in named
            for operation in self._cost.operations(pass_)
        ]


def draft_passes(sizes: StepSizes, config: SpeculativeConfig) -> list[tuple[Any, StepSizes]]:
    """Return count and sizes of a draft model's first pass and of its further passes (the middle one's sizes).

    The count of further passes is an array `[steps]` if it depends on the number of requests in a step.
    """
    rows, again = sizes.sampled_rows, np.maximum(_drafted(config, sizes) - 1, 0)
    if not np.any(again):
        return [(1, sizes)]
    later = StepSizes(decode_rows=rows, decode_context=_context(sizes) + rows * (again - 1) / 2, sampled_rows=rows)
    return [(1, sizes), (again, later)]


def _drafted_by(config: SpeculativeConfig, plan: StepPlan) -> int:
    return config.drafted_by(plan.decode_rows + plan.prefill_rows)


def _drafted(config: SpeculativeConfig, sizes: StepSizes) -> Any:
    """Return the number of tokens that each step drafts for a request: one number if all steps draft as many."""
    if config.num_speculative_tokens_per_batch_size is None:
        return config.num_speculative_tokens
    requests = np.asarray(sizes.decode_rows + sizes.prefill_rows).astype(np.int64)
    return np.vectorize(config.drafted_by, otypes=[np.int64])(requests)


def _context(step: StepPlan | StepSizes) -> Any:
    """Return the summed context of sampling rows; ending prompts are assumed to be as long as the step's others."""
    ending = np.maximum(step.sampled_rows - step.decode_rows, 0) / np.maximum(step.prefill_rows, 1)
    return step.decode_context + step.decode_rows + (step.prefill_context + step.prefill_tokens) * ending
