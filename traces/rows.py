"""Rows of a text trace, CSV or JSON lines, plain or gzipped, each knowing the line it stands on.

The readers ask a row for a field by name and say what it must be; a field that is not becomes one UserError
that names the file, the line and the field. Numbers are decimal, never binary floats, so times are exact.
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any, cast

from serving.errors import UserError, reason
from serving.workload import Workload, WorkloadRequest, shares_prefixes
from traces.arrivals import LATEST_NS, TOO_LATE
from traces.lengths import LONGEST

_LOG = logging.getLogger("tokentwin")
_LOGGED = 10_000  # lines; about a second of reading
_GZIP = b"\x1f\x8b"
_LARGEST = 2**63 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, as a JSON escape can say


class Row:
    """One line of a trace: `fields` as the file has them, strings in a CSV and JSON values otherwise."""

    def __init__(self, path: Path, line: int, fields: Mapping[str, Any]) -> None:
        self.path = path
        self.line = line
        self.fields = fields

    def error(self, field: str, value: object, remedy: str) -> UserError:
        """What is wrong with `field` here."""
        return UserError(f"{self.path}:{self.line}: {field}", value, remedy)

    def only(self, *known: str) -> None:
        """UserError about the first field that is not one of `known`, if any are."""
        for field in self.fields if known else ():
            if field not in known:
                raise self.error(field, self.fields[field], f"is not a known field; choose from {', '.join(known)}")

    def tokens(self, field: str) -> int:
        """A length in tokens, from 1 to `LONGEST`."""
        return self.integer(field, 1, most=LONGEST)

    def integer(self, field: str, least: int, default: int | None = None, most: int = _LARGEST) -> int:
        """A whole number from `least` to `most`; `default` where the field is absent or an empty CSV cell."""
        value = self.fields.get(field, "")
        if value == "" and default is not None:
            return default
        number = self._number(field, value)
        if number != number.to_integral_value():
            raise self.error(field, value, "must be a whole number")
        return self._in_range(field, value, int(number), least, most)

    def time_ns(self, field: str, unit_ns: int) -> int:
        """A time of 0 to 146 years in units of `unit_ns`, rounded to the nanosecond."""
        value = self.fields.get(field, "")
        number = round(self._number(field, value) * unit_ns)
        if number > LATEST_NS:
            raise self.error(field, value, TOO_LATE)
        return self._in_range(field, value, number, 0, _LARGEST)

    def text(self, field: str) -> str:
        """A string; empty where the field is absent."""
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
        if isinstance(value, bool) or not isinstance(value, (str, int, Decimal)):
            raise self.error(field, value, "must be a number")
        try:
            number = Decimal(value)
        except InvalidOperation:
            raise self.error(field, value, "must be a number") from None
        if isinstance(value, str) and (not value.isascii() or "_" in value):  # Decimal takes them
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


def read_head(path: Path, size: int = 65536) -> bytes:
    """The first `size` bytes of a trace, unpacked if it is gzipped. Raises UserError if it cannot be read."""
    try:
        with _open(path) as file:
            return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError("trace", str(path), f"cannot be read: {reason(error)}") from None


def csv_rows(path: Path, *known: str) -> Iterator[Row]:
    """The rows under the header of a CSV file; blank lines are skipped. Its columns are of the `known`, if any are."""
    lines = (text for _, text in _numbered_lines(path))
    reader = csv.reader(lines, strict=True)
    try:
        header = [name.strip() for name in next(reader)]
        for name in header:
            if header.count(name) > 1:
                raise UserError(f"{path}:1: header", name, "appears twice; give each column its own name")
            if known and name not in known:
                raise UserError(f"{path}:1: header", name, f"is not a known column; choose from {', '.join(known)}")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                remedy = f"has {len(cells)} cells, but the header has {len(header)}"
                raise UserError(f"{path}:{reader.line_num}", ",".join(cells), remedy)
            yield Row(path, reader.line_num, dict(zip(header, map(str.strip, cells), strict=True)))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}", None, f"is not CSV: {error}") from None


def json_rows(path: Path, *known: str) -> Iterator[Row]:
    """The objects of a JSON lines file; blank lines are skipped. Their fields are of the `known`, if any are."""
    for line, text in _numbered_lines(path):
        if not text.strip():
            continue
        try:
            fields = json.loads(text, parse_float=Decimal, parse_constant=Decimal, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            remedy = f"is not JSON: {error.msg} at column {error.colno}"
            raise UserError(f"{path}:{line}", text.strip(), remedy) from None
        except (RecursionError, ValueError) as error:  # nested too deeply, too many digits, or a name twice
            raise UserError(f"{path}:{line}", text.strip(), f"is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise UserError(f"{path}:{line}", text.strip(), "must be a JSON object")
        row = Row(path, line, fields)
        row.only(*known)
        yield row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice; leave one of them out")
    return fields


def _open(path: Path) -> IO[bytes]:
    if path.exists() and not path.is_file():
        raise UserError("trace", str(path), "is not a regular file; save it to one first")
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return cast("IO[bytes]", gzip.open(path)) if packed else path.open("rb")


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    line = 0
    try:
        with _open(path) as file:
            for line, data in enumerate(file, 1):
                yield line, data.decode("utf-8-sig" if line == 1 else "utf-8")
                if line % _LOGGED == 0:
                    _LOG.info("reading %s: %s lines so far", path.name, f"{line:,}")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{line}", repr(error.object[:20]), "is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}:{line + 1}", None, f"cannot be read: {reason(error)}") from None


def workload_of(path: Path, requests: list[WorkloadRequest]) -> Workload:
    """The requests of a trace, in order, called as its file. Raises UserError if there are none."""
    if not requests:
        raise UserError("trace", str(path), "holds no requests")
    return Workload(requests, name=path.name.split(".")[0], shares_prefixes=shares_prefixes(requests))
