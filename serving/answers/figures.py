"""The format of figures on a terminal, on a page, in a file and in an error: one function for each kind of figure.

The argument's name states the unit of the figure. The function returns text that includes the unit. An unknown figure
(None or NaN) becomes a dash. Figures in JSON and Parquet files keep all their digits and are not formatted here.
"""

from __future__ import annotations

import math

NOTHING = "–"
_IN_SECONDS_MS = 10_000
_GIB = 1024**3


def shown_number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits and separated thousands: `0.05`, `38.2`, `12,345`.

    All digits before the decimal point are shown. Use four digits for figures that readers compare side by side. An
    infinite figure is the time of an event that does not happen; it becomes `never`.
    """
    if value is None or value != value:
        return NOTHING
    if math.isinf(value):
        return "never" if value > 0 else NOTHING
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:,.{digits}g}"


def shown_share(share: float | None, decimals: int = 0) -> str:
    """Return a share in percent: `97 %`. Only exactly 0 gives `0 %`, and only exactly 1 gives `100 %`.

    Shares that would round to these give `< 1 %` and `> 99 %`.
    """
    if share is None or share != share:
        return NOTHING
    text, step = f"{100 * share:z,.{decimals}f}", 10**-decimals
    if text not in (f"{0:.{decimals}f}", f"{100:.{decimals}f}"):
        return f"{text} %"
    if not 0 < share < 1:
        return f"{round(100 * share)} %"
    return f"< {step:g} %" if share < 0.5 else f"> {100 - step:g} %"


def shown_percent(percent: float | None, decimals: int = 1) -> str:
    """Return a percentage that may exceed 100 %, such as an error or a noise level: `8.0 %`."""
    return NOTHING if percent is None or percent != percent else f"{percent:z,.{decimals}f} %"


def shown_change(percent: float | None, decimals: int = 1, unit: str = " %") -> str:
    """Return a difference with its sign, in percent or in another `unit`: `+5.2 %`, `-0.3 points`."""
    return NOTHING if percent is None or percent != percent else f"{percent:+z,.{decimals}f}{unit}"


def shown_times(*times_ms: float | None, digits: int = 3) -> tuple[list[str], str]:
    """Return times as numbers in one unit, and that unit: seconds if the first time is at least 10,000 ms."""
    first = times_ms[0]
    in_s = first is not None and _IN_SECONDS_MS <= first < math.inf
    return [shown_number(time / 1000 if in_s and time else time, digits) for time in times_ms], "s" if in_s else "ms"


def shown_time(time_ms: float | None, digits: int = 3) -> str:
    """Return a time with its unit: `38.2 ms`, `12.5 s`, `never`."""
    (text,), unit = shown_times(time_ms, digits=digits)
    return f"{text} {unit}" if text[-1].isdecimal() else text


def shown_usd(usd: float | None, decimals: int = 2) -> str:
    """Return a price to the cent: `$1,234.50`."""
    return NOTHING if usd is None or usd != usd else f"${usd:,.{decimals}f}"


def shown_gib(size_bytes: float) -> str:
    """Return a memory size in GiB, the unit of all memory settings: `79.2 GiB`."""
    return f"{size_bytes / _GIB:,.1f} GiB"


def shown_band(low: float | None, high: float | None, digits: int = 3) -> str:
    """Return the ends of an interval: `12–20`, `-3 to 4`, or `12` if both ends look alike.

    An interval without an upper end gives `12 or more`.
    """
    first, last = (shown_number(end, digits) for end in (low, high))
    if first in (last, NOTHING):
        return first
    return f"{first} or more" if last == NOTHING else f"{first} to {last}" if "-" in first else f"{first}–{last}"


def counted(count: int, thing: str) -> str:
    """Return a count and its noun, in the singular or plural: `1 request`, `1,234 requests`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
