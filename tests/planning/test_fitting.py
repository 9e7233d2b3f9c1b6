"""The first requests of a workload that fit into some minutes on the real engine, and a refusal where too few do."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.planning.measure.real_engine import fitting
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.metrics.saturation import FEWEST

ENGINE: Any = SimpleNamespace(deployment=Deployment(), run_dummy=lambda rows: 40_000_000 * len(rows))


def offered(count: int, gap_s: float) -> Workload:
    return Workload([WorkloadRequest(i, int(i * gap_s * 1e9), (("", 200),), 300) for i in range(count)], "w")


def test_minutes_for_one_request_of_forty_are_refused_with_the_minutes_needed() -> None:
    lines: list[str] = []
    with pytest.raises(UserError) as caught:
        fitting(offered(40, 30), ENGINE, 1.0, lines.append, runs=2)
    told = str(caught.value)
    assert told.startswith("minutes: 1.0: are enough for 1 of 40 requests; 20 take about ") and "\n" not in told
    assert not lines


@given(st.integers(1, 60), st.floats(0.01, 20), st.floats(0.01, 100), st.integers(1, 6))
def test_the_minutes_that_a_refusal_states_are_enough(count: int, gap_s: float, minutes: float, runs: int) -> None:
    workload = offered(count, gap_s)
    try:
        kept = len(list(fitting(workload, ENGINE, minutes, lambda line: None, runs).requests))
        assert min(FEWEST, count) <= kept <= count
    except UserError as refused:
        found = re.search(r"take about ([\d,.]+) minutes, and all ([\d,.]+);", str(refused))
        assert found is not None
        for number, least in zip(found.groups(), (min(FEWEST, count), count), strict=True):
            kept = len(
                list(fitting(workload, ENGINE, float(number.replace(",", "")), lambda line: None, runs).requests)
            )
            assert kept >= least
