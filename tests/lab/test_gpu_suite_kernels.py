"""The kernel part of the GPU suite on the CPU: rows, formulas and order are right before a GPU fills in the times."""

from __future__ import annotations

import json
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

import torch

from lab.gpu_suite.attention_operations import attention, rope_store
from lab.gpu_suite.ceilings import ceilings
from lab.gpu_suite.compare import comparisons, ways
from lab.gpu_suite.correctness import check_case, checks
from lab.gpu_suite.kernel_grid import GRID_COLUMNS, Point, grid, measured, points, uneven, write_grid
from lab.gpu_suite.operations import (
    Cost,
    Mixture,
    On,
    Operation,
    Packing,
    Prepared,
    add_rms_norm,
    argmax,
    draw,
    gemm,
    grouped_gemm,
    packed_gemm,
    silu_mul,
)
from lab.gpu_suite.page import decode_shares, page
from lab.gpu_suite.references import distance_from_draw, relative_error
from lab.gpu_suite.timing import CpuBench, CudaBench, Timing, find_bench, input_sets
from tokentwin.realengine.kernels.launches import Shape
from tokentwin.realengine.models.weights import random_spec
from tokentwin.serving.deployments.model_spec import ModelSpec

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
ON = On(CPU, "torch")
CEILINGS = {"copy_bytes_per_s": 2e9, "gemm_flops_per_s": 1e9, "fp8_gemm_flops_per_s": 4e9}
KERNELS = {"paged_decode", "paged_prefill", "rope_store", "add_rms_norm", "silu_mul", "grouped_gemm", "packed_gemm",
           "router", "argmax", "draw", "token_mask"}  # fmt: skip


# Timing


def test_a_timing_is_the_median_and_the_quartiles_distance() -> None:
    assert Timing.from_times([10.0, 12.0, 11.0, 9.0, 30.0]) == Timing(11.0, pytest.approx(100 * 2 / 11), 5)


def test_inputs_are_enough_to_exceed_the_cache_twice_and_fit_in_memory() -> None:
    assert input_sets(1000, cache_bytes=50_000, free_bytes=10**9) == 100
    assert input_sets(1001, cache_bytes=50_000, free_bytes=10**9) == 100
    assert input_sets(10**6, cache_bytes=50_000, free_bytes=10**9) == 1
    assert input_sets(1000, cache_bytes=50_000, free_bytes=20_000) == 10
    assert input_sets(10**6, cache_bytes=50_000, free_bytes=10) == 1  # and let the allocation say so
    assert input_sets(0, cache_bytes=50_000, free_bytes=10**9) == 128


