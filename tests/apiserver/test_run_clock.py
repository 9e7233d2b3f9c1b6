"""The clock of a twin's run: it follows the machine's time, except while the machine stalls."""

from hypothesis import given
from hypothesis import strategies as st

from tokentwin.apiserver.run_clock import RunClock

MS = 1_000_000
gaps = st.lists(st.tuples(st.integers(0, 900 * MS), st.integers(1, 900 * MS)), max_size=5)


@given(gaps=gaps, speed=st.sampled_from([1.0, 7.3]), after_ns=st.integers(0, 2000 * MS))
def test_no_time_of_the_run_passes_in_a_pause_and_none_is_lost(gaps, speed, after_ns):
    clock, at_ns, running_ns = RunClock(5, speed), 5, 0
    for runs_ns, pause_ns in gaps:
        at_ns, running_ns = at_ns + runs_ns, running_ns + runs_ns
        clock.pause(round(running_ns * speed), at_ns + pause_ns)
        for part in (0, pause_ns // 2, pause_ns):
            assert abs(clock.run_ns(at_ns + part) - running_ns * speed) <= 1
        at_ns += pause_ns
    assert clock.stalled_ns == sum(pause_ns for _, pause_ns in gaps)
    run_ns = clock.run_ns(at_ns + after_ns)
    assert abs(run_ns - (running_ns + after_ns) * speed) <= 1
    assert abs(clock.monotonic_ns(run_ns + 2) - (at_ns + after_ns)) <= 4


def test_a_long_run_keeps_few_pauses_and_all_of_their_time():
    clock = RunClock(0)
    for number in range(1, 30_001):
        clock.pause(number // 2, number // 2 + number)  # of 1 ns; two at each time
    assert clock.stalled_ns == 30_000 and len(clock._begins) == 10_000
    assert clock.monotonic_ns(20_000) == 50_000 and clock.run_ns(50_000) == 20_000


@given(gaps=gaps, times=st.lists(st.integers(0, 9000 * MS), min_size=2))
def test_later_is_never_earlier(gaps, times):
    clock, at_ns, running_ns = RunClock(0), 0, 0
    for runs_ns, pause_ns in gaps:
        running_ns += runs_ns
        at_ns += runs_ns + pause_ns
        clock.pause(running_ns, at_ns)
    runs = [clock.run_ns(time) for time in sorted(times)]
    assert runs == sorted(runs)
    assert [clock.run_ns(clock.monotonic_ns(run_ns)) for run_ns in runs] == runs
