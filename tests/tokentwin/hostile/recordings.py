"""Recordings with a column, a file or a table wrong, through every command that reads one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.tokentwin.hostile.case import Case
from tokentwin.dashboard.bundled import RUN_SAMPLE

DEEP = '{"a":' * 10_000 + "1" + "}" * 10_000
NO_OBJECTS = (DEEP, "{", "[]", "3", '{"model": "a", "model": "b"}', "\x1b[2J", "nan", '"{}"', "\ud7ff", "null")
WRONG: Mapping[str, tuple[str, ...]] = {
    "deployment": ('{"scheduler": 3}', '{"model": 3}', '{"scheduler": [1]}'),
    "hardware": ('{"gpu": 3}', '{"gpu": []}'),
    "notes": (
        '{"gpu": 3}', '{"trust": 3}', '{"bands": {"ttft_ms": 3}}', '{"bands": {"ttft_ms": {"p50": ["x", 1]}}}',
        '{"front_door": {"client_ns": -1}}', '{"experts": {"experts": "x", "topk": 1}}', '{"served": 3}',
        '{"served": {"speed": "x"}}', '{"launching_share": "x"}', '{"canary_before_ns": "x"}',
    ),
}  # fmt: skip
READ = (
    "diagnose r", "compare r q", "compare q r", "export r --to openmetrics -o o.txt", "export r --to csv -o o.csv",
    "simulate t.yaml -d r --gpu H100 -o out", "columns r", "calibrate --from-recordings r -o out",
    "calibrate --from-served r --client q -o out", "validate runs r -c nothing -o out",
)  # fmt: skip
FILES = ("runs.parquet", "requests.parquet", "steps.parquet")
MUST_HAVE_RUN = tuple(command for command in READ if not command.startswith(("columns", "validate")))


def cases() -> Iterator[Case]:
    for column, more in WRONG.items():
        for text in (*NO_OBJECTS, *more):
            for command in MUST_HAVE_RUN:
                wrong = partial(_with_column, column=column, text=text)
                yield _of(command, wrong, column, f"{column} = {text[:40]}")
    for file in FILES:
        for command in MUST_HAVE_RUN:
            yield _of(command, partial(_without, file=file), f"{file}|no runs.parquet|not a recording", f"no {file}")
            yield _of(command, partial(_cut, file=file), f"{file}|recording", f"half of {file}")
            yield _of(command, partial(_other, file=file), f"{file}|recording", f"another {file}")
    for command in MUST_HAVE_RUN:
        yield _of(command, partial(_emptied, file="runs.parquet"), "rows", "no row in runs.parquet")
    for command in ("compare r q", "compare q r", "compare r r", "diagnose r", "diagnose r --gpu H100"):
        yield _of(command, partial(_emptied, file="requests.parquet"), "request", "no row in requests.parquet")
    yield _of("calibrate --from-served r --client q -o out", _copy, "served|recording|request", "was not served")


def _of(command: str, make: Callable[[Path], object], says: str, wrong: str) -> Case:
    return Case(command, {"q": _copy, "r": make}, (says,), wrong)


def _copy(folder: Path) -> None:
    shutil.copytree(RUN_SAMPLE, folder)


def _with_column(folder: Path, column: str, text: str) -> None:
    _copy(folder)
    table = pq.read_table(folder / "runs.parquet")
    at = table.schema.get_field_index(column)
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array([text])), folder / "runs.parquet")


def _without(folder: Path, file: str) -> None:
    _copy(folder)
    (folder / file).unlink()


def _cut(folder: Path, file: str) -> None:
    _copy(folder)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])


def _other(folder: Path, file: str) -> None:
    _copy(folder)
    pq.write_table(pa.table({"run_id": ["x"]}), folder / file)


def _emptied(folder: Path, file: str) -> None:
    _copy(folder)
    pq.write_table(pq.read_table(folder / file).slice(0, 0), folder / file)
