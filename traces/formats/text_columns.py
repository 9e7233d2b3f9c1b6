"""Columns of text traces, which Arrow's own readers make a hundred times as fast as Python makes rows.

They read only *plain* text, which they understand exactly as `tokentwin.traces.formats.rows` does: CSV without quotes,
numbers without underscores. For any other text, and for an error, they raise `NotPlain`; the rows then decide and name
the line.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from tokentwin.traces.distributions import LATEST_NS
from tokentwin.traces.formats.columns import Columns
from tokentwin.traces.formats.rows import LONGEST_LINE_BYTES, delimiter, open_text

_LOG = logging.getLogger("tokentwin")
_BLOCK_BYTES = 4 << 20
_BOM = b"\xef\xbb\xbf"
_LONGEST_CELL = 131_072  # characters; Python's csv refuses longer ones
_DIGITS = {10**digits: digits for digits in (0, 3, 6, 9)}
_ZONE = "(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)"
_INSTANT = (
    "^(?:1[7-9]|2[01])[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}"
    rf"(?::[0-9]{{2}}(?:\.[0-9]{{1,9}})?)?{_ZONE}?$"
)  # of the years that Arrow's nanoseconds can hold


class NotPlain(Exception):
    """A text that the rows must read: it is unusual, or it is wrong."""


def text_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a text in blocks of whole lines, without a byte order mark. Raises NotPlain."""
    lines, skipped = 0, _BOM
    try:
        with open_text(path) as file:
            while block := file.read(_BLOCK_BYTES):
                rest = file.readline(LONGEST_LINE_BYTES)
                if len(rest) == LONGEST_LINE_BYTES:
                    raise NotPlain
                yield (block + rest).removeprefix(skipped)
                skipped = b""
                if len(block) == _BLOCK_BYTES:
                    lines += block.count(b"\n") + rest.count(b"\n")
                    _LOG.info("reading %s: %s lines so far", path.name, f"{lines:,}")
    except (OSError, EOFError, zlib.error):
        raise NotPlain from None


def csv_batches(path: Path, *known: str, columns: Columns | None = None) -> Iterator[dict[str, pa.ChunkedArray]]:
    """Yield the cells of a CSV file by column, as `csv_rows` yields its rows; raises NotPlain in place of its errors.

    Raises UserError for a stated column that is not there.
    """
    names: list[str | None] = []
    empty = True
    for block in text_blocks(path):
        if b'"' in block or block.count(b"\r") != block.count(b"\r\n"):
            raise NotPlain
        if not names:
            first, _, block = block.partition(b"\n")
            names = _header(path, first, known, columns)
        if block.strip(b"\r\n"):
            empty = False
            named = zip(names, _cells(block, len(names)), strict=True)
            yield {name: cells for name, cells in named if name is not None}
    if empty:
        raise NotPlain


def _header(path: Path, line: bytes, known: tuple[str, ...], columns: Columns | None) -> list[str | None]:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise NotPlain from None
    if delimiter(text) != ",":
        raise NotPlain
    names: list[str | None] = [name.strip() for name in text.split(",")]
    if columns is not None:
        names = list(columns.fields(path, 1, tuple(map(str, names))))
    fields = [name for name in names if name is not None]
    if len(set(fields)) < len(fields) or not set(fields) <= set(known):
        raise NotPlain
    return names


def _cells(block: bytes, count: int) -> list[pa.ChunkedArray]:
    names = [str(number) for number in range(count)]
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(block),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
            pyarrow.csv.ParseOptions(quote_char=False),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
        )
    except pa.ArrowException:
        raise NotPlain from None
    return [pc.utf8_trim_whitespace(column) for column in table.columns]


def whole_numbers(cells: pa.ChunkedArray, least: int, most: int) -> pa.ChunkedArray:
    """Return the integers in `cells`, which must be from `least` to `most`."""
    whole = cells if pa.types.is_int64(cells.type) else _cast(_cast(cells, pa.decimal128(38, 0)), pa.int64())
    spread = pc.min_max(whole).as_py()
    if whole.null_count or not (least <= spread["min"] and spread["max"] <= most):
        raise NotPlain
    return whole


def times_ns(cells: pa.ChunkedArray, unit_ns: int) -> pa.ChunkedArray:
    """Return times in nanoseconds from numbers of `unit_ns`, a power of 1000."""
    latest_ns = int(LATEST_NS)
    if pa.types.is_int64(cells.type):
        return pc.multiply(whole_numbers(cells, 0, latest_ns // unit_ns), unit_ns)
    digits = _DIGITS[unit_ns]
    rounded = pc.round(_cast(cells, pa.decimal256(76, 40)), digits, "half_to_even")
    exact = _cast(rounded, pa.decimal128(18 + digits, digits))
    return whole_numbers(pc.multiply(exact, pa.scalar(Decimal(unit_ns))), 0, latest_ns)


def instants_ns(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return ISO 8601 dates and times as nanoseconds since 1970; all or none have an offset."""
    if not _all(pc.match_substring_regex(cells, _INSTANT)):
        raise NotPlain
    zoned = _all(pc.match_substring_regex(cells, f":[^-+]*{_ZONE}$"))
    return _cast(_cast(cells, pa.timestamp("ns", "UTC" if zoned else None)), pa.int64())


def texts(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the cells as texts that Python's csv would take."""
    if pc.max(pc.utf8_length(cells)).as_py() > _LONGEST_CELL:
        raise NotPlain
    return cells


def filled(cells: pa.ChunkedArray, default: str) -> pa.ChunkedArray:
    """Return the cells with `default` for empty ones."""
    return pc.if_else(pc.equal(cells, ""), default, cells)


def are_dates(cells: pa.ChunkedArray) -> bool:
    """Return True if all timestamps are dates, and False if none is."""
    dates = pc.match_substring(pc.utf8_slice_codeunits(cells, 1), "-")
    if not _all(dates) and pc.any(dates).as_py():
        raise NotPlain
    return _all(dates)


def _cast(cells: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return pc.cast(cells, kind)
    except pa.ArrowException:
        raise NotPlain from None


def _all(flags: pa.ChunkedArray) -> bool:
    return bool(pc.all(flags).as_py())
