"""What the requests of a step verify next: asked of the drafter once the step's tokens are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from realengine.drafting.drafter import Drafter
from realengine.seating import Seating
from realengine.sequence import TokenSequence
from serving.request import Status
from serving.step_plan import Row


def propose(
    drafter: Drafter,
    rows: Sequence[Row],
    stopped: Collection[int],
    sequences: Mapping[int, TokenSequence],
    seating: Seating,
) -> dict[int, int]:
    """Give the requests that a step of `rows` sampled for, and that go on, their drafts; how many tokens, by id.

    In the overlapped loop the next step is planned by now. Who was preempted for it is not drafted for; its prefix may
    be found again, so a draft model takes it in, before anybody else writes to the blocks.
    """
    theirs = {row.request.id: sequences[row.request.id] for row in rows if not row.request.ended}
    here = [row for row in rows if row.request.status is Status.RUNNING]
    if gone := [row for row in rows if row.request.status is Status.WAITING]:
        drafter.draft(gone, (), theirs, seating)
        for row in gone:
            drafter.leave(row.request.id)
    lasts = {id for id, sequence in theirs.items() if sequence.output_len == sequence.request.arrived.output_len}
    going_on = {row.request.id for row in here if row.samples} - lasts - set(stopped)
    found = drafter.draft(here, going_on, theirs, seating)
    proposed = {row.request.id: found.get(row.request.id, []) for row in here if row.request.id in going_on}
    for id, drafts in proposed.items():
        theirs[id].drafts = drafts
    return {id: len(drafts) for id, drafts in proposed.items()}
