"""Figures of the Claims page: the result of each case beside the expected range, and the terms of a latency."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import plotly.graph_objects as go

from tokentwin.dashboard.palette import NEUTRAL, SIMULATED, bars, dots, finish, log_axis, symbols, whiskers
from tokentwin.planning.claims.document import CheckedClaim, Term

_COLOURS = {"yes": SIMULATED, "open": "#8fb4e3", "no": NEUTRAL}
_NAMES = {"yes": "holds", "open": "cannot be told", "no": "does not hold"}


def cases_chart(checked: CheckedClaim) -> go.Figure:
    """Return a row for each case: its figure with the interval, over the expected range."""
    figure = go.Figure()
    drawn = [case for case in checked.cases if case.value and case.low and case.high and case.low > 0]
    for holds, colour in _COLOURS.items():
        mine = [case for case in drawn if case.holds == holds]
        if mine:
            values, numbers = [case.value or 0 for case in mine], [case.number for case in mine]
            around = whiskers(values, [case.low or 0 for case in mine], [case.high or 0 for case in mine])
            when, look = [case.when for case in mine], {"symbol": symbols(case.level for case in mine)}
            hover = "%{y}: %{customdata}<extra></extra>"
            more = {"customdata": numbers, "error_x": around}
            dots(figure, values, when, _NAMES[holds], colour, hover, 11, look, **more)
    ends = [end for end in (checked.least, checked.most) if end is not None]
    every = [*ends, *(end for case in drawn for end in (case.low, case.high) if end)]
    low, high = min(every) / 1.3, max(every) * 1.3
    least, most = checked.least or low, checked.most or high
    if least == most:
        least, most = least / 1.03, most * 1.03
    figure.add_vrect(least, most, fillcolor=SIMULATED, opacity=0.12, line_width=0)
    figure.update_xaxes(title_text=f"{checked.cases[0].unit}; shaded: expected", range=None, **log_axis(low, high))
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=[case.when for case in drawn])
    return finish(figure, 130 + 44 * len(drawn))


def terms_chart(terms: Sequence[Term]) -> go.Figure:
    """Return a waterfall of the terms, each behind the terms before it, and their sum."""
    names, times = [term.name for term in terms], [term.ms for term in terms]
    shown, lengths, hover = go.Figure(), [*times, sum(times)], "%{y}: %{customdata}<extra></extra>"
    labels = [*(f"{term.ms:,.2f} ms ({term.level}: {term.source})" for term in terms), f"{sum(times):,.2f} ms"]
    colours = [*[SIMULATED] * len(times), NEUTRAL]
    begins = [*accumulate(times[:-1], initial=0.0), 0.0]
    bars(shown, lengths, [*names, "E2E"], "", colours, hover, orientation="h", base=begins, customdata=labels)
    shown.update_yaxes(autorange="reversed")
    shown.update_xaxes(title_text="ms")
    return finish(shown, 100 + 26 * (len(terms) + 1), legend=False)
