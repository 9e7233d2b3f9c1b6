"""Inputs that users paste or upload once. They are kept under the runs directory, and the URL names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st

from tokentwin.dashboard.deployment_text import MOST_KB, keep_deployment, kept_deployment
from tokentwin.dashboard.shown import verbatim
from tokentwin.dashboard.trace_columns import offer_template, show_first_requests, stated_columns
from tokentwin.dashboard.uploads import MOST_MB, keep_model, keep_trace, model_path, plain_name, trace_path
from tokentwin.dashboard.url import fresh_key, keep, named

_FORMATS = (
    "Any format that `tokentwin trace` reads: Azure, Mooncake, OpenTelemetry GenAI spans, Dynamo, AIPerf, Parquet, "
    "CSV, JSON lines; plain or gzipped. If the columns of a CSV file have other names, the page asks for them."
)
_EXAMPLE = (
    "model: Llama-3.1-8B\ndevice: cuda\ngpu_memory_utilization: 0.9\npolicy: sarathi\nscheduler:\n  max_num_seqs: 64"
)
_YAML = (
    f"A deployment file as for `tokentwin simulate -d`, of at most {MOST_KB} kB. Settings that the file leaves out "
    "have "
    "their defaults. Models, policies and routers must be bundled ones."
)
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Incomplete:
    """A placeholder for an input that is missing: a sentence that asks for it."""

    what: str


def trace_input(runs: Path, parameter: str) -> Path | Incomplete:
    """Draw the upload, and return the path of the kept trace that the URL's `parameter` names.

    Raises UserError if the upload is no valid trace.
    """
    upload = st.file_uploader(
        "A trace", key=fresh_key(f"{parameter}_upload", parameter), max_upload_size=MOST_MB, help=_FORMATS
    )
    said, _, name = (named(parameter) or "").partition(":")
    if upload is None and not said:
        offer_template(parameter)
    if upload is not None:
        columns = stated_columns(upload.getvalue(), parameter)
        if columns is None:
            return Incomplete("Say at the left, below the trace, which column is which.")
        with st.spinner("Reading the trace"):
            said, name = keep_trace(runs, upload.getvalue(), upload.name, columns), plain_name(upload.name)
    path = trace_path(runs, said)
    keep(parameter, f"{said}:{name}" if name else said)
    if path is None:
        which = f"The trace {verbatim(plain_name(name))} of this link" if name else "The trace of this link"
        sum = " Upload the same file, and choose the same columns if the page asks for them." if said else ""
        return Incomplete(f"{which} is not on this server.{sum}" if said else "Upload a trace.")
    show_first_requests(path)
    return path


def deployment_input(runs: Path, parameter: str, what: str) -> dict[str, Any] | Incomplete:
    """Draw the input, and return the settings that the URL's `parameter` names. Raises UserError for invalid settings.

    `what` is what to paste, in words.
    """
    said = named(parameter) or ""
    with st.expander("Deployment in YAML", expanded=kept_deployment(runs, said) is None):
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
    return _kept(parameter, said, kept_deployment(runs, said), f"Paste the {what}.", what)


def model_input(runs: Path) -> Path | Incomplete:
    """Draw the input of a model's config.json, and return the folder in which the pasted text is kept.

    Raises UserError if the text describes no model.
    """
    said = named("config") or ""
    with st.expander("config.json", expanded=model_path(runs, said) is None):
        text = st.text_area(
            "Text of config.json",
            height=140,
            max_chars=100_000,
            key=fresh_key("config_text", "config"),
            help="Copy config.json from the model's page on Hugging Face.",
        )
        if text.strip():
            said = keep_model(runs, text)
    return _kept("config", said, model_path(runs, said), "Paste the model's config.json.", "config.json")


def _kept(parameter: str, said: str, kept: Kept | None, ask: str, what: str) -> Kept | Incomplete:
    """Return `kept` and write its name to the URL. If it is None, return a sentence that asks to paste the input."""
    keep(parameter, said)
    if kept is not None:
        return kept
    return Incomplete(f"The {what} of this link is not on this server. Please paste it again." if said else ask)
