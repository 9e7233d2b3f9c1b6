"""Our own kernel tables are read in their units and judged against the surfaces of the same GPU."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lab.kernels.fit import agreement, main
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.kernels.own_kernels import own_measurements
from tokentwin.calibration.operations import DecodeAttention, Gemm, PrefillAttention
from tokentwin.serving.deployments.gpu_spec import find_gpu

H200 = find_gpu("H200")
OPERATIONS = [
    ({"op": "gemm", "dtype": "bf16", "tokens": 64, "inputs": 4096, "outputs": 6144}, Gemm("", 64, 6144, 4096)),
    (
        {"op": "attention_decode", "kv_dtype": "bf16", "rows": 8, "tokens": 8, "context": 1000},
        DecodeAttention("", 8, 8000, 32, 8, 128),
    ),
    (
        {
            "op": "attention_prefill",
            "kv_dtype": "bf16",
            "rows": 2,
            "tokens": 200,
            "context": 300,
        },  # 100 tokens over 200, twice
        PrefillAttention("", 2, 200, 400, 200 * 200 + 200 * 101 / 2, 32, 8, 128),
    ),
]


def written(path: Path, slower: float) -> Path:
    kernels = load_kernels(H200)
    rows = []
    for columns, operation in OPERATIONS:
        known = {"model": "random:llama-3.1-8b", "dtype": "bf16", "kv_dtype": None, "rows": None, "context": None}
        ns = float(kernels.time(operation).ns) * slower
        rows.append({**known, "inputs": None, "outputs": None, **columns, "median_ns": ns})
    rows.append({**rows[0], "median_ns": None})  # one that failed
    rows.append({**rows[0], "op": "silu_mul"})
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_what_the_suite_writes_becomes_the_same_operations(tmp_path: Path) -> None:
    measured = list(own_measurements(written(tmp_path / "kernels.parquet", 1.0)))
    assert [kind for kind, _, _ in measured] == ["gemm", "attention_decode", "attention_prefill"]
    for (_, operation, _), (_, expected) in zip(measured, OPERATIONS, strict=True):
        assert operation.flops == expected.flops and operation.bytes == expected.bytes


def test_times_a_quarter_longer_are_seen_as_such(tmp_path: Path) -> None:
    for ratios in agreement(written(tmp_path / "kernels.parquet", 1.25), H200).values():
        assert ratios == pytest.approx(0.8)


def test_another_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    for path in (tmp_path / "other.parquet", tmp_path / "none.parquet"):
        assert main(["--own", str(path), "--gpu", "H200"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["--own", str(written(tmp_path / "kernels.parquet", 1.0)), "--gpu", "H200"]) == 0
    assert "attention_decode" in capsys.readouterr().out
