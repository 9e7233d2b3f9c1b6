"""Downloads: every one of them is a function of `tokentwin export`, called when the button is clicked."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyarrow as pa
import streamlit as st

from tokentwin.exports.formats import FORMATS, TABLES, write_export
from tokentwin.exports.tables import as_csv, as_parquet
from traces.recording import Recording

_LABELS = {
    "parquet": "Parquet",
    "csv": "CSV",
    "html": "Report",
    "perfetto": "Perfetto trace",
    "openmetrics": "OpenMetrics",
}


def downloads(recording: Recording) -> None:
    """A menu of all formats of a recording."""
    name = recording.path.resolve().name
    with st.popover("Download", icon=":material/download:"):
        for format, about in FORMATS.items():
            for table in TABLES if about.of_table else (None,):
                st.download_button(
                    _LABELS[format] + (f" of {table}" if table else ""),
                    _export(recording, format, table),
                    file_name=f"{name}{f'-{table}' if table else ''}{about.suffix}",
                    mime=about.mime,
                    help=about.what,
                    on_click="ignore",
                    width="stretch",
                    key=f"download-{format}-{table}",
                )
        st.caption(f"The same as `tokentwin export {name} --to FORMAT -o FILE`.")


def table_downloads(table: pa.Table, name: str) -> None:
    """A menu of a table as Parquet or CSV."""
    with st.popover("Download", icon=":material/download:"):
        for format, write in (("parquet", as_parquet), ("csv", as_csv)):
            st.download_button(
                _LABELS[format],
                _written(table, write),
                file_name=f"{name}{FORMATS[format].suffix}",
                mime=FORMATS[format].mime,
                on_click="ignore",
                width="stretch",
                key=f"download-{format}",
            )


def _export(recording: Recording, format: str, table: str | None) -> Callable[[], bytes]:
    def content() -> bytes:
        out = io.BytesIO()
        write_export(recording, format, out, table)
        return out.getvalue()

    return content


def _written(table: pa.Table, write: Callable[[pa.Table, io.BytesIO], None]) -> Callable[[], bytes]:
    def content() -> bytes:
        out = io.BytesIO()
        write(table, out)
        return out.getvalue()

    return content
