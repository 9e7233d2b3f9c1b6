"""Traces of every text format, with one cell or field wrong in the second request."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

from tests.tokentwin.hostile.case import Case

JSON_LINES: dict[str, dict[str, Any]] = {
    "simple": {
        "id": 0, "arrival_s": 1.5, "prompt_tokens": 9, "output_tokens": 3, "priority": 0, "tenant": "a",
        "slo_class": "b", "max_tokens": 5,
    },
    "timestamp": {"timestamp": "2023-11-16 18:15:46.68", "prompt_tokens": 9, "output_tokens": 3},
    "segments": {"arrival_ms": 1, "prompt": [["sys0", 4], ["", 5]], "output_tokens": 3},
    "mooncake": {"timestamp": 1000, "input_length": 9, "output_length": 3, "hash_ids": [1]},
}  # fmt: skip
CSVS: dict[str, dict[str, str]] = {
    "simple": {"id": "0", "arrival_s": "1.5", "prompt_tokens": "9", "output_tokens": "3", "priority": "0"},
    "azure": {"TIMESTAMP": "2023-11-16 18:15:46.6805900", "ContextTokens": "9", "GeneratedTokens": "3"},
}
HUGE = 10**30
NO_NUMBERS: tuple[Any, ...] = ("3", True, [], {}, HUGE, -HUGE, float("nan"), float("inf"))
NO_TEXTS: tuple[Any, ...] = (3, True, None, [], {}, "\ud800")
NO_LISTS: tuple[Any, ...] = (3, "x", None, {}, True, [[]], [{}], [True])
NO_CELLS = ("x", "-1e9", "nan", "inf", "9" * 30, "1e999999999", "0x10", "1_000", "١", "1,5", "\x1b[2J", "=1+1")
NO_TIMES = (
    "x",
    "0001-01-01 00:00:00",
    "9999-12-31 23:59:59",
    "2023-13-01 00:00:00",
    "2023-11-16",
    "9" * 30,
    "0001-01-01 00:00:00+23:59x",
    "\x1b[2J",
)


def cases() -> Iterator[Case]:
    for name, usual in JSON_LINES.items():
        for field, value in usual.items():
            for bad in _wrong(field, value):
                yield _of_lines(f"{name}.jsonl", usual, {**usual, field: bad}, f"{field} = {bad!r:.40}", field)
        yield _of_lines(f"{name}.jsonl", usual, {**usual, "nosuch": 1}, "unknown", "nosuch")
        for field in usual if name != "timestamp" else ("prompt_tokens", "output_tokens"):
            if field in ("id", "priority", "tenant", "slo_class", "max_tokens"):
                continue
            less = {other: value for other, value in usual.items() if other != field}
            yield _of_lines(f"{name}.jsonl", usual, less, f"no {field}", f"{field}|arrival|prompt_tokens")
    for name, cells in CSVS.items():
        for field in cells:
            cells_of = (
                NO_TIMES if field == "TIMESTAMP" else NO_CELLS[2 * (field == "priority") :]
            )  # which may be negative
            for cell in cells_of:
                yield _of_cells(f"{name}.csv", cells, {**cells, field: cell}, field)
            if field not in ("id", "priority"):
                yield _of_cells(f"{name}.csv", cells, {**cells, field: ""}, field)
        header = ",".join(cells)
        row = ",".join(cells.values())
        yield Case(f"trace inspect {name}.csv", {f"{name}.csv": f"{header},nosuch\n{row},1\n"}, ("nosuch",))
        yield Case(f"trace inspect {name}.csv", {f"{name}.csv": f"{header}\n{row},1\n"}, ("cells",))
        yield Case(f"trace inspect {name}.csv", {f"{name}.csv": f"{header}\n"}, ("no requests",))
        yield Case(f"trace inspect {name}.csv", {f"{name}.csv": f'{header}\n"{row}\n'}, ("csv", "2|3"))
    yield from _whole_files()


def _whole_files() -> Iterator[Case]:
    """Yield whole files that no format begins with, or that only begin like one."""
    line = json.dumps(JSON_LINES["simple"])
    contents: dict[str, tuple[bytes, str]] = {
        "empty.csv": (b"", "is empty"),
        "blank.csv": (b" \n\n", "is empty"),
        "nul.csv": (b"\0" * 100, "format"),
        "binary.bin": (bytes(range(256)), "format"),
        "latin.jsonl": (line.encode()[:-1] + b', "tenant": "\xe9"}', "utf_8"),
        "cut.parquet": (b"PAR1" + b"x" * 50, "parquet|cannot be read"),
        "cut.jsonl.gz": (gzip.compress(line.encode() * 100)[:-20], "cannot be read"),
        "not.jsonl.gz": (b"\x1f\x8bxx", "cannot be read"),
        "bomb.csv.gz": (gzip.compress(b"\n" * (1 << 26), 1), "empty|format|cannot be read"),
        "bomb.jsonl.gz": (gzip.compress(b" " * (1 << 26) + line.encode(), 1), "empty|bytes|cannot be read"),
        "deep.jsonl": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        "twice.jsonl": (line.replace('"id"', '"tenant": "x", "id"').encode(), "given twice"),
        "both.jsonl": (line.replace('"id"', '"arrival_ms": 3, "id"').encode(), "arrival_s, arrival_ms"),
        "list.jsonl": (b"{}\n[1]", "arrival|must be a json object"),
        "no.jsonl": (b"{x}", "is not json"),
    }
    for name, (content, says) in contents.items():
        for command in ("trace inspect", "trace convert"):
            end = " o.parquet" if command.endswith("convert") else ""
            yield Case(f"{command} {name}{end}", {name: content}, (says,))


def _wrong(field: str, value: Any) -> tuple[Any, ...]:
    if field == "timestamp" and isinstance(value, str):
        return (*NO_TIMES, True, None, [], {})
    if isinstance(value, list):
        return NO_LISTS
    return NO_TEXTS if isinstance(value, str) else NO_NUMBERS


def _of_lines(name: str, usual: dict[str, Any], wrong: dict[str, Any], what: str, says: str) -> Case:
    first = {**usual, "id": 7} if "id" in usual else usual
    text = f"{json.dumps(first)}\n{json.dumps(wrong)}\n"
    return Case(f"trace inspect {name}", {name: text}, (says,), what)


def _of_cells(name: str, usual: dict[str, str], wrong: dict[str, str], field: str) -> Case:
    first = {**usual, "id": "7"} if "id" in usual else usual
    quoted = ('"' + cell + '"' if "," in cell else cell for cell in wrong.values())
    text = "\n".join([",".join(usual), ",".join(first.values()), ",".join(quoted), ""])
    return Case(f"trace inspect {name}", {name: text}, (field,), f"{field} = {wrong[field]!r:.40}")
