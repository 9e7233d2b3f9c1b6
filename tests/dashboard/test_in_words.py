"""A figure in words, for those who cannot see it."""

import pickle

import numpy as np
import plotly.graph_objects as go
import pytest

pytest.importorskip("streamlit")

from tokentwin.dashboard.in_words import in_words
from tokentwin.dashboard.palette import band, bars, empty, line


def test_each_series_says_its_axes_its_ends_and_its_range():
    figure = go.Figure()
    band(figure, [1, 2], [3, 4], [1, 2], "band", "#000000")
    line(figure, [1, 2, 3], [20, 12000, 300], "p99", "#000000", None)
    figure.update_xaxes(title_text="requests/s").update_yaxes(title_text="TTFT (ms)")
    assert in_words(figure) == "p99 (TTFT (ms)) by requests/s: 20 at 1, 300 at 3; 3 values from 20 to 12,000."


def test_bars_that_lie_are_read_from_their_names_and_an_empty_figure_says_why():
    figure = go.Figure()
    bars(figure, [1.5, 2], ["A<br>B", "C"], "cost", "#000000", None, orientation="h")
    assert in_words(figure) == "cost: A B 1.5, C 2."
    assert in_words(empty("No request finished", 100)) == "No request finished"


def test_a_cached_figure_says_the_same():
    """Plotly has an array of a copied figure as bytes."""
    figure = go.Figure()
    line(figure, np.arange(3), np.array([20.0, 12000, 300]), "p99", "#000000", None)
    figure.add_heatmap(x=np.arange(3), y=np.arange(2), z=np.arange(6.0).reshape(2, 3))
    cached = pickle.loads(pickle.dumps(figure))
    assert in_words(cached) == in_words(figure) and "6 values from 0 to 5" in in_words(cached)
