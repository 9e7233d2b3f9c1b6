"""What a recording of the real engine says about its drafts: each acceptance, to replay it; how often, to simulate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serving.deployments.config import Deployment
from serving.errors import UserError
from serving.request import Request
from serving.speculative import SpeculativeConfig
from traces.recording import Recording

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


def with_acceptance(config: SpeculativeConfig, runs: Sequence[Recording]) -> SpeculativeConfig:
    """`config` with the proposals and acceptances of `runs`, for the simulator, in place of its own.

    Every place of a draft then yields as many tokens as it did, on average: its share of acceptances is that of the
    drafts that were long enough. Raises UserError where nothing was drafted.
    """
    steps = pa.concat_tables([run.table("steps", ("row_ids", "row_tokens", *DRAFT_COLUMNS)) for run in runs])
    tokens, accepted, proposed = (_flat(steps, name) for name in ("row_tokens", *DRAFT_COLUMNS))
    drafts = tokens[~np.isnan(accepted)] - 1
    accepted, proposed = accepted[~np.isnan(accepted)], proposed[~np.isnan(proposed)]
    if not len(proposed):
        remedy = "has no drafts of the real engine; record a run with scheduler.speculative"
        raise UserError("recording", runs[0].run["run_id"], remedy)
    places = range(1, config.num_speculative_tokens + 1)
    shares = [(accepted >= place).sum() / max((drafts >= place).sum(), 1) for place in places]
    stated = {
        "acceptance_rate": None,
        "synthetic_acceptance_rates": tuple(accumulate((round(float(share), 6) for share in shares), min)),
        "proposal_rates": tuple(round(float((proposed >= place).mean()), 6) for place in places),
    }
    return SpeculativeConfig(**{**config.model_dump(), **stated})


def as_accepted(deployment: Deployment, runs: Sequence[Recording]) -> Deployment:
    """`deployment` for the simulator: with the proposals and acceptances of `runs`, if it drafts."""
    speculative = deployment.scheduler.speculative
    return deployment.rescheduled(speculative=with_acceptance(speculative, runs)) if speculative else deployment


def _flat(steps: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """A column of lists as one array; NaN for a null in a list. A list that is null is as many nulls as rows."""
    rows = pc.list_value_length(steps["row_ids"]).to_pylist()
    lists = [given or [None] * (count or 0) for given, count in zip(steps[name].to_pylist(), rows, strict=True)]
    return np.array([number for one in lists for number in one], dtype=np.float64)
