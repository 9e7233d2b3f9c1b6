"""A logarithmic axis whose ticks are whole numbers: Plotly's leave the power of ten out (5, 100, 2, 5)."""

from __future__ import annotations

import math
from typing import Any

from dashboard.shown import shown

_STEPS = (tuple(range(1, 10)), (1, 2, 5), (1,))  # within a decade, the finest first
_MANY = 9


def log_axis(low: float, high: float) -> dict[str, Any]:
    """What to update an axis with that shows values from `low` to `high`; both are above 0."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _STEPS:
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        seen = [tick for tick in ticks if low / 1.2 <= tick <= 1.2 * high]
        if len(seen) <= _MANY:
            break
    return {"type": "log", "tickvals": ticks, "ticktext": [shown(tick) for tick in ticks]}
