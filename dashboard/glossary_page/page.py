"""Glossary: every metric of the registry, its definition, and its names in other tools."""

from __future__ import annotations

import streamlit as st

from tokentwin.dashboard.blocks import data_table, titled
from tokentwin.dashboard.shown import sentence, verbatim
from tokentwin.dashboard.url import in_url, text
from tokentwin.serving.metrics import METRICS, STATISTICS, TERMS, TOOLS, Metric

_SCOPES = {
    "request": ("Per request", "one value for each request that finished"),
    "token": ("Per gap between tokens", "one value for each gap between two output tokens"),
    "step": ("Per engine step", "one value for each step"),
    "run": ("Per run", "one value"),
}
_BETTER = {
    "lower": ":green-badge[:material/south: lower is better]",
    "higher": ":green-badge[:material/north: higher is better]",
}
_SLO_NOTE = (
    "These statistics describe a distribution. A percentile is computed by nearest rank, so it is always a value that "
    "occurred."
)


@in_url
def show() -> None:
    """Draw the page. `?q=` searches, `#METRIC` goes to one metric."""
    with titled("Glossary"):
        wanted = text("Search", "q", placeholder="a metric, a word, or a name in vLLM")
    matching = [m for m in METRICS.values() if matches(m, wanted)]
    st.caption(
        f"{len(matching)} of {len(METRICS)} metrics. Each metric has one definition, for real and simulated runs and "
        "everywhere in tokentwin."
    )
    if not matching:
        st.info(f"No metric matches {verbatim(repr(wanted))}.", icon=":material/search_off:")
    for scope, (heading, values) in _SCOPES.items():
        of_scope = [m for m in matching if m.scope == scope]
        if of_scope:
            st.header(heading, anchor=scope, help=f"{values.capitalize()}.")
            for known in of_scope:
                _entry(known)
    if not wanted:
        st.header("Statistics", anchor="statistics", help=_SLO_NOTE)
        data_table({"name": list(STATISTICS), "definition": list(STATISTICS.values())}, width="stretch")
        st.header("Other terms", anchor="terms")
        data_table({"name": list(TERMS), "definition": list(TERMS.values())}, width="stretch")


def matches(known: Metric, wanted: str) -> bool:
    """Return whether every word of `wanted` is in a metric's names, label, unit or definition."""
    elsewhere = (name for tool in TOOLS for name in known.names_in(tool))
    said = " ".join((known.name, known.label, known.unit, known.definition, *elsewhere)).casefold()
    return all(word in said for word in wanted.casefold().split())


def _entry(known: Metric) -> None:
    with st.container(border=True):
        left, right = st.columns([3, 2], gap="medium")
        with left:
            st.subheader(known.label, anchor=known.name)
            unit = f" · {verbatim(known.unit)}" if known.unit else ""
            st.markdown(f"`{known.name}`{unit} {_BETTER.get(known.better or '', '')}")
            st.markdown(verbatim(sentence(known.definition)))
        with right:
            names = [(title, known.names_in(tool)) for tool, title in TOOLS.items() if known.names_in(tool)]
            lines = [f"**{title}** {', '.join(f'`{name}`' for name in called)}" for title, called in names]
            st.markdown("  \n".join(lines) or ":gray[no other tool reports it]")
