"""The columns of an uploaded CSV file or JSON lines, if the reader does not know their names: the user says them.

Only the beginning of the file is read here, as text. The requests themselves are read elsewhere
(`tokentwin.dashboard.uploads`).
"""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import streamlit as st

from tokentwin.dashboard.blocks import data_table
from tokentwin.dashboard.shown import verbatim
from tokentwin.dashboard.url import fresh_key
from tokentwin.serving.errors import UserError
from tokentwin.traces.formats.columns import usual_field
from tokentwin.traces.formats.rows import delimiter
from tokentwin.traces.formats.simple import FIELDS, SimpleCsvReader, SimpleJsonReader
from tokentwin.traces.formats.trace_file import READERS

ROWS = 10
_HEAD = 65536  # bytes of the file that are looked at
_SHOWN = 30  # columns, and characters of a value
_NOTHING = "not in the file"
_UNITS = {
    "timestamp": "date and time, or seconds",
    "timestamp_ms": "milliseconds",
    "timestamp_us": "microseconds",
    "timestamp_ns": "nanoseconds",
}
_SUFFIX = re.compile(r"(?:[^a-z0-9](ms|us|ns)|(?<=[a-z])(Ms|Us|Ns))\W*$")
_OURS = frozenset({"id", "adapter", "max_tokens"})  # fields that the form does not ask for
_REQUIRED = {"timestamp": "Arrival", "prompt_tokens": "Prompt tokens", "output_tokens": "Output tokens"}
_OPTIONAL = {"tenant": "Tenant", "slo_class": "SLO class", "priority": "Priority"}
# Words in a column's name that suggest a field; the first field with a word in the name is offered.
_WORDS = {
    "timestamp": r"time|date|arriv|when|start|\bts\b|^t$",
    "prompt_tokens": r"prompt|input|\bin\b|context|prefill",
    "output_tokens": r"output|completion|\bout\b|generat|response|decode|answer",
    "slo_class": r"class|tier",
    "tenant": r"tenant|team|customer|account|user",
    "priority": r"priority",
}
TEMPLATE = """\
timestamp,prompt_tokens,output_tokens,tenant,slo_class,priority
2026-11-24T10:00:00.000Z,812,145,search,interactive,0
2026-11-24T10:00:00.350Z,2304,60,search,interactive,0
2026-11-24T10:00:01.100Z,150,512,reports,batch,1
"""


def stated_columns(content: bytes, parameter: str) -> dict[str, str] | None:
    """Return the column of each field of an upload: none if its reader knows the names, or it is in another format.

    Otherwise draw its first rows and the choice of columns, and return the choice; None until it is complete.
    `parameter` is that of the upload in the URL. Raises UserError for a column that is chosen twice.
    """
    rows = first_rows(content)
    header = list(dict.fromkeys(name for row in rows for name in row))
    if not rows or _known(header):
        return {}
    st.caption(f"The columns have other names than ours. These are the first {len(rows)} rows. Which column is which?")
    data_table([{name[:_SHOWN]: str(row.get(name, ""))[:_SHOWN] for name in header[:_SHOWN]} for row in rows])
    likely = likely_columns(header)
    columns: dict[str, str] = {}
    for field, label in _REQUIRED.items():
        at = header.index(likely[field]) if field in likely else None
        key = fresh_key(f"{parameter}_{field}", parameter)
        chosen = st.selectbox(label, header, at, key=key, placeholder="choose a column")
        if field == "timestamp":
            key = fresh_key(f"{parameter}_unit_{chosen}", parameter)
            units = list(_UNITS)
            field = st.selectbox("Arrival is in", units, units.index(likely_unit(chosen)), _UNITS.__getitem__, key)
        if chosen is not None:
            columns[field] = chosen
    if len(columns) < len(_REQUIRED):
        return None
    for field, label in _OPTIONAL.items():
        options = [_NOTHING, *header]
        key = fresh_key(f"{parameter}_{field}", parameter)
        chosen = st.selectbox(label, options, options.index(likely.get(field, _NOTHING)), key=key)
        if chosen != _NOTHING:
            columns[field] = chosen
    if len(set(columns.values())) < len(columns):
        raise UserError("columns", ", ".join(columns.values()), "name a column twice; choose another for one of them")
    columns |= {name: name for name in header if name in _OURS and name not in columns.values()}
    if unread := [name for name in header if name not in columns.values()]:
        st.caption(f"Left out: {', '.join(verbatim(name[:_SHOWN]) for name in unread[:_SHOWN])}.")
    return columns


