"""Uploads: parsed by the readers, kept under their hash, refused in one line, never a path."""

import gzip
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("streamlit")

from tokentwin.dashboard import uploads
from tokentwin.dashboard.trace_columns import TEMPLATE, first_rows, likely_columns
from tokentwin.dashboard.uploads import keep_model, keep_trace, model_path, trace_path
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.traces.formats.columns import usual_field
from tokentwin.traces.formats.simple import FIELDS
from tokentwin.traces.formats.trace_file import read_workload

CSV = b"arrival_s,prompt_tokens,output_tokens\n0,10,5\n0.5,20,6\n2,30,7\n"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def refused(call, *arguments) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("content", [CSV, gzip.compress(CSV)], ids=["plain", "gzipped"])
def test_a_trace_is_kept_as_its_requests(tmp_path: Path, content: bytes) -> None:
    digest = keep_trace(tmp_path, content)
    path = trace_path(tmp_path, digest)
    assert path is not None and path.is_absolute()
    kept = [(r.arrival_ns, r.prompt_len, r.output_len) for r in read_workload(path).requests]
    assert kept == [(0, 10, 5), (500_000_000, 20, 6), (2_000_000_000, 30, 7)]
    assert keep_trace(tmp_path, content) == digest


@pytest.mark.usefixtures("read_here")
def test_semicolons_and_decimal_commas_are_read_as_the_same_requests(tmp_path: Path) -> None:
    """A spreadsheet writes these in many languages."""
    lines = [("0.25", 10, 5, "a, b"), ("1.5", 20, 6, ""), ("2", 3000, 7, "c")]
    named = ("arrival_s", "prompt_tokens", "output_tokens", "tenant")
    for header, columns in (
        (named, {}),
        (("When", "In", "Out", "Who"), dict(zip(("timestamp", *named[1:]), ("When", "In", "Out", "Who"), strict=True))),
    ):
        kept = []
        for between, point in ((",", "."), (";", ",")):
            quoted = [(s.replace(".", point), p, o, f'"{who}"' if between in who else who) for s, p, o, who in lines]
            text = "\n".join(between.join(map(str, row)) for row in (header, *quoted))
            content = f"{text}\n".encode("utf-8-sig")
            assert [list(row) for row in first_rows(content)] == [list(header)] * 3
            path = trace_path(tmp_path, keep_trace(tmp_path, content, columns=columns))
            assert path is not None
            kept.append([replace(request, id=0) for request in read_workload(path).requests])
        assert kept[0] == kept[1] and len(kept[0]) == 3
    thousands = b"arrival_s;prompt_tokens;output_tokens\n0,5;1,000;20\n"
    assert "prompt_tokens: '1,000': must be a number" in refused(keep_trace, tmp_path, thousands)
    assert "has 2 cells, but the header has 3" in refused(
        keep_trace, tmp_path, b"arrival_s;prompt_tokens;output_tokens\n0;10\n"
    )


@pytest.mark.usefixtures("read_here")
def test_a_kept_trace_can_be_uploaded_again(tmp_path: Path) -> None:
    path = trace_path(tmp_path, keep_trace(tmp_path, CSV))
    assert path is not None
    again = trace_path(tmp_path, keep_trace(tmp_path, path.read_bytes()))
    assert again is not None and list(read_workload(again).requests) == list(read_workload(path).requests)