def test_graph_timing_rotates_inputs_and_divides_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a torch.cuda that keeps books: eager calls take 5 µs, captured ones 2 µs."""
    clock, captured, called = [0.0], [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.us = clock[0]

        def elapsed_time(self, other: Event) -> float:
            return (other.us - self.us) / 1000

    class Graph:
        def replay(self) -> None:
            clock[0] += 2.0 * len(captured)

        def reset(self) -> None:
            pass

    capturing = []

    @contextmanager
    def graph(_: Graph) -> Any:
        capturing.append(True)
        yield
        capturing.pop()

    def call(inputs: int) -> None:
        if capturing:
            captured.append(inputs)
        else:
            called.append(inputs)
            clock[0] += 5.0

    fake = {
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=1000),
        "mem_get_info": lambda _: (10**9, 10**9),
        "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0,
        "synchronize": lambda: None,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": graph,
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    bench = find_bench("cuda")
    assert isinstance(bench, CudaBench)
    timing = bench.time(lambda index: index, call, input_bytes=500)
    assert timing.median_ns == pytest.approx(2000)
    assert timing.spread_pct == pytest.approx(0, abs=1e-6)
    assert captured[:6] == [0, 1, 2, 3, 0, 1] and len(captured) == 256
    assert called == [0, 0, 3]
    assert bench.time_eagerly(lambda: call(7), 10).median_ns == pytest.approx(5000)


# Ceilings


def test_ceilings_in_miniature() -> None:
    rows = [row for measure in ceilings(find_bench("cpu"), dry_run=True) for row in measure()]
    values = {row["ceiling"]: row["value"] for row in rows}
    for name in ("copy_bytes_per_s", "gemm_flops_per_s", "launch_graph_ns", "launch_eager_ns"):
        assert values[name] > 0
    json.dumps(rows, allow_nan=False)


# Correctness


def test_every_kernel_has_a_case_and_the_references_agree() -> None:
    rows = [row for check in checks(CPU, dry_run=True) for row in check()]
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["backend"] for row in rows} == {"torch"}
    assert [row for row in rows if not row["ok"]] == []
    assert sum(row["case"].endswith(", twice") for row in rows) == len(rows) / 2
    json.dumps(rows, allow_nan=False)


def case_of(run: Any, error_of: Any) -> list[dict[str, Any]]:
    prepared = Prepared(lambda seed: (), run, lambda given, out: error_of(out))
    return list(check_case(Operation("kernel", "case", torch.float32, 0.5, lambda: prepared), "torch"))


def test_a_case_that_raises_is_a_row() -> None:
    def broken() -> Any:
        raise RuntimeError("no such device")

    (row,) = case_of(broken, None)
    assert row == {
        "kernel": "kernel",
        "case": "case",
        "dtype": "float32",
        "backend": "torch",
        "error": "RuntimeError: no such device",
        "limit": 0.5,
        "ok": False,
    }


def test_what_is_not_written_is_nan_and_nan_never_passes() -> None:
    row, again = case_of(lambda: (torch.empty(3),), lambda out: relative_error(out[0], torch.ones(3)))
    assert not row["ok"] and row["error"] == "nan"
    assert again["ok"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_result_that_moves_is_a_fault() -> None:
    results = iter((torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.5])))
    row, again = case_of(lambda: (next(results),), lambda out: 0.0)
    assert row["ok"]
    assert not again["ok"] and again["error"] == 2


def test_distance_from_a_draw() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert distance_from_draw(logits, (1.0, 0, 1.0, 0.35), 2) == 0
    assert distance_from_draw(logits, (1.0, 0, 1.0, 0.35), 3) == pytest.approx(0.25)
    assert distance_from_draw(logits, (1.0, 0, 1.0, 0.35), 1) == pytest.approx(0.05)
    assert distance_from_draw(logits, (1.0, 2, 1.0, 0.35), 1) == inf
    assert distance_from_draw(logits, (1.0, 0, 0.7, 0.4), 2) == 0
    assert distance_from_draw(logits, (1.0, 0, 0.7, 0.4), 1) == inf
    assert distance_from_draw(logits, (0.0, 0, 1.0, 0.1), 3) == 0
    assert distance_from_draw(logits, (0.0, 0, 1.0, 0.1), 0) == inf


# The grid


def test_ways_of_an_operation_cost_the_same_and_a_missing_library_is_a_row() -> None:
    costs: dict[str, set[Cost]] = {}
    for way in ways(torch.device("meta"), dry_run=False):
        costs.setdefault(way.what, set()).add(way.operation().cost)
    assert len(costs) == 7 + 4 + 3 + 2 and all(len(cost) == 1 for cost in costs.values())
    rows = [row for unit in comparisons(CpuBench(), CPU, dry_run=True)[:4] for row in unit()]
    assert [row["way"] for row in rows] == ["torch", "varlen", "flash-attn", "flashinfer"]
    assert rows[0]["median_ns"] > 0 and rows[0]["why"] is None
    assert all(row["median_ns"] is None and row["why"] for row in rows[1:])
    shown = page({"environment": {"gpu": "X"}, "compare": [rows[0] | {"median_ns": 5e3}, rows[1] | {"median_ns": 4e3}]})
    assert "| attention: decode | varlen | 4 | 0.8 |" in shown


def test_the_grid_in_miniature_goes_to_parquet(tmp_path: Path) -> None:
    rows = [row for measure in grid(find_bench("cpu"), CPU, CEILINGS, dry_run=True) for row in measure()]
    assert {row["op"] for row in rows} == {
        "gemm",
        "packed_gemm",
        "grouped_gemm",
        "attention_decode",
        "attention_prefill",
        "add_rms_norm",
        "silu_mul",
        "rope_store",
        "argmax",
        "draw",
    }
    for row in rows:
        assert list(row) == [column.name for column in GRID_COLUMNS]
        assert row["error"] is None and row["median_ns"] > 0
        assert row["roofline_share"] == pytest.approx(row["roofline_ns"] / row["median_ns"])
    write_grid(rows, tmp_path / "kernels.parquet", {"gpu": "a GPU", "date": "2030-01-01"})
    table = pq.read_table(tmp_path / "kernels.parquet")
    assert table.schema.metadata[b"tokentwin.gpu"] == b"a GPU"
    assert table.to_pylist() == rows
    assert table.schema.field("median_ns").metadata[b"unit"] == b"ns"
    assert all(field.metadata[b"definition"] for field in table.schema)


def test_a_grid_of_nothing_is_written_too(tmp_path: Path) -> None:
    write_grid([], tmp_path / "kernels.parquet", {})
    assert pq.read_table(tmp_path / "kernels.parquet").num_rows == 0


def test_an_operation_that_raises_is_a_row() -> None:
    def broken() -> Prepared:
        raise RuntimeError("out of memory")

    about = {"op": "gemm", "model": "m", "backend": "torch", "tokens": 1, "dtype": "bf16"}
    operation = Operation("gemm", "", torch.bfloat16, 0.0, broken, Cost(10, 10))
    row = measured(Point(0, about, operation), CpuBench(), CEILINGS)
    assert row["error"] == "RuntimeError: out of memory"
    assert row["median_ns"] is None and row["roofline_share"] is None


@pytest.mark.parametrize(("dtype", "cost", "expected"), [
    ("bf16", Cost(2000, 10), 1000.0), ("bf16", Cost(2, 4000), 4000.0), ("fp8", Cost(2, 4000), 1000.0),
])  # fmt: skip
def test_the_roofline_is_the_larger_of_two_times(dtype: str, cost: Cost, expected: float) -> None:
    operation = Operation("gemm", "", torch.bfloat16, 0.0, lambda: Prepared(lambda seed: (), lambda: ()), cost)
    bench: Any = SimpleNamespace(time=lambda *_: Timing(2 * expected, 0.0, 5))
    row = measured(Point(0, {"op": "gemm", "dtype": dtype}, operation), bench, CEILINGS)
    assert row["roofline_ns"] == pytest.approx(expected)
    assert row["roofline_share"] == pytest.approx(0.5)


def test_costs_by_hand() -> None:
    # 3 tokens from 4 inputs to 5 outputs: 12 numbers in, 20 weights, 15 numbers out; 3 x 4 x 5 multiply-adds.
    assert gemm(ON, 3, 4, 5, torch.bfloat16).cost == (2 * (12 + 20 + 15), 2 * 60)
    assert gemm(ON, 3, 4, 5, torch.float8_e4m3fn).cost == (2 * (12 + 15) + 20 + 4 * 5, 2 * 60)
    # 128 inputs in groups of 64 to 2 outputs: half a byte a weight; four scales, and where there are some, zero points.
    assert packed_gemm(ON, Packing(2, 128, 4, 64), 3).cost == (128 + 2 * 4 + 2 * 3 * 130, 2 * 3 * 256)
    assert packed_gemm(ON, Packing(2, 128, 8, 64, zeros=True), 3).cost.bytes == 256 + 3 * 4 + 2 * 3 * 130
    # One token goes to 2 of 8 experts of 3 x 4 x 5 weights.
    assert grouped_gemm(ON, Mixture(4, 5, 8, 2), 1).cost == (2 * 2 * 60 + 2 * 2 * 4, 2 * 2 * 60)
    assert grouped_gemm(ON, Mixture(4, 5, 8, 2), 1000).cost.bytes == 2 * 8 * 60 + 2 * 2 * 1000 * 4

    def attended(rows: list[tuple[int, int]], heads: int, dim: int, cached: torch.dtype = torch.bfloat16) -> Cost:
        return attention(ON, Shape("", heads, 1, dim, torch.bfloat16, cached, 16), rows).cost

    # Two decode rows at context 7: 2 x 2 heads x 8 in and out, 14 keys and 14 values of 1 x 8; 14 pairs, 2 heads.
    assert attended([(7, 1)] * 2, 2, 8) == (2 * (2 * 32 + 2 * 14 * 8), 14 * 2 * (2 * 8 + 2 * 8))
    assert attended([(7, 1)] * 2, 2, 8, torch.float8_e4m3fn) == (2 * 2 * 32 + 2 * 14 * 8, 14 * 2 * 32)
    # A prompt of 3 sees 1 + 2 + 3; 2 tokens after a past of 3 see 4 + 5.
    assert attended([(3, 3)], 1, 1).flops == 4 * 6
    assert attended([(5, 2)], 1, 1).flops == 4 * 9
    assert add_rms_norm(ON, 3, 10).cost == (2 * (30 + 30 + 30 + 30 + 10), 0)
    assert silu_mul(ON, 3, 10).cost == (2 * (60 + 30), 0)
    assert argmax(ON, 3, 10).cost == (2 * 30 + 4 * 3, 0)
    assert draw(ON, 3, 10).cost == (2 * 30 + 4 * 3 + 4 * 4 * 3, 0)

    def rotated(spec: ModelSpec) -> Cost:
        shape = Shape("", spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.bfloat16, torch.bfloat16, 16)
        return rope_store(ON, shape, spec, [(1, 1)]).cost

    # Of Qwen3-0.6B a token's QKV is 32 heads of 128, in and out; 64 cosines and sines, a position and a slot.
    assert rotated(random_spec("random:qwen3-0.6b")).bytes == 2 * 2 * 4096 + 2 * 4 * 64 + 8 + 2 * 2 * 128
    assert rotated(random_spec("random:llama-3.1-8b")).bytes == 2 * 2 * 6144 + 2 * 4 * 64 + 8


def test_decode_shares_are_of_what_the_target_names() -> None:
    row = {"op": "attention_decode", "kv_dtype": "bf16", "rows": 16, "context": 4096, "longest": 4096}
    row["roofline_share"] = 0.9
    others = [
        {"rows": 8},
        {"longest": 8192},  # uneven
        {"context": 1024, "longest": 1024},
        {"kv_dtype": "fp8"},
        {"op": "attention_prefill"},
        {"roofline_share": None},
    ]
    assert decode_shares([row, *(row | other for other in others)]) == [0.9]


def test_targets_come_first_and_nothing_twice() -> None:
    every = points(torch.device("cuda"), dry_run=False)
    keys = [json.dumps(point.about, sort_keys=True) for point in every]
    assert len(set(keys)) == len(keys)
    first = [point.about for point in every if point.order == 0]
    assert [point.about for point in every[: len(first)]] == first
    assert len(first) < 40
    decode = {(row["rows"], row["context"]) for row in first if row["op"] == "attention_decode"}
    assert {(1, 1024), (8, 1024), (64, 1024), (16, 4096), (64, 4096)} <= decode
    assert any(row["op"] == "attention_prefill" and row["tokens"] == 8192 for row in first)
    gemms = {row["tokens"] for row in first if row["op"] == "gemm" and row["model"] == "llama-3.1-8b"}
    assert gemms == {1, 8, 64, 8192}


def test_the_grid_has_chunks_over_past_kv_uneven_rows_and_draws() -> None:
    about = [point.about for point in points(torch.device("cuda"), dry_run=False)]
    past = {
        (row["context"] - row["tokens"], row["tokens"]) for row in about if row.get("rows") == 1 and "longest" in row
    }
    assert past >= {(past, tokens) for past in (2048, 8192, 32768) for tokens in (1, 2, 4, 16, 64, 256)}
    assert any(row["op"] == "attention_decode" and row["longest"] > row["context"] for row in about)
    assert {row["rows"] for row in about if row["op"] == "draw"} == {1, 4, 16, 64, 256}


def test_uneven_contexts_keep_their_mean() -> None:
    contexts = [context for context, _ in uneven(64, 1024)]
    assert min(contexts) == 128 and max(contexts) == 1920
    assert sum(contexts) / 64 == pytest.approx(1024, abs=1)
    assert contexts != sorted(contexts)
