"""A trace of the user's own as an input: uploaded once, kept under the runs, and found again by what the URL says."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboard.incomplete import Incomplete
from dashboard.uploads import MOST_MB, keep_trace, missing, trace_path
from dashboard.url import fresh_key, keep, named

_FORMATS = "Any format that `tokentwin trace` reads: Azure, Mooncake, Parquet, CSV, JSON lines; plain or gzipped."


def trace_input(runs: Path, parameter: str) -> Path | Incomplete:
    """Draw the upload; where the trace that `parameter` of the URL names is kept. Raises UserError as readers do."""
    upload = st.file_uploader(
        "A trace", key=fresh_key(f"{parameter}_upload", parameter), max_upload_size=MOST_MB, help=_FORMATS
    )
    said = named(parameter) or ""
    if upload is not None:
        with st.spinner("Reading the trace"):
            said = keep_trace(runs, upload.getvalue())
    keep(parameter, said)
    path = trace_path(runs, said)
    if path is None:
        return Incomplete(missing("trace", "upload") if said else "Upload a trace.")
    return path
