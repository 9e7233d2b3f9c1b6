"""Durations that are summed in closed form, beside a list of them."""

from bisect import bisect_right
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.step_prices import DecodeRun
from tokentwin.sim.leap import Leap

PIECES = st.lists(
    st.tuples(st.one_of(st.integers(0, 5000), st.integers(0, 10**11)), st.integers(0, 10**7), st.integers(1, 400)),
    min_size=1,
    max_size=4,
)


def made(pieces: list[tuple[int, int, int]]) -> tuple[DecodeRun, list[int]]:
    run: DecodeRun | None = None
    for piece in reversed(pieces):
        run = DecodeRun(*piece, run)
    assert run is not None
    return run, [(first + growth * i) // 1000 for first, growth, steps in pieces for i in range(steps)]


@given(PIECES, st.data())
def test_a_run_is_the_sums_of_its_steps(pieces, data):
    run, durations = made(pieces)
    assert list(run) == durations and run.steps == len(durations) and run.shortest_ns() == min(durations)
    sums = list(accumulate(durations, initial=0))
    steps = data.draw(st.integers(0, len(durations)))
    assert run.until(steps) == sums[steps]
    ns = data.draw(st.one_of(st.integers(0, sums[-1] + 10), st.sampled_from(sums)))
    assert run.ended(ns) == bisect_right(sums, ns) - 1
    assert list(run.longer(7)) == [ns + 7 for ns in durations]


@given(PIECES, st.integers(0, 10**7), st.one_of(st.none(), st.integers(0, 10**9)), st.data())
def test_a_leap_in_closed_form_is_the_leap_of_a_list(pieces, cpu_ns, in_flight_ns, data):
    run, durations = made([(first + 1000 * cpu_ns, growth, steps) for first, growth, steps in pieces])
    began_ns = 12_345
    until_ns = None if in_flight_ns is None else began_ns + in_flight_ns
    closed, one_by_one = (Leap(each, began_ns, cpu_ns, until_ns) for each in (run, durations))
    assert closed.steps == one_by_one.steps == len(durations)
    step = data.draw(st.integers(0, len(durations) - 1))
    for name in ("turn_ns", "end_ns", "plan_ns", "start_ns"):
        assert getattr(closed, name)(step) == getattr(one_by_one, name)(step), name
    turn_ns = one_by_one.turn_ns(step)
    for now_ns in (began_ns, turn_ns - 1, turn_ns, turn_ns + 1, one_by_one.end_ns(len(durations) - 1)):
        if now_ns >= began_ns:
            assert closed.ended(now_ns) == one_by_one.ended(now_ns)
    for leap in (closed, one_by_one):
        assert leap.ends_ns(step + 1) == [leap.end_ns(at) for at in range(step + 1)]
        assert leap.turns_ns(step + 1) == [leap.turn_ns(at) for at in range(step + 1)]
