"""The figure of a diagnosis: the gain from lifting each constraint."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from tokentwin.dashboard.palette import ALARM, NEUTRAL, SIMULATED, bars, finish, pale
from tokentwin.planning.diagnose.document import FINISHED, Counterfactual, DiagnosisDocument
from tokentwin.serving.answers.figures import shown_change, shown_share, shown_time
from tokentwin.serving.metrics import metric

_SLIVER = 0.01  # minimum length of a bar in percent, because a bar without length would have no text
_LEAST = 0.005  # minimum share that counts as a change
_KINDS = {"policy": ("a setting", SIMULATED), "capacity": ("more of a resource", pale(SIMULATED))}


def what_it_buys(diagnosis: DiagnosisDocument) -> go.Figure:
    """Return a bar for each lifted constraint: the share of the p99 that it removes, in percent.

    If requests are lost, it is the share of the lost requests that would finish.
    """
    name = diagnosis.metric
    before = diagnosis.simulated_finished if diagnosis.sheds else diagnosis.simulated_p99.get(name)
    ordered = sorted(diagnosis.with_changes, key=lambda c: c.gain(name))
    figure = go.Figure()
    for label, colour, changes in _traces(ordered, name):
        shares = [100 * c.gain(name) for c in changes]
        text = {"text": [_left(c, name) for c in changes], "textposition": "none" if colour == ALARM else "auto"}
        gains = [shown_change(share) if math.isfinite(share) else "none" for share in shares]
        hover = f"with %{{y}}: %{{customdata}} of {_judged(name)}<extra></extra>"
        x, y = [max(share, -100.0) or _SLIVER for share in shares], [c.called for c in changes]
        bars(figure, x, y, label, colour, hover, orientation="h", customdata=gains, **text)
        if colour == ALARM:  # text beside the bar, where there is room even if the bar is short
            for c in changes:
                figure.add_annotation(x=0, y=c.called, text=_left(c, name), showarrow=False, xanchor="left", xshift=4)
    lowest = min((100 * c.gain(name) for c in ordered), default=0.0)
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=[c.called for c in ordered])
    figure.update_xaxes(
        title_text=_axis(name, before),
        range=[max(min(1.15 * lowest, -2.0), -100.0), 112.0],
        zeroline=True,
        zerolinecolor=NEUTRAL,
    )
    return finish(figure, 90 + 34 * max(len(ordered), 3))


def _traces(counterfactuals: Sequence[Counterfactual], name: str) -> list[tuple[str, str, list[Counterfactual]]]:
    """Return label, colour and bars: changes that help, by the kind of problem, and changes that make it worse."""
    worse = [c for c in counterfactuals if c.gain(name) < -_LEAST]
    helping = [c for c in counterfactuals if c not in worse]
    traces = [(label, colour, [c for c in helping if c.kind == kind]) for kind, (label, colour) in _KINDS.items()]
    return [trace for trace in (*traces, ("makes it worse", ALARM, worse)) if trace[2]]


def _left(counterfactual: Counterfactual, name: str) -> str:
    share = counterfactual.gain(name)
    if abs(share) < _LEAST:
        return "no change"
    if name == FINISHED:
        return f"{shown_share(counterfactual.finished or 0.0, 1)} finish"
    if not math.isfinite(share):
        return "over 1 % never finish"
    p99 = counterfactual.p99.get(name)
    return shown_change(-100 * share, 0) + (f", p99 becomes {shown_time(p99)}" if p99 is not None else "")


def _judged(name: str) -> str:
    return "the lost requests finish" if name == FINISHED else "less p99"


def _axis(name: str, before: float | None) -> str:
    if name == FINISHED:
        was = f"; {shown_share(before, 1)} finished in the run" if before is not None else ""
        return f"share of the lost requests that would finish (%){was}"
    was = f"; with all constraints: {shown_time(before)}" if before is not None else ""
    return f"share of {metric(name).label} p99 that disappears (%){was}"
