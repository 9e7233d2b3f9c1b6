"""The interface of draft proposers, the choice of one for a deployment, and its call after a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from realengine.drafting.draft_model import ModelDrafter
from realengine.drafting.ngram import NgramDrafter
from realengine.runner import ModelRunner
from realengine.seating import Seating
from realengine.sequence import TokenSequence
from realengine.weights import ModelFiles
from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec, check_vocabulary
from serving.request import Status
from serving.step_plan import Row


class Drafter(Protocol):
    """A proposer of draft tokens at the end of each step, in the order of its rows. It can never change an output.

    Attributes:
        runner: computes the drafts, over KV in blocks of the same ids as the target's; None if nothing is computed
    """

    @property
    def runner(self) -> ModelRunner | None: ...

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        """Return the drafts of the requests `going_on`, by id.

        They are requests that the step of `rows` has sampled for and that do not end with it. The sampled tokens are
        already in their `sequences`. A request without a draft decodes plainly.
        """

    def leave(self, id: int) -> None:
        """Note that the request has ended, or lost its place."""

    def reset(self) -> None:
        """Forget every request."""


def find_drafter(deployment: Deployment, target: ModelSpec, draft: ModelFiles | None) -> Drafter | None:
    """Return the deployment's drafter, or None if it does not draft. A draft model's weights are in `draft`.

    Raises UserError for a model that cannot draft for the target.
    """
    speculative = deployment.scheduler.speculative
    if speculative is None:
        return None
    if speculative.method == "ngram":
        return NgramDrafter(speculative)
    if draft is None:
        raise ValueError("method draft_model needs the files of the draft model")
    check_vocabulary(target, draft.spec)
    return ModelDrafter(deployment, draft)


def propose(
    drafter: Drafter,
    rows: Sequence[Row],
    stopped: Collection[int],
    sequences: Mapping[int, TokenSequence],
    seating: Seating,
) -> dict[int, int]:
    """Give drafts to the requests that a step of `rows` sampled for and that go on; return draft lengths by id.

    In the overlapped loop the next step is already planned. A request that was preempted for it gets no draft. Its
    prefix may be reused later, so a draft model takes it in before another request writes to the blocks.
    """
    theirs = {row.request.id: sequences[row.request.id] for row in rows if not row.request.ended}
    here = [row for row in rows if row.request.status is Status.RUNNING]
    if gone := [row for row in rows if row.request.status is Status.WAITING]:
        drafter.draft(gone, (), theirs, seating)
        for row in gone:
            drafter.leave(row.request.id)
    lasts = {id for id, sequence in theirs.items() if len(sequence.tokens) == sequence.request.end_len}
    going_on = {row.request.id for row in here if row.samples} - lasts - set(stopped)
    by_id = drafter.draft(here, going_on, theirs, seating)
    proposed = {row.request.id: by_id.get(row.request.id, []) for row in here if row.request.id in going_on}
    for id, drafts in proposed.items():
        theirs[id].drafts = drafts
    return {id: len(drafts) for id, drafts in proposed.items()}
