"""A figure in words, for readers who cannot see it: a sentence for each named series."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tokentwin.serving.answers.figures import shown_number

_MOST_SERIES, _MOST_BARS = 8, 8
_TAGS = re.compile(r"<[^>]+>")


def in_words(figure: go.Figure) -> str:
    """Return a text about a figure: each series with its ends, its lowest and its highest value.

    A figure without series gives its message.
    """
    said = list(_series(figure))
    if not said:
        return " ".join(_plain(note.text) for note in figure.layout.annotations)
    more = len(said) - _MOST_SERIES
    return " ".join([*said[:_MOST_SERIES], *([f"{more} more series are not described."] if more > 0 else [])])


def _series(figure: go.Figure) -> Iterator[str]:
    for trace in figure.data:
        if trace.type == "heatmap":
            values = [value for row in _values(trace.z) for value in row if _is_number(value)]
            yield f"Map of {_title(figure, trace, 'y')} against {_title(figure, trace, 'x')}: {_span(values)}."
        elif trace.type in ("scatter", "bar") and getattr(trace, "mode", "") != "none" and _drawn(trace):
            lying = trace.type == "bar" and trace.orientation == "h"
            across, values = map(_values, (trace.y, trace.x) if lying else (trace.x, trace.y))
            pairs = [(at, value) for at, value in zip(across, values, strict=False) if _is_number(value)]
            if pairs:
                yield _about(figure, trace, pairs, "yx" if lying else "xy")


def _values(axis: Any) -> list[Any]:
    """Return the values of an axis; in a figure that was copied or cached, Plotly has arrays as bytes in base 64."""
    if not isinstance(axis, Mapping):
        return list(axis)
    values = np.frombuffer(b64decode(axis["bdata"]), axis["dtype"])
    shaped: list[Any] = values.reshape([int(size) for size in axis.get("shape", "-1").split(",")]).tolist()
    return shaped


def _drawn(trace: Any) -> bool:
    return trace.x is not None and trace.y is not None


def _about(figure: go.Figure, trace: Any, pairs: list[tuple[Any, float]], axes: str) -> str:
    title, over = _title(figure, trace, axes[1]), _title(figure, trace, axes[0])
    name = " ".join(filter(None, (_plain(trace.name or ""), title and f"({title})"))) or "Values"
    if trace.type == "bar" and len(pairs) <= _MOST_BARS:
        return f"{name}: {', '.join(f'{_shown(at)} {shown_number(value)}' for at, value in pairs)}."
    (first, begin), (last, end) = pairs[0], pairs[-1]
    values = [value for _, value in pairs]
    ends = f"{shown_number(begin)} at {_shown(first)}, {shown_number(end)} at {_shown(last)}"
    return f"{name}{over and f' by {over}'}: {ends}; {_span(values)}."


def _span(values: list[float]) -> str:
    if not values:
        return "no values"
    return f"{len(values):,} values from {shown_number(min(values))} to {shown_number(max(values))}"


def _title(figure: go.Figure, trace: Any, axis: str) -> str:
    """Return the title of a trace's axis; of a trace in a panel, of the panel's axis."""
    place = (getattr(trace, f"{axis}axis", None) or axis)[1:]
    about = figure.layout[f"{axis}axis{place}"]
    return _plain(about.title.text or "")


def _shown(value: Any) -> str:
    return shown_number(float(value)) if _is_number(value) else _plain(str(value))


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)
    except TypeError:
        return False


def _plain(text: str) -> str:
    return _TAGS.sub(" ", text).strip()
