"""How text, numbers and times are written on a page: nothing that Markdown would read, and as many digits as tell."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

from serving.metrics import METRICS

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


def timed(label: str, *times_ms: float | None) -> tuple[str, list[str]]:
    """`label` with its unit, and times in it: seconds from 10,000 ms on, by the first of them."""
    first = times_ms[0]
    in_s = first is not None and 10_000 <= first < math.inf
    scaled = [time and time / 1000 if in_s else time for time in times_ms]
    return f"{label} ({'s' if in_s else 'ms'})", list(map(shown, scaled))


def lasting(time_ms: float | None) -> str:
    """A time with its unit: seconds from 10,000 ms on."""
    if time_ms is None or not math.isfinite(time_ms):
        return shown(time_ms)
    return f"{shown(time_ms / 1000)} s" if time_ms >= 10_000 else f"{shown(time_ms)} ms"


def percent(share: float | None) -> float | None:
    """A share in percent; None stays None."""
    return None if share is None else 100 * share


def when(iso: str) -> str:
    """An ISO time to the minute; text that is none as it is."""
    try:
        return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return iso


_OBJECTIVE = re.compile(r"\b(\w+?)(?:_ms)?( p[\d.]+)? ?<= ?(\d+(?:\.\d+)?(?:e\d+)?)|\battainment ?>= ?(\d+(?:\.\d+)?)")
_TIMES = re.compile(r"(?<=\d)( replicas?)? x (?=\S)")


def prose(text: str) -> str:
    """`ttft_ms p99<=1000` as `TTFT p99 ≤ 1,000 ms`, `3 x TP4` as `3 × TP4`; the rest as it is."""
    return _TIMES.sub(r"\1 × ", _OBJECTIVE.sub(_objective, text))


def literal(text: str) -> str:
    """`prose`, escaped so that Markdown shows it as it is."""
    return verbatim(prose(text))


def verbatim(text: str) -> str:
    """Escaped so that Markdown shows it as it is: no link, image or formula comes of what somebody else wrote."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", text)


def capitalised(text: str) -> str:
    """With a capital first; the rest, names among it, as it is."""
    return text[:1].upper() + text[1:]


def sentence(clause: str) -> str:
    """A clause, which a reason and a verdict are, as a sentence of its own."""
    return f"{capitalised(clause)}."


def _objective(match: re.Match[str]) -> str:
    name, percentile, bound, share = match.groups()
    if share:
        return f"attainment ≥ {100 * float(share):.10g} %"
    known = METRICS.get(f"{name}_ms")
    return f"{known.label}{percentile or ''} ≤ {float(bound):,.10g} ms" if known else match[0]
