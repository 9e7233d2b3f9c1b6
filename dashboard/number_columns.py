"""How the columns of a table of Streamlit's write their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st


def number_columns(formats: Mapping[str, str], help: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """`column_config` with a printf format for each column named, and what some of them mean, on hover."""
    said = help or {}
    return {name: st.column_config.NumberColumn(format=form, help=said.get(name)) for name, form in formats.items()}
