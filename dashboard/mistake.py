"""What is wrong with a file or an input, as a page says it: one line, in which paths are those under the runs."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from serving.errors import UserError


def mistake(error: UserError, runs: Path) -> None:
    """Show the line. Where the directory of runs lies on the server is nobody's business."""

    def told(text: object) -> object:
        return text.replace(f"{runs}/", "") if isinstance(text, str) else text

    st.error(str(UserError(str(told(error.field)), told(error.value), error.remedy)), icon=":material/error:")
