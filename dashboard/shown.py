"""How numbers and times are written on a page: as many digits as tell something, and a dash where there is none."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

NOTHING = "–"


def shown(value: Any) -> str:
    """A number with three digits, thousands set apart; text as it is."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if not isinstance(value, int | float):
        return str(value)
    if math.isinf(value):
        return "never" if value > 0 else NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def percent(share: float | None) -> float | None:
    """A share in percent; None stays None."""
    return None if share is None else 100 * share


def when(iso: str) -> str:
    """An ISO time to the minute; text that is none as it is."""
    try:
        return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return iso