def offer_template(parameter: str) -> None:
    """Draw a button that downloads a CSV file with our names of columns."""
    st.download_button(
        "Template (CSV)",
        TEMPLATE,
        "trace.csv",
        "text/csv",
        key=f"{parameter}_template",
        type="tertiary",
        icon=":material/download:",
        on_click="ignore",
    )


def show_first_requests(path: Path) -> None:
    """Draw the first requests of a kept trace, as they were read."""
    names = ["arrival_ns", "prompt_len", "output_len", "tenant", "slo_class"]
    with st.expander(f"The first {ROWS} requests"):
        with pq.ParquetFile(path) as file:
            there = [name for name in names if name in file.schema_arrow.names]
            first = next(file.iter_batches(ROWS, columns=there)).to_pylist()
        shown = [
            {
                "arrival (s)": row["arrival_ns"] / 1e9,
                "prompt": row["prompt_len"],
                "output": row["output_len"],
                **{name: row[name] for name in ("tenant", "slo_class") if any(one.get(name) for one in first)},
            }
            for row in first
        ]
        data_table(shown, {"arrival (s)": "%.3f"})


def first_rows(content: bytes) -> list[dict[str, Any]]:
    """Return the first rows of simple CSV or JSON lines, plain or gzipped; none for any other content."""
    head = _head(content)
    try:
        reader = next((reader for reader in READERS if reader.matches(head)), None) if head.strip() else None
        text = head.decode("utf-8-sig", errors="ignore")
        if isinstance(reader, SimpleJsonReader):
            return _objects(text.splitlines()[:ROWS])
        if isinstance(reader, SimpleCsvReader):
            lines = text.splitlines()
            whole = lines if len(head) < _HEAD else lines[:-1]
            rows = csv.DictReader(whole[: 1 + ROWS], skipinitialspace=True, delimiter=delimiter(whole[0]))
            rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]  # as the reader of the whole file does
            return [row for row in rows if None not in row][:ROWS]
    except (csv.Error, IndexError):
        pass  # the reader will say what is wrong
    return []


def likely_columns(header: Sequence[str]) -> dict[str, str]:
    """Return the column that each field probably has, by its name; a column has one field only."""
    likely: dict[str, str] = {}
    for column in header:
        usual = usual_field(column, FIELDS)
        if usual in _WORDS:
            likely.setdefault(usual, column)
    for field, words in _WORDS.items():
        free = (column for column in header if column not in likely.values() and re.search(words, _in_words(column)))
        if field not in likely and (first := next(free, None)) is not None:
            likely[field] = first
    return likely


def likely_unit(column: str | None) -> str:
    """Return the field of a time with the unit that the column's name ends with."""
    unit = _SUFFIX.search(column or "")
    return f"timestamp_{(unit[1] or unit[2]).lower()}" if unit else "timestamp"


def _in_words(column: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", column.lower())


def _known(header: Sequence[str]) -> bool:
    """Return True if the reader knows the field of every column, and no two columns have the same field."""
    fields = [column if column in ("prompt", "items") else usual_field(column, FIELDS) for column in header]
    return None not in fields and len(set(fields)) == len(fields)


def _objects(lines: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, Mapping):
                rows.append(dict(row))
    return rows


def _head(content: bytes) -> bytes:
    if not content.startswith(b"\x1f\x8b"):
        return content[:_HEAD]
    try:
        return zlib.decompressobj(wbits=31).decompress(content[:_HEAD], _HEAD)
    except zlib.error:
        return b""
