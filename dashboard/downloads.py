"""The menu of downloads, which is the same on every page. A click does what `tokentwin export` does."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial

import streamlit as st

from tokentwin.dashboard.export_task import MANY, export_job, exported
from tokentwin.dashboard.job_view import follow, start
from tokentwin.planning.exports.export import formats_of, write_export
from tokentwin.planning.exports.exportable import Exportable
from tokentwin.planning.exports.formats import FORMATS
from tokentwin.planning.exports.recorded_run import RecordedRun


def downloads(source: Exportable, name: str) -> None:
    """Draw a button for every format of `source`; file names begin with `name` as far as it fits into a file name.

    A job first prepares a long table of a recording, and shows its progress.
    """
    stem = re.sub(r"[^\w.]+", "-", name).strip("-.")
    with st.popover("Download", icon=":material/download:"):
        for format in formats_of(source):
            about = FORMATS[format]
            for table in source.tables if about.tabular else (None,):
                several = table is not None and len(source.tables) > 1
                label = f"{about.label} of {table}" if several else about.label
                content = _export(source, format, table)
                if table and isinstance(source, RecordedRun) and sum(source.recording.group_rows(table)) > MANY:
                    job = export_job(source.runs / "jobs", source, format, table)
                    if job.status.state != "done":
                        if st.button(f"Prepare {label}", key=f"prepare-{format}-{table}", width="stretch"):
                            start(job)
                        if job.status.state != "absent":
                            follow(job)
                        continue
                    content = partial(exported, job)
                st.download_button(
                    label,
                    content,
                    file_name=f"{stem}{f'-{table}' if several else ''}{about.suffix}",
                    mime=about.mime,
                    help=about.what,
                    on_click="ignore",
                    width="stretch",
                    key=f"download-{format}-{table}",
                )
        st.caption("`tokentwin export SOURCE --to FORMAT -o FILE` writes the same files.")


def _export(source: Exportable, format: str, table: str | None) -> Callable[[], bytes]:
    def content() -> bytes:
        from tokentwin.dashboard.html_reports.report import (
            write_report,  # plotly.js comes with it, which few clicks need
        )

        out = io.BytesIO()
        write_export(source, format, out, table, html=write_report)
        return out.getvalue()

    return content
