"""A table on a page: rows under the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard.shown import NOTHING
from dashboard.url import go_to


def table(
    rows: Any,
    formats: Mapping[str, str] | None = None,
    help: Mapping[str, str | None] | None = None,
    columns: Mapping[str, Any] | None = None,
    **how: Any,
) -> None:
    """Draw it: `formats` are printf formats of numbers, `help` what a column with a format means, on hover.

    `columns` are as `column_config` has them and `how` as `st.dataframe` does.
    """
    said = help or {}
    numbers = {
        name: st.column_config.NumberColumn(format=form, help=said.get(name)) for name, form in (formats or {}).items()
    }
    st.dataframe(rows, hide_index=True, column_config={**numbers, **(columns or {})}, **{"placeholder": NOTHING} | how)


def choosing(parameter: str, ids: Sequence[Any], key: str) -> dict[str, Any]:
    """What makes the rows of a table selectable: the page then has `parameter` name the id of the one selected."""

    def selected() -> None:
        rows = st.session_state[key].selection.rows
        if rows:
            go_to(**{parameter: str(ids[rows[0]])})

    return {"key": key, "on_select": selected, "selection_mode": "single-row"}
