"""A step of a scheduler of ours in the form for vLLM's workers: the changes since their last message.

A worker keeps the block table of each request that it knows, until it hears that the request has ended. So it gets the
whole table once, and again when the request runs after a preemption; otherwise it gets the new blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from serving.request import Request
from serving.step_plan import StepPlan

BlockIds = tuple[list[int], ...]  # ids for each group of layers


class StepRow(NamedTuple):
    """One request of a step: `tokens` of it after the `start` computed before, and whether it samples.

    Attributes:
        outputs: output tokens planned before this step, including those that have not returned
        blocks: its whole block tables if it is `admitted` in this step, first or `again`; else the new blocks
    """

    request: Request
    start: int
    tokens: int
    samples: bool
    outputs: int
    blocks: BlockIds
    admitted: bool
    again: bool


class StepRows:
    """Rows of plan after plan, made before the next plan is. `tables` gives the block tables of a request."""

    def __init__(self, tables: Callable[[Request], Sequence[Sequence[int]]]) -> None:
        self._tables = tables
        self._sent: dict[int, list[int]] = {}  # lengths of the tables that workers know; none after a preemption

    def make_rows(self, plan: StepPlan) -> list[StepRow]:
        for request in plan.preempted:
            if request.id in self._sent:
                self._sent[request.id] = []
        return [self._row(*row) for row in plan.rows()] if plan.tokens else []

    def _row(self, request: Request, start: int, tokens: int, samples: bool, drafts: int) -> StepRow:
        tables, sent = self._tables(request), self._sent.get(request.id)
        self._sent[request.id] = [len(table) for table in tables]
        outputs = request.known + request.placeholders - samples - request.prompt_len
        blocks = tuple([*table[first:]] for table, first in zip(tables, sent or [0] * len(tables), strict=True))
        return StepRow(request, start, tokens, samples, outputs, blocks, not sent, sent == [])

    def forget(self, id: int) -> None:
        """Forget a request that has ended."""
        self._sent.pop(id, None)
