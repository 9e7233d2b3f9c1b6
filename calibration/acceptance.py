"""What a recording of the real engine says about its drafts: each acceptance, to replay it; how often, to simulate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from serving.deployments.config import Deployment
from serving.errors import UserError
from serving.request import Request
from serving.speculative import SpeculativeConfig
from traces.recording import Recording

DRAFT_COLUMNS = ("row_accepted", "row_proposed")
_MOST_KINDS = 8
_FEWEST_OF_A_KIND = 3

Numbers = NDArray[np.float64]


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
    drafts that were long enough. Requests that draft alike are kinds of their own: see `_kinds`. Raises UserError where
    nothing was drafted.
    """
    drafted = [_Drafted.of(run.table("steps", ("row_ids", "row_tokens", *DRAFT_COLUMNS))) for run in runs]
    whole, places = _Drafted.together(drafted), config.num_speculative_tokens
    if not whole.proposes.any():
        remedy = "has no drafts of the real engine; record a run with scheduler.speculative"
        raise UserError("recording", runs[0].run["run_id"], remedy)
    accepted, proposed = whole.shares(places)
    stated = {
        "acceptance_rate": None,
        "synthetic_acceptance_rates": accepted,
        "proposal_rates": proposed,
        "request_kinds": _kinds(drafted, places),
    }
    return SpeculativeConfig(**{**config.model_dump(), **stated})


def _kinds(drafted: Sequence[_Drafted], places: int) -> list[dict[str, Any]]:
    """Kinds of requests, by how much is accepted of what they draft; none where there are too few to tell.

    Requests are ranked by one half of their steps, every other one, and counted by the other half, then the other way
    round. What is only luck in one half is not in the other, so that kinds differ by as much as requests do.
    """
    halves: list[list[_Drafted]] = []  # of each request
    for run in drafted:
        for request in np.unique(run.request[run.verifies | run.proposes]):
            mine = run.take(run.request == request)
            turn = np.arange(len(mine.request)) % 2
            halves.append([mine.take(turn == half) for half in (0, 1)])
    count = min(_MOST_KINDS, len(halves) // _FEWEST_OF_A_KIND)
    if count < 2:
        return []
    members: list[list[_Drafted]] = [[] for _ in range(count)]
    for half in (0, 1):
        ranked = sorted(range(len(halves)), key=lambda place: (halves[place][half].yields, place))
        for rank, place in enumerate(ranked):
            members[rank * count // len(ranked)].append(halves[place][1 - half])
    shares = [_Drafted.together(kind).shares(places) for kind in members]
    return [{"synthetic_acceptance_rates": accepted, "proposal_rates": proposed} for accepted, proposed in shares]


def as_accepted(deployment: Deployment, runs: Sequence[Recording]) -> Deployment:
    """`deployment` for the simulator: with the proposals and acceptances of `runs`, if it drafts."""
    speculative = deployment.scheduler.speculative
    return deployment.rescheduled(speculative=with_acceptance(speculative, runs)) if speculative else deployment


class _Drafted(NamedTuple):
    """Rows of steps, one after the other: whose, the tokens they proposed, verified and accepted; NaN for none."""

    request: Numbers
    proposed: Numbers
    verified: Numbers
    accepted: Numbers

    @classmethod
    def of(cls, steps: pa.Table) -> _Drafted:
        ids, tokens, accepted, proposed = (_flat(steps, name) for name in ("row_ids", "row_tokens", *DRAFT_COLUMNS))
        return cls(ids, proposed, np.where(np.isnan(accepted), np.nan, tokens - 1), accepted)

    @classmethod
    def together(cls, parts: Sequence[_Drafted]) -> _Drafted:
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def take(self, rows: np.ndarray[Any, Any]) -> _Drafted:
        return _Drafted(*(column[rows] for column in self))

    @property
    def verifies(self) -> np.ndarray[Any, Any]:
        return ~np.isnan(self.accepted)

    @property
    def proposes(self) -> np.ndarray[Any, Any]:
        return ~np.isnan(self.proposed)

    @property
    def yields(self) -> float:
        """Accepted tokens of a step that could propose some."""
        return float(np.nansum(self.accepted)) / max(int(self.proposes.sum()), 1)

    def shares(self, places: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each place: of drafts that reach it, how many are accepted up to there; of steps, how many reach it."""
        verified, accepted = self.verified[self.verifies], self.accepted[self.verifies]
        proposed = self.proposed[self.proposes]
        reached = range(1, places + 1)
        kept = [(accepted >= place).sum() / max((verified >= place).sum(), 1) for place in reached]
        found = [(proposed >= place).sum() / max(len(proposed), 1) for place in reached]
        return tuple(accumulate((round(float(share), 6) for share in kept), min)), tuple(
            round(float(share), 6) for share in found
        )


def _flat(steps: pa.Table, name: str) -> Numbers:
    """A column of lists as one array; NaN for a null in a list. A list that is null is as many nulls as rows."""
    rows = pc.list_value_length(steps["row_ids"]).to_pylist()
    lists = [given or [None] * (count or 0) for given, count in zip(steps[name].to_pylist(), rows, strict=True)]
    return np.array([number for one in lists for number in one], dtype=np.float64)
