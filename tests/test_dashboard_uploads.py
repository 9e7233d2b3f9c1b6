"""Uploads: parsed by the readers, kept under their hash, refused in one line, never a path."""

from __future__ import annotations

import gzip
import io
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("streamlit")

from dashboard import uploads
from dashboard.uploads import keep_model, keep_trace, model_path, trace_path
from serving.errors import UserError
from serving.model_catalogue import find_model
from traces.reader import read_workload

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


def test_a_kept_trace_can_be_uploaded_again(tmp_path: Path) -> None:
    path = trace_path(tmp_path, keep_trace(tmp_path, CSV))
    assert path is not None
    again = trace_path(tmp_path, keep_trace(tmp_path, path.read_bytes()))
    assert again is not None and list(read_workload(again).requests) == list(read_workload(path).requests)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\x00\xff\x00", "the upload"),
        (b"arrival_s,prompt_tokens,output_tokens\n0,10,5\nsoon,20,6\n", "line 3: arrival_s"),
        (b"PAR1" + b"junk" * 50, "the upload"),
        (gzip.compress(CSV)[:-9], "the upload"),
        (b"/etc/passwd", "the upload"),
        (b"a,b\n1,2\n", "no such field"),
        (b"arrival_s,prompt_tokens,output_tokens\n=1+1,10,5\n", "must be a number"),
        (gzip.compress(gzip.compress(CSV)), "in no known format"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "in no known format"),
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


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "read_workload", lambda path: pytest.fail("it was read"))
    monkeypatch.setattr(uploads, "MOST_MB", 1)
    monkeypatch.setattr(uploads, "MOST_UNPACKED_MB", 2)
    assert "too large" in refused(keep_trace, tmp_path, b"x" * 1_000_001)
    assert "unpacks to more than 2 MB" in refused(keep_trace, tmp_path, gzip.compress(bytes(4_000_000)))
    zeros = io.BytesIO()
    pq.write_table(pa.table({"a": range(500_000)}), zeros, compression="zstd", use_dictionary=False)
    assert len(zeros.getvalue()) < 1_000_000, "a small file"
    assert "unpacks to more than 2 MB" in refused(keep_trace, tmp_path, zeros.getvalue())


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


def test_a_trace_of_too_many_requests_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_REQUESTS", 2)
    assert "holds more than 2 requests; upload a part of it" in refused(keep_trace, tmp_path, CSV)
    assert not list(tmp_path.rglob("*.parquet"))
    monkeypatch.setattr(uploads, "MOST_REQUESTS", 3)
    assert keep_trace(tmp_path, CSV)
