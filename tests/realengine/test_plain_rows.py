"""Rows as columns: a step packed from them is the step that is packed row by row, to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine extra is not installed")

from tokentwin.realengine.logit_rules import LogitRules
from tokentwin.realengine.sampling import SamplingParams
from tokentwin.realengine.seating import Seating
from tokentwin.realengine.sequence import TokenSequence
from tokentwin.realengine.step_input import Packed, pack
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import Row, StepPlan
from tokentwin.serving.workload import WorkloadRequest

BLOCK = 4
# known tokens, tokens of this step, seen by the host, temperature
REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from((1, 1, 1, 5)), st.booleans(), st.sampled_from((0.0, 0.7))),
    min_size=1,
    max_size=9,
)


def no_tiles(rows: object) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)


def seated(requests: list[Request], groups: int) -> Seating:
    config = SchedulerConfig(
        max_num_seqs=16, max_model_len=64, block_size=BLOCK, kv_groups=(0, 8) if groups > 1 else ()
    )
    seating = Seating(config, lambda request: [range(100 * g + 20 * request.id, 999) for g in range(groups)])
    plan = StepPlan(0, DecodeSet(BLOCK), 0)
    plan.admitted = tuple(requests)
    seating.follow(plan)
    return seating


@pytest.mark.parametrize("groups", [1, 2])
@settings(max_examples=25, deadline=None)
@given(REQUESTS)
def test_columns_pack_as_rows_do(groups: int, given: list[tuple[int, int, bool, float]]) -> None:
    requests = [Request(WorkloadRequest(id, 0, (("", known),), 30)) for id, (known, *_) in enumerate(given)]
    rows, sequences = [], []
    for request, (known, count, seen, heat) in zip(requests, given, strict=True):
        start = known - count if seen or count > 1 else known
        rows.append(Row(request, max(start, 0), min(count, known), True))
        sequences.append(TokenSequence(request, range(3, 3 + known), sampling=SamplingParams(heat, 5, 0.9)))

    def packed(as_columns: bool) -> Packed:
        seating = seated(requests, groups)
        plain, others = seating.plain(rows, sequences) if as_columns else (None, list(range(len(rows))))
        inputs = [seating.row(rows[number], sequences[number]) for number in others]
        return pack(inputs, BLOCK, 16, no_tiles, plain, others)

    expected, got = packed(False), packed(True)
    assert got.sample_rows == expected.sample_rows
    assert np.array_equal(got.step.packed, expected.step.packed)
    assert got.step._replace(packed=None) == expected.step._replace(packed=None)


def test_rows_that_need_more_are_not_plain() -> None:
    requests = [Request(WorkloadRequest(id, 0, (("", 6),), 30)) for id in range(5)]
    more = [{}, {"logprobs": 2}, {"rules": LogitRules(presence=1.0)}, {}, {}]
    sequences = [TokenSequence(r, range(6), **settings) for r, settings in zip(requests, more, strict=True)]  # type: ignore[arg-type]
    rows = [Row(request, 6, 1, request.id != 3) for request in requests]
    seating = seated(requests, 1)
    seating.leave(4)  # aborted since the plan
    plain, others = seating.plain(rows, sequences)
    assert plain is not None and plain.numbers == [0] and others == [1, 2, 3, 4]
    inputs = [seating.row(rows[number], sequences[number]) for number in others]
    assert pack(inputs, BLOCK, 16, no_tiles, plain, others).sample_rows[:3] == [0, 1, 2]
