"""A demo fits into its time on any machine: whatever the pace, its runs take what they are given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.steps.design import Pace
from tokentwin.planning.measure.demo_size import LOAD, demo_size
from tokentwin.traces.synth import parse_spec, synthesise


@given(st.floats(1e6, 5e8), st.floats(1e4, 3e7), st.floats(30, 600), st.integers(2, 4))
def test_it_fits(decode_ns: float, prompt_ns: float, seconds: float, runs: int) -> None:
    size = demo_size(Pace(round(decode_ns), round(prompt_ns)), 8, seconds, runs)
    work_s = size.requests * ((size.prompt + 24) * prompt_ns + size.output * decode_ns / 8) / 1e9
    assert work_s <= 1.15 * LOAD * size.run_s + 1e-9
    assert size.requests == 10 or runs * size.run_s + size.calibration_s < 0.9 * seconds


@pytest.mark.parametrize(("decode_ms", "prompt_ms"), [(50, 1.6), (250, 5.0)])
def test_machines_fast_and_slow_get_traffic_worth_looking_at(decode_ms: float, prompt_ms: float) -> None:
    size = demo_size(Pace(round(decode_ms * 1e6), round(prompt_ms * 1e6)), 8, 165, 2)
    assert size.requests >= 15
    workload = synthesise(parse_spec(size.trace(), where="demo"))
    assert len(list(workload.requests)) == size.requests
