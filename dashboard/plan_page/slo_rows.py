"""SLOs as rows that can be added and taken away: a percentile of a metric and its bound; `slo=` in the URL, each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

import streamlit as st

from dashboard.shown import verbatim
from dashboard.url import keep_all, moved, named_all
from serving.metrics import metric

METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms")
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")
MOST = 8
_LEAST, _LARGEST = 0.1, 1e7  # ms
_BOUNDED = tuple(f"{name} {percentile}" for name in METRICS for percentile in PERCENTILES)
_ROW = re.compile(r"(?P<bounded>\w+ p[\d.]+)<=(?P<bound>\d+(?:\.\d+)?)")
_ids = count()

Row = tuple[int, str, float]  # the id under which its widgets are known, and what they begin with


def slo_rows(otherwise: Sequence[str]) -> list[str]:
    """Draw the rows; objectives as `tokentwin plan --slo` takes them, each once."""
    if moved("slo") or "slo_rows" not in st.session_state:
        texts = named_all("slo") or otherwise
        st.session_state["slo_rows"] = [row for text in texts[:MOST] if (row := _row(text))]
    rows: list[Row] = st.session_state["slo_rows"]
    st.markdown("SLOs (ms)", help="p99 means that 99 % of the requests must stay within the bound.")
    rows = [_draw(row) for row in rows]
    st.session_state["slo_rows"] = rows
    if len(rows) < MOST and st.button("Add an SLO", icon=":material/add:", key="slo_add", width="stretch"):
        st.session_state["slo_rows"] = [*rows, (next(_ids), "e2e_ms p99", 30_000.0)]
        st.rerun()
    texts = list(dict.fromkeys(f"{bounded}<={bound:.10g}" for _, bounded, bound in rows))
    keep_all("slo", texts, otherwise)
    return texts


def _row(text: str) -> Row | None:
    said = _ROW.fullmatch(text)
    if said is None or said["bounded"] not in _BOUNDED:
        st.info(f"This page does not know the SLO {verbatim(repr(text[:60]))} of the link.")
        return None
    return next(_ids), said["bounded"], min(max(float(said["bound"]), _LEAST), _LARGEST)


def _draw(row: Row) -> Row:
    id, bounded, bound = row
    percentile, limit, drop = st.columns([7, 6, 1.5], gap="xxsmall", vertical_alignment="center")
    bounded = percentile.selectbox(
        "Percentile", _BOUNDED, _BOUNDED.index(bounded), _shown, key=f"slo_of_{id}", label_visibility="collapsed"
    )
    bound = limit.number_input(
        "Bound (ms)", _LEAST, _LARGEST, bound, 10.0, "%.6g", key=f"slo_bound_{id}", label_visibility="collapsed"
    )
    if drop.button("", icon=":material/close:", key=f"slo_drop_{id}", type="tertiary", help="Remove it"):
        st.session_state["slo_rows"] = [kept for kept in st.session_state["slo_rows"] if kept[0] != id]
        st.rerun()
    return id, bounded, bound


def _shown(bounded: str) -> str:
    name, percentile = bounded.split()
    return f"{metric(name).label} {percentile}"
