"""Figures as they are shown: tables of the rules, and what holds for every number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.answers.figures import (
    NOTHING,
    counted,
    shown_band,
    shown_change,
    shown_gib,
    shown_number,
    shown_percent,
    shown_share,
    shown_time,
    shown_times,
    shown_usd,
)

UNKNOWN = (None, math.nan)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0", shown_number(0.0)),
        ("0.0123", shown_number(0.01234)),
        ("4.5", shown_number(4.5)),
        ("38.2", shown_number(38.249)),
        ("1,000", shown_number(999.6)),
        ("-12,346", shown_number(-12345.6)),
        ("238.6", shown_number(238.59, 4)),
        ("10,000", shown_number(9999.5, 4)),
        ("never", shown_number(math.inf)),
        ("0 %", shown_share(0.0)),
        ("< 1 %", shown_share(0.004)),
        ("97 %", shown_share(0.971)),
        ("> 99 %", shown_share(0.998)),
        ("100 %", shown_share(1.0, 1)),
        ("130 %", shown_share(1.3)),
        ("< 0.1 %", shown_share(1e-9, 1)),
        ("97.1 %", shown_share(0.971, 1)),
        ("> 99.9 %", shown_share(0.99996, 1)),
        ("8.0 %", shown_percent(8)),
        ("1,234 %", shown_percent(1234, 0)),
        ("+5.2 %", shown_change(5.21)),
        ("+0.0 %", shown_change(-0.01)),
        ("-3 points", shown_change(-3.2, 0, " points")),
        ("38.2 ms", shown_time(38.21)),
        ("9,999 ms", shown_time(9999)),
        ("12.5 s", shown_time(12_500)),
        ("12.35 s", shown_time(12_350, 4)),
        ("never", shown_time(math.inf)),
        ("$1,234.50", shown_usd(1234.5)),
        ("$1,234", shown_usd(1234.4, 0)),
        ("79.2 GiB", shown_gib(79.2 * 1024**3)),
        ("12–20", shown_band(12, 20)),
        ("-3 to 4", shown_band(-3, 4)),
        ("12", shown_band(12, 12.01)),
        ("12 or more", shown_band(12, None)),
        (NOTHING, shown_band(None, 3)),
        ("1 request", counted(1, "request")),
        ("1,234 requests", counted(1234, "request")),
    ],
)
def test_figures(text: str, shown: str) -> None:
    assert shown == text


@pytest.mark.parametrize("form", [shown_number, shown_share, shown_percent, shown_change, shown_time, shown_usd])
def test_what_is_unknown_is_a_dash(form) -> None:
    assert [form(value) for value in UNKNOWN] == [NOTHING] * 2


def test_times_from_ten_seconds_on_are_in_seconds() -> None:
    assert shown_times(9999.0, 12_000.0) == (["9,999", "12,000"], "ms")
    assert shown_times(163_037.0, 9000.0, None) == (["163", "9", "–"], "s")
    assert shown_times(None)[1] == shown_times(math.inf)[1] == "ms"


@given(st.floats(-1e12, 1e12).filter(lambda value: abs(value) > 1e-4), st.integers(2, 5))
def test_a_number_keeps_its_digits_and_all_before_the_point(value: float, digits: int) -> None:
    text = shown_number(value, digits)
    off = abs(float(text.replace(",", "")) - value)
    assert "e" not in text
    assert off <= (0.5 if abs(value) >= 10**digits else 5.001 * 10**-digits * abs(value))


@given(st.floats(0, 1), st.integers(0, 2))
def test_a_share_looks_like_none_or_all_only_if_it_is(share: float, decimals: int) -> None:
    text = shown_share(share, decimals)
    assert (float(text.strip("<> %")) in (0, 100)) == (share in (0, 1))
