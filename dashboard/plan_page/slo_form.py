"""SLOs as a form beside their text. The lines of the text are the only state: the form is drawn from them.

A change in the form rewrites its line, and leaves the others as they were typed. A line that is not understood is only
in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import streamlit as st

from tokentwin.dashboard.shown import verbatim
from tokentwin.dashboard.url import go_to, going_to
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import metric

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms")
ATTAINMENT = "attainment"
_SHARED = "by attainment"  # in place of a percentile or the mean
_PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "mean", _SHARED)
_HELP = "A percentile has its own share of the requests. All bounds *by attainment* must be met by the same requests."
_CLASS = "Only requests of this SLO class count; empty: all requests."
_ADDED = "10000"  # bound in ms of an SLO that is added
_LOWEST, _HIGHEST = 0.01, 1e9
_WRITTEN = "slo_written"  # key of `st.session_state`: new lines by old ones, of the callbacks of one click


class Slo(NamedTuple):
    """An SLO as the form shows it: a bound in ms, or in % for attainment, which has no percentile."""

    metric: str
    percentile: str
    bound: float
    slo_class: str = ""

    @classmethod
    def of_line(cls, line: str) -> Slo | None:
        """Return the SLO of a line; None if the line is none."""
        with suppress(UserError):
            (attainment,) = parse_objectives([f"{LATENCIES[0]}<=1", line]).slos
            if attainment.attainment:
                return cls(ATTAINMENT, "", float(100 * attainment.share))
        for also in ((), (f"{ATTAINMENT}>=0.5",)):
            with suppress(UserError):
                first = parse_objectives([line, *also]).slos[0]
                ((name, bound),) = first.bounds
                return cls(name, _SHARED if also else first.statistic, bound, first.slo_class)
        return None

    @property
    def line(self) -> str:
        """The SLO as a line of text."""
        if self.metric == ATTAINMENT:
            return f"{ATTAINMENT}>={self.bound / 100:.10g}"
        if self.percentile == _SHARED:
            return f"{self.metric}<={self.bound:.10g}"
        return f"{self.metric} {self.percentile}<={self.bound:.10g}" + f" for {self.slo_class}" * bool(self.slo_class)


def slo_form(lines: Sequence[str]) -> None:
    """Draw the form of the SLOs in `lines`."""
    rows = [Slo.of_line(line) for line in lines]
    for at, (line, slo) in enumerate(zip(lines, rows, strict=True)):
        if slo is None:
            st.caption(f"{verbatim(line)} is only in the text.")
        else:
            with st.container(border=True):
                _row(lines, at, slo)
    unused = [name for name in LATENCIES if name not in {slo.metric for slo in rows if slo}]
    added = Slo(next(iter(unused), LATENCIES[0]), "p99", float(_ADDED)).line
    st.button("Add an SLO", key="slo_add", icon=":material/add:", on_click=go_to, kwargs={"slo": [*lines, added]})


def _row(lines: Sequence[str], at: int, slo: Slo) -> None:
    """Draw the inputs of one SLO. Their keys name its line, so that another text makes new inputs."""
    keys = {field: f"slo_{field}_{at}_{lines[at]}" for field in Slo._fields}
    how: dict[str, Any] = {"on_change": _changed, "args": (lines[at], slo, keys, lines)}
    options = list(LATENCIES) if slo.metric != ATTAINMENT else [ATTAINMENT]
    name, share = st.columns([5, 4], gap="small")
    with name:
        st.selectbox("Metric", options, options.index(slo.metric), _label, keys["metric"], **how)
    with share:
        if slo.metric == ATTAINMENT:
            st.number_input(
                "at least (%)", min(_LOWEST, slo.bound), 100.0, slo.bound, 1.0, "%.6g", key=keys["bound"], **how
            )
        else:
            shares = list(dict.fromkeys([*_PERCENTILES, slo.percentile]))
            at_share = shares.index(slo.percentile)
            st.selectbox("Percentile", shares, at_share, key=keys["percentile"], help=_HELP, **how)
    bound, of_class = st.columns(2)
    if slo.metric != ATTAINMENT:
        with bound:
            lowest, now = min(_LOWEST, slo.bound), min(slo.bound, _HIGHEST)
            st.number_input("at most (ms)", lowest, _HIGHEST, now, 10.0, "%.6g", key=keys["bound"], **how)
        with of_class:
            if slo.percentile != _SHARED:
                st.text_input("SLO class", slo.slo_class, 60, keys["slo_class"], help=_CLASS, **how)
    if len(lines) > 1:
        rest = [line for number, line in enumerate(lines) if number != at]
        key = f"slo_remove_{at}_{lines[at]}"
        st.button("Remove", key=key, type="tertiary", icon=":material/delete:", on_click=go_to, kwargs={"slo": rest})


def _changed(line: str, slo: Slo, keys: dict[str, str], lines: Sequence[str]) -> None:
    """Rewrite one line from the inputs of its row, and add a share if it needs one.

    Changes of several rows may come at once; each then begins with the lines of the one before.
    """
    said = {field: st.session_state[key] for field, key in keys.items() if key in st.session_state}
    if isinstance(said.get("slo_class"), str):
        said["slo_class"] = " ".join(said["slo_class"].split())
    written = st.session_state.setdefault(_WRITTEN, {})
    before, new = going_to("slo"), slo._replace(**said).line
    if before is None:
        before = list(lines)
        written.clear()
    mine = written.get(line, line)
    after = [new if one == mine else one for one in before]
    written[line] = new
    rows = [Slo.of_line(one) for one in after]
    shared, shares = (any(row and row[at] == name for row in rows) for at, name in ((1, _SHARED), (0, ATTAINMENT)))
    if shared and not shares:
        after.append(Slo(ATTAINMENT, "", 99.0).line)
    go_to(slo=list(dict.fromkeys(after)))


def _label(name: str) -> str:
    return name.capitalize() if name == ATTAINMENT else metric(name).label
