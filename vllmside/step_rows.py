"""Steps of our schedulers in the form for vLLM's workers, with the changes since the last message.

A worker keeps the block table of each known request until it gets the message that the request has ended. It therefore
gets the whole table at first and after a preemption, and only the new blocks in other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan

BlockIds = tuple[list[int], ...]  # ids for each group of layers


class StepRow(NamedTuple):
    """One request in a step, which computes `tokens` tokens after `start` computed ones, and samples if `samples`.

    Attributes:
        outputs: number of output tokens planned before this step, including those that have not returned
        blocks: the whole block tables if the request is admitted in this step (`admitted`), else the new blocks
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
    """A maker of the rows of each plan, which must be made before the next plan; `tables` returns block tables."""

    def __init__(self, tables: Callable[[Request], Sequence[Sequence[int]]]) -> None:
        self._tables = tables
        self._sent: dict[int, list[int]] = {}  # lengths of the tables that workers know; empty after a preemption

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
        """Drop a request that has ended."""
        self._sent.pop(id, None)
