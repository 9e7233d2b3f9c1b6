"""Arrow reads a text trace to the same requests, or the same error, as the rows do."""

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import shares_prefixes
from tokentwin.traces.formats import azure, mooncake, rows, simple, text_columns
from tokentwin.traces.formats.trace_file import read_workload

junk = st.text("0123456789.+-eExZ_: \u00a0'٣\x00", max_size=8)
integers = st.integers(0, 2**31).map(str)
decimals = st.floats(0, 1e12).map(repr) | st.decimals(0, 10**9, places=12).map(str) | st.integers(0, 10**19).map(str)
zones = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
moments = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)) | st.datetimes(
    datetime(2000, 1, 1), datetime(2100, 1, 1)
)
instants = st.builds(lambda at, zone: str(at.replace(tzinfo=zone)), moments, st.none() | st.just(UTC) | zones)
labels = st.sampled_from(["", "a", "b c", "é", 'q"q', '"x,y"', "\x1c a", " "])
CELLS = {
    "arrival_s": decimals,
    "arrival_ms": decimals,
    "arrival_ns": integers,
    "timestamp": instants | decimals,
    "TIMESTAMP": instants,
    "ContextTokens": integers,
    "GeneratedTokens": integers,
    "prompt_tokens": integers,
    "output_tokens": integers,
    "id": integers,
    "priority": integers | st.sampled_from(["", "-3"]),
    "max_tokens": integers | st.just(""),
    "tenant": labels,
    "adapter": labels,
}
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
SIMPLE = ["prompt_tokens", "output_tokens"]
ARRIVALS = ["arrival_s", "arrival_ms", "arrival_ns", "timestamp"]


@st.composite
def csv_texts(draw):
    some = draw(st.lists(st.sampled_from(["id", "priority", "max_tokens", "tenant", "adapter"]), unique=True))
    header = draw(st.sampled_from([AZURE, *([name, *SIMPLE, *some] for name in ARRIVALS)]))
    dates = {
        name: draw(st.sampled_from([CELLS[name], decimals, moments.map(str)])) for name in ("timestamp", "TIMESTAMP")
    }
    wild = draw(st.integers(0, 3)) == 0
    lines = [",".join(header)]
    for _ in range(draw(st.integers(0, 12))):
        cells = [draw(({**CELLS, **dates})[name]) for name in header]
        if wild and draw(st.booleans()):
            at = draw(st.integers(0, len(cells) - 1))
            cells[at] = draw(junk | st.just(f'"{cells[at]}"') | st.just(f" {cells[at]}\t"))
            cells = draw(st.sampled_from([cells, cells[1:], []]))
        lines.append(",".join(cells))
    text = draw(st.sampled_from(["\n", "\r\n"])).join(lines) + draw(st.sampled_from(["", "\n", "\n\n", "\r", '"']))
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode()


@st.composite
def mooncake_texts(draw):
    wild = draw(st.integers(0, 3)) == 0
    times = draw(st.sampled_from([st.integers(0, 10**9), st.floats(0, 1e9)]))
    ids = draw(st.sampled_from([st.integers(0, 3), st.integers(-(2**40), 2**70)]))
    text = ""
    for _ in range(draw(st.integers(0, 12))):
        blocks = draw(st.lists(ids, min_size=1, max_size=4))
        length = 512 * (len(blocks) - 1) + draw(st.integers(1, 512))
        row = dict(zip(mooncake._FIELDS, (draw(times), length, draw(st.integers(0, 9)), blocks), strict=True))
        if wild and draw(st.booleans()):
            row[draw(st.sampled_from([*row, "x"]))] = draw(
                st.sampled_from([None, True, "3", 1.5, -1, [], [None], [2.0]])
            )
        text += json.dumps(row) + draw(st.sampled_from(["\n"] * 9 + ["\r\n", "\n\n", " ", "\n\t\n"] * wild + ["\n"]))
    return text.encode()


def outcome(path):
    """Return the requests of a file, or the line that refuses it."""
    try:
        workload = read_workload(path)
    except UserError as error:
        return str(error)
    requests = list(workload.requests)
    assert workload.shares_prefixes == shares_prefixes(requests)
    return requests


@pytest.fixture(params=["list", "table"])
def reading(request, tmp_path, monkeypatch):
    """Return the outcome of a text, read by columns in blocks of some lines, and that of its rows."""
    monkeypatch.setattr(text_columns, "_BLOCK_BYTES", 100)
    if request.param == "table":
        monkeypatch.setattr(rows, "_MOST_OBJECTS", 0)
    path = tmp_path / "trace"

    def no_columns(*_, **__):
        raise text_columns.NotPlain

    def read(text):
        path.write_bytes(text)
        by_columns = outcome(path)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(simple, "csv_batches", no_columns)
            patched.setattr(azure, "csv_batches", no_columns)
            patched.setattr(mooncake, "text_blocks", no_columns)
            return by_columns, outcome(path)

    return read


@given(csv_texts())
@example(b"TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,1,1\n2023-01-01 00:00:00,1,1\n")
@example(b"TIMESTAMP,ContextTokens,GeneratedTokens\n1700-01-01 00:00:00,1,1\n2023-01-01 00:00:00,1,1\n")
@example(b"arrival_s,prompt_tokens,output_tokens\n0.0000000005,0x10,1\n0.0000000015,7.0,1\n")
def test_csv(reading, text):
    by_columns, by_rows = reading(text)
    assert by_columns == by_rows


@given(mooncake_texts())
def test_mooncake(reading, text):
    by_columns, by_rows = reading(text)
    assert by_columns == by_rows


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:45,1,0\r\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5",
        "created_at,input_tokens,completion_tokens,tenant\n2026-11-24T10:00:01+02:00, 3,4.0,Zürich\n\n",
        "id,arrival_s,prompt_tokens,output_tokens,priority,max_tokens\n7,1.2e-05,3,4,,9\n8,0.1234567890123,3,4,-1,\n",
        '{"timestamp": 0.5, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}\n\n',
    ],
)
def test_usual_texts_need_no_rows(tmp_path, monkeypatch, text):
    for reader in (azure, simple, mooncake):
        for name in ("csv_rows", "json_rows"):
            monkeypatch.setattr(reader, name, None, raising=False)
    path = tmp_path / "trace"
    path.write_text(text, newline="")
    assert outcome(path)
