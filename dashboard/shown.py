"""The form of text, numbers and times on a page: no accidental Markdown, and no more digits than are meaningful."""

from __future__ import annotations

import re
from datetime import datetime

from tokentwin.serving.metrics import METRICS


def when(iso: str) -> str:
    """Return an ISO time to the minute; other text unchanged."""
    try:
        return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return iso


_OBJECTIVE = re.compile(r"\b(\w+?)(?:_ms)?( p[\d.]+)? ?<= ?(\d+(?:\.\d+)?(?:e\d+)?)|\battainment ?>= ?(\d+(?:\.\d+)?)")
_TIMES = re.compile(r"(?<=\d)( replicas?)? x (?=\S)")


def prose(text: str) -> str:
    """Return `ttft_ms p99<=1000` as `TTFT p99 ≤ 1,000 ms` and `3 x TP4` as `3 × TP4`; the rest unchanged."""
    return _TIMES.sub(r"\1 × ", _OBJECTIVE.sub(_objective, text))


def literal(text: str) -> str:
    """Return `prose`, escaped so that Markdown shows it as it is."""
    return verbatim(prose(text))


def verbatim(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, and text of other people makes no link, image or formula."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", text)


def capitalised(text: str) -> str:
    """Return text with a capital first letter; the rest, which may hold names, unchanged."""
    return text[:1].upper() + text[1:]


def sentence(clause: str) -> str:
    """Return a clause, such as a reason or a verdict, as a sentence."""
    return capitalised(clause) + "." * (clause[-1:] not in ".:")


def _objective(match: re.Match[str]) -> str:
    name, percentile, bound, share = match.groups()
    if share:
        return f"attainment ≥ {100 * float(share):.10g} %"
    known = METRICS.get(f"{name}_ms")
    return f"{known.label}{percentile or ''} ≤ {float(bound):,.10g} ms" if known else match[0]