@pytest.mark.usefixtures("read_here")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\x00\xff\x00", "the upload"),
        (b"arrival_s,prompt_tokens,output_tokens\n0,10,5\nsoon,20,6\n", "line 3: arrival_s"),
        (b"PAR1" + b"junk" * 50, "the upload"),
        (gzip.compress(CSV)[:-9], "the upload"),
        (b"/etc/passwd", "the upload"),
        (b"a,b\n1,2\n", "is not a known column"),
        (b"arrival_s,prompt_tokens,output_tokens\n=1+1,10,5\n", "must be a number"),
        (gzip.compress(gzip.compress(CSV)), "has no known format"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "has no known format"),
    ],
    ids=[
        "empty",
        "bytes",
        "a bad line",
        "broken parquet",
        "broken gzip",
        "a path",
        "columns",
        "a formula",
        "gzipped twice",
        "a picture",
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    message = refused(keep_trace, tmp_path, content)
    assert says in message and "/tmp" not in message
    assert not list(tmp_path.rglob("*.parquet"))


def limited(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    monkeypatch.setattr(uploads, "LIMITS", replace(uploads.LIMITS, **limits))


@pytest.mark.usefixtures("read_here")
def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_MB", 1)
    limited(monkeypatch, unpacked_mb=2)
    assert "too large" in refused(keep_trace, tmp_path, b"x" * 1_000_001)
    assert "unpacks to more than 2 MB" in refused(keep_trace, tmp_path, gzip.compress(bytes(4_000_000)))
    zeros = io.BytesIO()
    pq.write_table(pa.table({"a": range(500_000)}), zeros, compression="zstd", use_dictionary=False)
    assert len(zeros.getvalue()) < 1_000_000, "a small file"
    assert "unpacks to more than 2 MB" in refused(keep_trace, tmp_path, zeros.getvalue())


def stored(rows: int, tenant: str = "", segments: int = 1, name: str = "", **more: pa.Array) -> bytes:
    """A Parquet trace in which every row is alike, so that its size says nothing of what it unpacks to."""

    def alike(text: str, times: int) -> pa.Array:
        return pa.DictionaryArray.from_arrays(np.zeros(times, np.int32), [text])

    ordered, ones = np.arange(rows), np.ones(rows * segments, np.int64)
    parts = [
        pa.field("segment", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
    ]
    prompt = pa.StructArray.from_arrays([alike(name, rows * segments), ones], fields=parts)
    item = pa.field("item", prompt.type, nullable=False)
    columns = {
        "id": ordered,
        "arrival_ns": ordered,
        "prompt": pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * segments, prompt, pa.list_(item)),
        "prompt_len": np.full(rows, segments),
        "output_len": np.ones(rows, np.int64),
        "priority": np.zeros(rows, np.int64),
        "tenant": alike(tenant, rows),
        "slo_class": alike("", rows),
        **more,
    }
    table, content = pa.table(columns), io.BytesIO()
    # Without the Arrow schema the names read as plain strings, which the format wants.
    options = {"store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    with pq.ParquetWriter(content, table.schema, compression="zstd", **options) as writer:
        writer.write_table(table)
        about = {"name": "x", "concurrency": None, "shares_prefixes": True}
        writer.add_key_value_metadata({"tokentwin.workload": json.dumps(about)})
    return content.getvalue()


@pytest.mark.usefixtures("read_here")
def test_a_parquet_trace_of_a_stranger_is_kept_without_the_columns_that_no_trace_has(tmp_path: Path) -> None:
    heavy = pa.DictionaryArray.from_arrays(np.zeros(9, np.int32), ["x" * 1_000_000])
    path = trace_path(tmp_path, keep_trace(tmp_path, stored(9, tenant="t", name="s", segments=2, notes=heavy)))
    assert path is not None
    requests = list(read_workload(path).requests)
    assert [request.id for request in requests] == list(range(9))
    assert {(request.prompt, request.tenant) for request in requests} == {((("s", 1), ("s", 1)), "t")}


@pytest.mark.parametrize(
    ("bomb", "limits", "says"),
    [
        ({"rows": 5001}, {"requests": 5000}, "has more than 5,000 requests"),
        ({"rows": 100, "segments": 600}, {"segments": 50_000}, "has more than 50,000 segments"),
        ({"rows": 3000, "tenant": "x" * 1000}, {"names_mb": 1}, "has more than 1 MB of names"),
        ({"rows": 1000, "name": "x" * 10_000}, {"names_mb": 1}, "has more than 1 MB of names"),
        ({"rows": 9000, "tenant": "x" * 100_000}, {"memory_mb": 400}, "memory"),
        ({"rows": 9000, "segments": 1000}, {"segments": 10**9, "memory_mb": 400}, "memory"),
    ],
    ids=["rows", "segments", "tenants", "names", "a batch of long names", "a footer that says nothing"],
)
def test_a_small_parquet_file_that_unpacks_to_much_is_refused(tmp_path, monkeypatch, bomb, limits, says):
    limited(monkeypatch, **limits)
    content = stored(**bomb)
    assert len(content) < 10_000_000
    assert says in refused(keep_trace, tmp_path, content)
    assert not any((tmp_path / "uploads").iterdir())


@pytest.mark.parametrize(
    ("content", "limits", "says"),
    [
        (lambda: gzip.compress(CSV + b"3,1,1\n" * 5000), {"requests": 5000}, "has more than 5,000 requests"),
        (
            lambda: gzip.compress(b'{"prompt": [' + b'["",1],' * 9_000_000),
            {},
            "unpacks to more than 100 times its size",
        ),
        (lambda: CSV + b"3,1,1\n" * 400_000, {"seconds": 1}, "time"),
    ],
    ids=["rows", "one long line", "time"],
)
def test_a_text_that_unpacks_to_much_is_refused(tmp_path, monkeypatch, content, limits, says):
    limited(monkeypatch, **limits)
    assert says in refused(keep_trace, tmp_path, content())
    assert not any((tmp_path / "uploads").iterdir())


def test_a_pasted_model_is_found_again(tmp_path: Path) -> None:
    digest = keep_model(tmp_path, json.dumps(CONFIG))
    path = model_path(tmp_path, digest)
    assert path is not None and find_model(str(path)).num_layers == 4
    assert keep_model(tmp_path, json.dumps(CONFIG, indent=3)) == digest


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '"x"',
        '{"model_type": "bert"}',
        "x" * 1_000_001,
        "[" * 90_000,
        '{"hidden_size": ' + "9" * 5000 + "}",
    ]
    + [json.dumps({**CONFIG, name: odd}) for name in ("rope_theta", "num_hidden_layers") for odd in (1e300, math.inf)],
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    assert refused(keep_model, tmp_path, text)
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize("digest", ["", "..", "../../etc/passwd", "A" * 16, "0" * 15, "0" * 16, "0" * 16 + "\n"])
def test_a_digest_of_a_link_is_no_path(tmp_path: Path, digest: str) -> None:
    assert trace_path(tmp_path, digest) is None and model_path(tmp_path, digest) is None


def test_a_folder_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "uploads").write_text("a file")
    assert "cannot be written" in refused(keep_trace, tmp_path, CSV)
    assert "cannot be written" in refused(keep_model, tmp_path, json.dumps(CONFIG))


@pytest.mark.usefixtures("read_here")
def test_a_trace_of_too_many_requests_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, requests=2)
    assert "has more than 2 requests; upload a part of it" in refused(keep_trace, tmp_path, CSV)
    assert not list(tmp_path.rglob("*.parquet"))
    limited(monkeypatch, requests=3)
    assert keep_trace(tmp_path, CSV)


