"""Figures of the page Your server: what the server's clients saw, on the lines of its twin."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from tokentwin.dashboard.palette import REAL, SIMULATED, dots, finish, line, log_axis
from tokentwin.planning.learn.document import PromptPoint, StepPoint

_SHORT = 1000  # mean context in tokens up to which a plateau counts as one of short contexts


def steps_chart(steps: Sequence[StepPoint]) -> go.Figure:
    """Return the duration of decode steps by number of rows, for short and for long contexts."""
    figure = go.Figure()
    kinds = {"short context": True, "long context": False}
    for name, short in kinds.items():
        points = sorted((one for one in steps if (one.context < _SHORT) == short), key=lambda one: one.rows)
        rows = [one.rows for one in points]
        symbol = {"symbol": "circle" if short else "diamond"}
        line(figure, rows, [one.twin_ms for one in points], f"twin, {name}", SIMULATED, "%{x} rows: %{y:.2f} ms")
        dots(
            figure,
            rows,
            [one.measured_ms for one in points],
            f"server, {name}",
            REAL,
            "%{x} rows: %{y:.2f} ms",
            9,
            symbol,
        )
    figure.update_xaxes(
        title_text="requests that decode together", **log_axis(1, max([one.rows for one in steps] or [1]))
    )
    figure.update_yaxes(title_text="step (ms)", rangemode="tozero")
    return finish(figure, 340)


def prompts_chart(prompts: Sequence[PromptPoint]) -> go.Figure:
    """Return the time to first token of a lone prompt by its length."""
    figure = go.Figure()
    lengths = [one.tokens for one in prompts]
    line(figure, lengths, [one.twin_ms for one in prompts], "twin", SIMULATED, "%{x:,} tokens: %{y:.1f} ms")
    dots(figure, lengths, [one.measured_ms for one in prompts], "server", REAL, "%{x:,} tokens: %{y:.1f} ms", 9)
    times = [time for one in prompts for time in (one.measured_ms, one.twin_ms)]
    figure.update_xaxes(title_text="tokens of the prompt", **log_axis(min(lengths), max(lengths)))
    figure.update_yaxes(title_text="TTFT (ms)", **log_axis(min(times), max(times)))
    return finish(figure, 340)
