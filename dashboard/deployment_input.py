"""A deployment of the user's own as an input: pasted or uploaded once, kept, and found again by what the URL says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.deployment_text import MOST_KB, keep_deployment, kept_deployment
from dashboard.incomplete import Incomplete
from dashboard.uploads import missing
from dashboard.url import fresh_key, keep, named

_EXAMPLE = (
    "model: Llama-3.1-8B\ndevice: cuda\ngpu_memory_utilization: 0.9\npolicy: sarathi\nscheduler:\n  max_num_seqs: 64"
)
_YAML = (
    f"The file that `tokentwin simulate -d` takes, up to {MOST_KB} kB. Settings that it leaves out have their "
    "defaults. It can name only bundled models, policies and routers."
)


def deployment_input(runs: Path, parameter: str, what: str) -> dict[str, Any] | Incomplete:
    """Draw the input; the settings that were stated in what `parameter` of the URL names. Raises UserError for others.

    `what` is what to paste, in words.
    """
    said = named(parameter) or ""
    with st.expander("Its YAML", expanded=kept_deployment(runs, said) is None):
        pasted = st.text_area(
            "Paste it",
            height=160,
            max_chars=MOST_KB * 1000,
            key=fresh_key(f"{parameter}_text", parameter),
            placeholder=_EXAMPLE,
            help=_YAML,
        )
        upload = st.file_uploader(
            "or upload it", type=["yaml", "yml"], key=fresh_key(f"{parameter}_upload", parameter), max_upload_size=1
        )
        if upload is not None and not pasted.strip():
            pasted = upload.getvalue().decode("utf-8", errors="replace")
        if pasted.strip():
            said = keep_deployment(runs, pasted)
    keep(parameter, said)
    data = kept_deployment(runs, said)
    if data is None:
        return Incomplete(missing(what, "paste") if said else f"Paste the {what}.")
    return data
