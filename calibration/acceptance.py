"""Accepted draft tokens in recordings of the real engine: step by step for a replay, mean rates for a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording

DRAFT_COLUMNS = ("row_accepted", "row_proposed")

Numbers = NDArray[np.float64]


class RecordedAcceptance:
    """The numbers of proposed and of accepted draft tokens that each step of a run recorded.

    `steps` are the rows of the run's step table in order.
    """

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
    """Return `config` with the proposal and acceptance rates of `runs`, for the simulator.

    The rates replace the ones in `config`. Each position in a draft has an acceptance rate, which counts only drafts
    that were long enough to reach the position. In the simulation a position then yields as many tokens on average as
    in the runs. Some texts repeat themselves for a long time, and others never do. Separate rates are therefore counted
    before the first accepted draft token of a request, and after steps that accepted none, some or all tokens of their
    draft.

    Raises UserError if the runs have no drafts.
    """
    drafted = _Drafted(*np.concatenate([_Drafted.from_recording(run) for run in runs], axis=1))
    places = config.num_speculative_tokens
    if not drafted.proposed.any():
        remedy = "has no drafts: none was proposed; record longer answers with scheduler.speculative"
        raise UserError("recording", runs[0].run["run_id"], remedy)
    sort = np.where(drafted.before == places, 3, 1 + np.minimum(drafted.before, 1))
    after = [drafted.take(sort == number) for number in range(4)]
    stated = {
        **drafted.rates(places),
        "acceptance_rate": None,
        "rates_after": [(part if len(part.request) else drafted).rates(places) for part in after],
    }
    return SpeculativeConfig(**{**config.model_dump(), **stated})


def with_drafts(workload: Workload, run: Recording) -> Workload:
    """Return `workload` with the accepted draft tokens of each request in `run`.

    The accepted tokens depend on the text, as output lengths do, so they are part of the workload. The workload is
    unchanged if the run has no drafts.
    """
    drafted = _Drafted.from_recording(run)
    if not drafted.proposed.any():
        return workload
    flags_of: dict[int, dict[int, tuple[bool, ...]]] = {}
    for request, place, proposed, _, accepted, _ in np.array(drafted, dtype=int).T.tolist():
        flags = tuple(token < accepted for token in range(proposed))
        flags_of.setdefault(request, {}).update((place + token, flags[token:]) for token in range(accepted + 1))
    requests = [replace(request, drafted=flags_of.get(request.id, {})) for request in workload.requests]
    return replace(workload, requests=requests)


def as_accepted(deployment: Deployment, runs: Sequence[Recording]) -> Deployment:
    """Return `deployment` with the draft rates of `runs`, or unchanged if it does not use speculative decoding."""
    speculative = deployment.scheduler.speculative
    return deployment.rescheduled(speculative=with_acceptance(speculative, runs)) if speculative else deployment


class _Drafted(NamedTuple):
    """Drafts of a run: one for each step that sampled a token for a request and was not the request's last step.

    The engine's overlapped loop computes one more step for a request that has ended. That step verifies nothing.

    Attributes:
        request: id of the request
        place: number of output tokens that the request had after the step
        proposed: number of tokens of the draft; 0 if there was no draft
        verified: number of proposed tokens that the request's next step verified; tokens past the end of the output do
            not count
        accepted: number of verified tokens that were accepted
        before: number of accepted tokens of the request's previous draft; -1 until the first draft with an accepted
            token
    """

    request: Numbers
    place: Numbers
    proposed: Numbers
    verified: Numbers
    accepted: Numbers
    before: Numbers

    @classmethod
    def from_recording(cls, run: Recording) -> _Drafted:
        steps = run.table("steps", ("row_ids", "row_tokens", *DRAFT_COLUMNS))
        rows = np.array([_flat(steps, name) for name in ("row_ids", "row_tokens", *DRAFT_COLUMNS)])
        rows = rows[:, ~np.isnan(rows[2:]).all(axis=0)]  # rows that sample
        ids, tokens, accepted, proposed = np.nan_to_num(rows[:, np.argsort(rows[0], kind="stable")])
        outputs = np.cumsum(accepted + 1)
        first = np.searchsorted(ids, ids)
        place = outputs - (outputs - accepted - 1)[first]
        taken = np.cumsum(accepted)
        before = np.where(taken > (taken - accepted)[first], accepted, -1)
        left = _output_tokens(run, ids) - place
        goes_on = np.flatnonzero((ids[:-1] == ids[1:]) & (left[:-1] > 0))
        after, proposed = goes_on + 1, proposed[goes_on]
        verified = np.minimum(np.minimum(tokens[after], left[goes_on]) - 1, proposed)  # the overlapped loop pads rows
        kept = np.minimum(accepted[after], verified)
        return cls(ids[goes_on], place[goes_on], proposed, verified, kept, before[goes_on])

    def take(self, rows: np.ndarray[Any, Any]) -> _Drafted:
        return _Drafted(*(column[rows] for column in self))

    def rates(self, places: int) -> dict[str, tuple[float, ...]]:
        """Return the proposal rate and the acceptance rate of each position in a draft.

        The proposal rate is the share of steps whose draft reaches the position. The acceptance rate is the share of
        drafts that were accepted up to the position among the drafts that were verified up to it.
        """
        reached = np.arange(1, places + 1)[:, None]
        rates = (self.proposed >= reached).mean(axis=1)
        kept = (self.accepted >= reached).sum(axis=1) / np.maximum((self.verified >= reached).sum(axis=1), 1)
        return {
            "proposal_rates": tuple(np.round(rates, 6).tolist()),
            "synthetic_acceptance_rates": tuple(np.round(np.minimum.accumulate(kept), 6).tolist()),
        }


def _output_tokens(run: Recording, ids: Numbers) -> Numbers:
    """Return the output length of each request in `ids`."""
    requests = run.table("requests", ("request_id", "output_tokens")).sort_by("request_id")
    places = np.searchsorted(requests["request_id"].to_numpy(), ids)
    return requests["output_tokens"].to_numpy()[places]


def _flat(steps: pa.Table, name: str) -> Numbers:
    """Return a column of lists as one array, with NaN for a null.

    A null list counts as one null for each row of its step.
    """
    rows = pc.list_value_length(steps["row_ids"]).to_pylist()
    lists = [given or [None] * (count or 0) for given, count in zip(steps[name].to_pylist(), rows, strict=True)]
    return np.array([number for one in lists for number in one], dtype=np.float64)