OTHERS = b"When,Tokens in,Tokens out,Team,Cost\n2026-11-24T10:00:00,10,5,a,=1+1\n2026-11-24T10:00:02.5Z,20,6,b,2\n"


@pytest.mark.usefixtures("read_here")
def test_columns_with_other_names_are_offered_and_read(tmp_path: Path) -> None:
    for content in (OTHERS, gzip.compress(OTHERS)):
        rows = first_rows(content)
        assert [row["Team"] for row in rows] == ["a", "b"]
        columns = likely_columns(list(rows[0]))
        assert columns == {
            "timestamp": "When", "prompt_tokens": "Tokens in", "output_tokens": "Tokens out", "tenant": "Team",
        }  # fmt: skip
        path = trace_path(tmp_path, keep_trace(tmp_path, content, "mine.csv", columns))
        assert path is not None
        kept = [(r.arrival_ns, r.prompt_len, r.output_len, r.tenant) for r in read_workload(path).requests]
        assert kept == [(0, 10, 5, "a"), (2_500_000_000, 20, 6, "b")]
    assert "is not a known column" in refused(keep_trace, tmp_path, OTHERS)
    other = keep_trace(tmp_path, OTHERS, "", {**columns, "prompt_tokens": "Tokens out", "output_tokens": "Tokens in"})
    assert trace_path(tmp_path, other) != path


@pytest.mark.usefixtures("read_here")
def test_the_template_is_a_trace_and_needs_no_columns(tmp_path: Path) -> None:
    assert all(usual_field(name, FIELDS) for name in first_rows(TEMPLATE.encode())[0])
    assert keep_trace(tmp_path, TEMPLATE.encode())


@pytest.mark.parametrize("content", [b"", b"PAR1junk", b"\x1f\x8bjunk", bytes(range(256)), b"{" * 9999, b'"\n,"' * 9])
def test_what_has_no_columns_asks_for_none(content: bytes) -> None:
    assert first_rows(content) == []
