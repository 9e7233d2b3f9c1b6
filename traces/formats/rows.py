"""Rows of text traces (CSV or JSON lines, plain or gzipped), with their line numbers.

A reader gets a field of a row by name and type. An invalid field raises a UserError with the file, the line and the
field. Numbers are decimal and never binary floats, so times are exact.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.serving.data_file import parse_json
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.workload import Workload, WorkloadRequest, shares_prefixes
from tokentwin.traces.distributions import LATEST_NS, LONGEST, TOO_LATE
from tokentwin.traces.formats.columns import Columns
from tokentwin.traces.formats.request_table import RequestTable

_LOG = logging.getLogger("tokentwin")
_LOGGED = 10_000  # number of lines between log messages, about a second of reading
_GZIP = b"\x1f\x8b"
_LARGEST = 2**63 - 1
_MOST_OBJECTS = 1 << 16  # number of requests kept as objects, which take 40 MB
# Gzip compresses traces to about a tenth of their size. Data that was compressed a thousandfold is not a trace, and
# unpacking it would take very long.
_SMALL_BYTES = 8 << 20
_MOST_PACKED = 100
_LARGEST_DOCUMENT = 1 << 30  # bytes of one JSON array; all of ShareGPT has 0.7 GB
LONGEST_LINE_BYTES = 64 << 20  # a prompt of 2,147,483,647 tokens has 4,194,304 blocks
_INSTANT = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?)(?:(?<=:\d\d:\d\d)\.(\d{1,9}))? ?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SAY_COLUMNS = "`tokentwin trace convert --columns`"
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character; a JSON escape can produce one


class Row:
    """A line of a trace. The values in `fields` are strings for CSV, and JSON values for JSON lines."""

    def __init__(
        self, path: Path, line: int, fields: Mapping[str, Any], typed: bool = False, comma: bool = False
    ) -> None:
        self._typed = typed  # True: a string does not count as a number
        self._comma = comma  # True: times have a decimal comma
        self.path = path
        self.line = line
        self.fields = fields

    def error(self, field: str, value: object, remedy: str) -> UserError:
        """Return a UserError about `field` of this row."""
        return UserError(f"{self.path}:{self.line}: {field}", value, remedy)

    def only(self, *known: str) -> None:
        """Raise UserError about the first field that is not in `known`; without `known`, all fields are allowed."""
        for field in self.fields if known else ():
            if field not in known:
                raise self.error(field, self.fields[field], f"is not a known field; choose from {', '.join(known)}")

    def tokens(self, field: str) -> int:
        """Return a length in tokens, from 1 to `LONGEST`."""
        return self.integer(field, 1, most=LONGEST)

    def output_tokens(self, field: str) -> int:
        """Return the length of an output, from 0 (a pooling request) to `LONGEST`."""
        return self.integer(field, 0, most=LONGEST)

    def integer(self, field: str, least: int, default: int | None = None, most: int = _LARGEST) -> int:
        """Return an integer from `least` to `most`; `default` if the field is absent or an empty CSV cell."""
        value = self.fields.get(field, "")
        if value == "" and default is not None:
            return default
        number = self._number(field, value)
        if number != number.to_integral_value():
            raise self.error(field, value, "must be a whole number")
        return self._in_range(field, value, int(number), least, most)

    def time_ns(self, field: str, unit_ns: int) -> int:
        """Return a time in nanoseconds (0 to 146 years), from a field in units of `unit_ns`."""
        value = self.fields.get(field, "")
        number = round(self._number(field, value.replace(",", ".") if self._comma else value) * unit_ns)
        if number > LATEST_NS:
            raise self.error(field, value, TOO_LATE)
        return self._in_range(field, value, number, 0, _LARGEST)

    def instant_ns(self, field: str) -> int:
        """Return an ISO 8601 date and time as nanoseconds since 1970; without an offset it is in UTC."""
        text = self.text(field)
        match = _INSTANT.fullmatch(text)
        try:
            if match is None:
                raise ValueError(text)
            second, fraction, offset = match.groups()
            instant_ns = _second_ns(second, offset or "Z") + int((fraction or "").ljust(9, "0"))
        except (ValueError, OverflowError):
            raise self.error(field, text, "must look like 2023-11-16 18:15:46.6805900") from None
        if abs(instant_ns) > _LARGEST:
            raise self.error(field, text, "must be a date from 1678 to 2261")
        return instant_ns

    def text(self, field: str) -> str:
        """Return a string; empty if the field is absent."""
        value = self.fields.get(field, "")
        if not isinstance(value, str):
            raise self.error(field, value, "must be a string")
        if not value.isascii() and _SURROGATE.search(value):
            raise self.error(field, value, "has an escape that is not a valid character; leave it out")
        return value

    def items(self, field: str) -> list[Any]:
        value = self.fields.get(field)
        if not isinstance(value, list):
            raise self.error(field, value, "must be an array")
        return value

    def _number(self, field: str, value: Any) -> Decimal:
        if value == "":
            raise self.error(field, None, "is missing; add it")
        if self._typed and isinstance(value, str):
            raise self.error(field, value, "must be a number, without quotes")
        if isinstance(value, bool) or not isinstance(value, (str, int, Decimal)):
            raise self.error(field, value, "must be a number")
        try:
            number = Decimal(value)
        except InvalidOperation:
            raise self.error(field, value, "must be a number") from None
        if isinstance(value, str) and (not value.isascii() or "_" in value):  # Decimal would accept these
            raise self.error(field, value, "must be a number in the digits 0 to 9")
        # The exponent is bounded before any conversion: int(Decimal("1e999999999")) would never return.
        if not number.is_finite() or number.adjusted() > 20:
            raise self.error(field, value, "must be a finite number")
        return number

    def _in_range(self, field: str, value: Any, number: int, least: int, most: int) -> int:
        if number < least:
            raise self.error(field, value, f"must be at least {least}")
        if number > most:
            raise self.error(field, value, f"must be at most {most:,}")
        return number


@lru_cache(maxsize=64)
def _second_ns(second: str, offset: str) -> int:
    since = datetime.fromisoformat(second + offset) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000


def read_head(path: Path, size: int = 65536, what: str = "trace") -> bytes:
    """Return the first `size` bytes of a file's content, which is unpacked if the file is gzipped.

    Raises UserError about the thing `what` if the file cannot be read.
    """
    try:
        with open_text(path) as file:
            return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(what, str(path), f"cannot be read: {reason(error)}") from None


def csv_rows(path: Path, *known: str, columns: Columns | None = None) -> Iterator[Row]:
    """Yield the rows under the header of a CSV file, without blank lines; `columns` has the fields of its columns.

    With semicolons between the cells, as spreadsheets write them in many languages, numbers may have decimal commas.
    If `known` names columns, any other column raises UserError.
    """
    lines = (text for _, text in _numbered_lines(path))
    first = next(lines, "")
    between = delimiter(first)
    reader = csv.reader(chain([first], lines), strict=True, delimiter=between)
    try:
        header: Sequence[str | None] = [name.strip() for name in next(reader)]
        if columns is not None:
            header = columns.fields(path, 1, tuple(map(str, header)))
        for name in (name for name in header if name is not None):
            if header.count(name) > 1:
                raise UserError(f"{path}:1: header", name, "appears twice; give each column its own name")
            if known and name not in known:
                remedy = f"is not a known column; choose from {', '.join(known)}"
                raise UserError(f"{path}:1: header", name, f"{remedy}, or say which column is which ({SAY_COLUMNS})")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                remedy = f"has {len(cells)} cells, but the header has {len(header)}"
                raise UserError(f"{path}:{reader.line_num}", between.join(cells), remedy)
            fields = dict(zip(header, map(str.strip, cells), strict=True))
            fields.pop(None, None)
            yield Row(path, reader.line_num, cast(dict[str, Any], fields), comma=between == ";")
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}", None, f"is not CSV: {error}") from None


def delimiter(header: str) -> str:
    """Return the character between the cells of a CSV file with this header: a semicolon if it has no comma."""
    return ";" if ";" in header and "," not in header else ","


def json_rows(path: Path, *known: str, columns: Columns | None = None) -> Iterator[Row]:
    """Yield the objects of a JSON lines file, without blank lines; `columns` has the fields of their names.

    If `known` names fields, any other field raises UserError.
    """
    for line, text in _numbered_lines(path):
        if not text.strip():
            continue
        try:
            fields = parse_json(text, parse_float=Decimal, parse_constant=Decimal)
        except ValueError as error:
            raise UserError(f"{path}:{line}", text.strip(), str(error)) from None
        if not isinstance(fields, dict):
            raise UserError(f"{path}:{line}", text.strip(), "must be a JSON object")
        if columns is not None:
            named = zip(columns.fields(path, line, tuple(fields)), fields.values(), strict=True)
            fields = {name: value for name, value in named if name is not None}
        row = Row(path, line, fields, typed=True)
        row.only(*known)
        yield row


def json_objects(path: Path) -> Iterator[Row]:
    """Yield the objects of JSON lines, of one JSON array, or the only object of a file.

    The line of an array's object is its position in the array, from 1.
    """
    _, first = next(_numbered_lines(path), (0, ""))
    try:
        lines = isinstance(parse_json(first), dict)
    except ValueError:
        lines = False
    if lines:
        yield from json_rows(path)
        return
    try:
        data = parse_json(read_head(path, _LARGEST_DOCUMENT), parse_float=Decimal, parse_constant=Decimal)
    except ValueError as error:
        raise UserError("trace", str(path), str(error)) from None
    for number, fields in enumerate(data if isinstance(data, list) else [data], 1):
        if not isinstance(fields, dict):
            raise UserError(f"{path}:{number}", fields, "must be a JSON object")
        yield Row(path, number, fields, typed=True)


def open_text(path: Path) -> IO[bytes]:
    if path.exists() and not path.is_file():
        raise UserError("trace", str(path), "is not a regular file; save it to one first")
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return io.BufferedReader(_Unpacked(path), 1 << 20) if packed else path.open("rb")


class _Unpacked(io.RawIOBase):
    """The unpacked content of a gzipped file. Raises OSError if the compression ratio is too high for a trace."""

    def __init__(self, path: Path) -> None:
        self._packed = path.open("rb")
        self._file = gzip.GzipFile(fileobj=self._packed)
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._file.readinto(buffer)
        self._read += read
        if self._read > max(_SMALL_BYTES, _MOST_PACKED * self._packed.tell()):
            raise OSError(
                f"it unpacks to more than {_MOST_PACKED} times its size; unpack it with gunzip if it is meant"
            )
        return read

    def close(self) -> None:
        self._file.close()
        self._packed.close()
        super().close()


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    line = 0
    try:
        with open_text(path) as file:
            for line, data in enumerate(iter(partial(file.readline, LONGEST_LINE_BYTES), b""), 1):
                if len(data) == LONGEST_LINE_BYTES:
                    remedy = f"is longer than {LONGEST_LINE_BYTES:,} bytes; end each request with a line break"
                    raise UserError(f"{path}:{line}", "line", remedy)
                yield line, data.decode("utf-8-sig" if line == 1 else "utf-8")
                if line % _LOGGED == 0:
                    _LOG.info("reading %s: %s lines so far", path.name, f"{line:,}")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{line}", repr(error.object[:20]), "is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}:{line + 1}", None, f"cannot be read: {reason(error)}") from None


def since_first(path: Path, table: pa.Table) -> pa.Table:
    """Return `table` with its column `arrival_ns` counted from the earliest. Raises UserError beyond 146 years."""
    arrivals = table["arrival_ns"]
    spread = pc.min_max(arrivals).as_py()
    if len(table) and spread["max"] - spread["min"] > LATEST_NS:
        remedy = "lasts longer than 146 years; correct its earliest or its latest timestamp"
        raise UserError("trace", str(path), remedy)
    at = table.schema.get_field_index("arrival_ns")
    return table.set_column(at, "arrival_ns", pc.subtract(arrivals, spread["min"]))


def named_workload(path: Path, requests: Sequence[WorkloadRequest] | RequestTable) -> Workload:
    """Return the workload of a trace's sorted requests, named after the file. Raises UserError if there are none.

    The requests of a long trace stay columns. Others become a list, because a plan passes over them many times.
    """
    if not requests:
        raise UserError("trace", str(path), "holds no requests")
    share = requests.share_prefixes() if isinstance(requests, RequestTable) else shares_prefixes(requests)
    kept = requests if len(requests) > _MOST_OBJECTS else list(requests)
    return Workload(kept, name=path.name.split(".")[0], shares_prefixes=share)
