"""Bisection finds what trying every number finds, in few questions."""

from math import log2

from hypothesis import given
from hypothesis import strategies as st

from tokentwin.planning.plan.search import Bisection


def answered(bisection: Bisection, threshold: int, within: int | None = None) -> tuple[Bisection, list[int]]:
    tried = []
    while not bisection.done:
        number = bisection.ask(within)
        tried.append(number)
        bisection = bisection.answered(number, number >= threshold)
    return bisection, tried


@given(st.integers(0, 300), st.integers(1, 400), st.integers(1, 500), st.integers(1, 500))
def test_it_finds_the_least_number_that_holds(low: int, room: int, start: int, threshold: int) -> None:
    most, threshold = low + room, max(threshold, low + 1)
    found, tried = answered(Bisection(low, most, start), threshold)
    assert found.high == (threshold if threshold <= most else None)
    assert all(low < number <= most for number in tried)
    assert len(tried) == len(set(tried)) <= 2 * log2(room + 1) + 3


@given(st.integers(1, 200), st.integers(1, 200))
def test_numbers_beyond_a_limit_are_not_asked_for_while_none_holds(threshold: int, within: int) -> None:
    bisection = Bisection(0, 1000, 1)
    while bisection.high is None and bisection.low < within:
        number = bisection.ask(within)
        assert bisection.low < number <= within
        bisection = bisection.answered(number, number >= threshold)
    assert (bisection.high is not None) == (threshold <= within)


def test_a_bracket_is_halved() -> None:
    assert Bisection(10, 100, 1, high=20).ask() == 15
    assert Bisection(10, 100, 1, high=11).done
