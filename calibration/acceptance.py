"""What a recording of the real engine says about its drafts: each acceptance, to replay it; how often, to simulate."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serving.errors import UserError
from serving.request import Request
from serving.speculative import SpeculativeConfig

DRAFT_COLUMNS = ("row_accepted", "row_proposed")


class RecordedAcceptance:
    """Every draft is proposed and accepted as it was in a recorded run. `steps` are its rows, in order."""

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self._accepted, self._proposed = (
            [dict(zip(step["row_ids"], step[name] or (), strict=False)) for step in steps] for name in DRAFT_COLUMNS
        )

    def proposed(self, request: Request, step: int) -> int:
        return _at(self._proposed, step, request.id)

    def accepted(self, request: Request, step: int, drafts: int) -> int:
        return min(_at(self._accepted, step, request.id), drafts)


def _at(steps: list[dict[int, int | None]], step: int, id: int) -> int:
    return (steps[step].get(id) or 0) if step < len(steps) else 0


def with_acceptance(config: SpeculativeConfig, steps: pa.Table) -> SpeculativeConfig:
    """`config` with the proposals and acceptances of recorded `steps`, for the simulator, in place of its own.

    Every place of a draft then yields as many tokens as it did, on average: its share of acceptances is that of the
    drafts that were long enough. Raises UserError where no draft was verified.
    """
    tokens, accepted, proposed = (_flat(steps, name) for name in ("row_tokens", *DRAFT_COLUMNS))
    drafts = tokens[~np.isnan(accepted)] - 1
    accepted, proposed = accepted[~np.isnan(accepted)], proposed[~np.isnan(proposed)]
    if not len(drafts):
        raise UserError("scheduler.speculative", config.method, "was never tried: the recording has no drafts")
    places = range(1, config.num_speculative_tokens + 1)
    shares = [(accepted >= place).sum() / max((drafts >= place).sum(), 1) for place in places]
    stated = {
        "acceptance_rate": None,
        "synthetic_acceptance_rates": tuple(accumulate(map(float, shares), min)),
        "proposal_rates": tuple(float((proposed >= place).mean()) for place in places),
    }
    return SpeculativeConfig(**{**config.model_dump(), **stated})


def _flat(steps: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """A column of lists as one array; NaN for a null in a list. A list that is null is as many nulls as rows."""
    rows = pc.list_value_length(steps["row_ids"])
    if name not in steps.column_names:  # older than the column
        return np.full(pc.sum(rows).as_py() or 0, np.nan)
    lists = [given or [None] * count for given, count in zip(steps[name].to_pylist(), rows.to_pylist(), strict=True)]
    return np.array([number for one in lists for number in one], dtype=np.float64)
