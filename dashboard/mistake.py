"""What is wrong with a file or an input, as a page says it: one line, in which paths are those under the runs."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboard.shown import verbatim
from serving.errors import UserError


def mistake(error: UserError | str, runs: Path | None = None) -> None:
    """Show the line, letter by letter. Where the directory of runs lies on the server is nobody's business."""

    def told(text: object) -> object:
        return text.replace(f"{runs}/", "") if runs and isinstance(text, str) else text

    if isinstance(error, UserError):
        error = str(UserError(str(told(error.field)), told(error.value), error.remedy))
    st.error(verbatim(error), icon=":material/error:")
