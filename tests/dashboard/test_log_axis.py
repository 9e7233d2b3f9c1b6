"""Ticks of a logarithmic axis: enough to read off a value, and few enough to be read."""

import pytest

pytest.importorskip("plotly")

from tokentwin.dashboard.palette import log_axis


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (52.0, 480.0, ["50", "100", "200", "500"]),
        (51.0, 84.0, ["50", "60", "70", "80", "90", "100"]),
        (0.02, 3.0, ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]),
        (0.5, 2e6, ["1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"]),
        (70.0, 70.0, ["60", "70", "80"]),
    ],
)
def test_ticks_say_their_value(low, high, ticks):
    axis = log_axis(low, high)
    seen = [text for at, text in zip(axis["tickvals"], axis["ticktext"], strict=True) if low / 1.2 <= at <= 1.2 * high]
    assert axis["type"] == "log" and seen == ticks
