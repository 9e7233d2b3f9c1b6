"""The form of a figure on a terminal, on a page, in a file and in an error: one rule for each kind of figure.

A function takes the figure in the unit of its argument's name, and returns it with its unit. A figure that is unknown
(None or NaN) is a dash. Figures in JSON and Parquet keep all their digits, and do not come by here.
"""

from __future__ import annotations

import math

NOTHING = "–"
_IN_SECONDS_MS = 10_000
_GIB = 1024**3


def shown_number(value: float | None, digits: int = 3) -> str:
    """Return `digits` significant digits, and all before the point, thousands set apart: `0.05`, `38.2`, `12,345`.

    Figures that stand side by side to be compared have four. An infinite one is the time of what does not happen.
    """
    if value is None or value != value:
        return NOTHING
    if math.isinf(value):
        return "never" if value > 0 else NOTHING
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:,.{digits}g}"


def shown_share(share: float | None, decimals: int = 0) -> str:
    """Return a share in percent: `97 %`. Only 0 is `0 %`, and only 1 is `100 %`: others are `< 1 %` and `> 99 %`."""
    if share is None or share != share:
        return NOTHING
    text, step = f"{100 * share:z,.{decimals}f}", 10**-decimals
    if text not in (f"{0:.{decimals}f}", f"{100:.{decimals}f}"):
        return f"{text} %"
    if not 0 < share < 1:
        return f"{round(100 * share)} %"
    return f"< {step:g} %" if share < 0.5 else f"> {100 - step:g} %"


def shown_percent(percent: float | None, decimals: int = 1) -> str:
    """Return an error, or a noise, which may exceed a hundred percent: `8.0 %`."""
    return NOTHING if percent is None or percent != percent else f"{percent:z,.{decimals}f} %"


def shown_change(percent: float | None, decimals: int = 1, unit: str = " %") -> str:
    """Return a difference with its sign, in percent or in another `unit`: `+5.2 %`, `-0.3 points`."""
    return NOTHING if percent is None or percent != percent else f"{percent:+z,.{decimals}f}{unit}"


def shown_times(*times_ms: float | None, digits: int = 3) -> tuple[list[str], str]:
    """Return times as numbers in one unit, and the unit: seconds if the first of them reaches 10,000 ms."""
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
    """Return a size of memory in GiB, the unit of all settings of memory: `79.2 GiB`."""
    return f"{size_bytes / _GIB:,.1f} GiB"


def shown_band(low: float | None, high: float | None, digits: int = 3) -> str:
    """Return the ends of an interval as two numbers: `12–20`, `-3 to 4`, `12` if they look alike, `12 or more`."""
    first, last = (shown_number(end, digits) for end in (low, high))
    if first in (last, NOTHING):
        return first
    return f"{first} or more" if last == NOTHING else f"{first} to {last}" if "-" in first else f"{first}–{last}"


def counted(count: int, thing: str) -> str:
    """Return a count with its noun in the right number: `1 request`, `1,234 requests`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
