"""Corrected kernel times: they are recovered from steps, price a simulation as they price steps, and are chosen."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokentwin.calibration.kernels.own_kernels import OwnKernels, kernel_ratios
from tokentwin.calibration.operations import Gemm
from tokentwin.calibration.steps.correction import Correction
from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.fit import fit, predict
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.steps.surface_fit import known_model, surfaces_for
from tokentwin.calibration.steps.surfaces import Surfaces, kernels_of, surface_ns
from tokentwin.commands.calibrate import print_calibration
from tokentwin.planning.measure.calibrator import _surfaces
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import AGGREGATES, StepPlan

SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=4096, num_blocks=4000)
ENGINE = Deployment(model="random:qwen3-0.6b", device="cuda", dtype="bfloat16", attention="triton", scheduler=SCHEDULER)
MODEL = known_model(ENGINE.model).model_dump_json()
ADDED = {"step": 3e5, "decode row": 4e3, "prompt": 6e4, "prompts only": 0.0, "prompts only, token": 0.0}
FACTORS = {**Correction().factors, "decode attention": 1.4, "prompt attention": 0.7, "weights": 1.1}
TRUTH = Surfaces(MODEL, "H200", Correction(FACTORS, ADDED), eager=0.1, captures=True)


def sizes(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 64, count)
    chunk = np.where((rng.random(count) < 0.4) | (rows == 0), rng.integers(16, 4000, count), 0)
    past = np.where(rng.random(count) < 0.5, rng.integers(0, 2000, count), 0) * (chunk > 0)
    made = dict.fromkeys(AGGREGATES, np.zeros(count, dtype=np.int64))
    made |= {"decode_rows": rows, "decode_context": rows * rng.integers(50, 3000, count)}
    made |= {"prefill_rows": (chunk > 0) * 1, "prefill_tokens": chunk, "prefill_context": past}
    return made | {"prefill_pairs": chunk * past + chunk * (chunk + 1) // 2, "sampled_rows": rows + (chunk > 0)}


def measured(truth: Surfaces, engine: Deployment, seed: int) -> pa.Table:
    columns = sizes(600, seed)
    steps = MeasuredSteps([pa.table(columns | {"plan_ns": np.arange(600), "start_ns": np.arange(600),
                                               "end_ns": np.arange(600) + 1})])  # fmt: skip
    times = surface_ns(truth, engine, steps.sizes).round().astype(np.int64)
    ends = np.cumsum(times)
    graph = (columns["prefill_tokens"] + columns["decode_rows"] <= 2048) * 1
    clock = {"plan_ns": ends - times, "start_ns": ends - times, "end_ns": ends, "graph": graph}
    return pa.table(columns | clock)


def calibrated(tables: list[pa.Table], engine: Deployment, gpu: str) -> tuple[Calibration, MeasuredSteps]:
    steps = MeasuredSteps(tables, knees=engine.device == "cuda")
    surfaces = surfaces_for(steps, engine, gpu)
    stated = engine.model_dump_json()
    made = fit(steps, deployment=stated, hardware={}, version="", created="", noise={}, surfaces=surfaces)
    return made, steps


@pytest.fixture(scope="module")
def learnt() -> Calibration:
    return calibrated([measured(TRUTH, ENGINE, seed) for seed in range(5)], ENGINE, "NVIDIA H200")[0]


def test_a_gpu_of_known_factors_is_recovered_and_chosen(learnt: Calibration) -> None:
    assert learnt.surfaces is not None and "timed by corrected surfaces" in learnt.chosen
    linear, surfaces = learnt.unseen_error_pct.values()
    assert surfaces < 0.5 < 2 < linear
    factors = learnt.surfaces.correction.factors
    assert 0.6 < factors["prompt attention"] < 0.85  # a small share of these steps, so it is pulled towards 1
    for part in ("compute@1024", "decode attention"):
        assert factors[part] == pytest.approx(TRUTH.correction.factors[part], rel=0.06)
    assert learnt.surfaces.eager == pytest.approx(0.1, abs=0.03)
    fresh = MeasuredSteps([measured(TRUTH, ENGINE, 9)], knees=True)
    assert np.median(np.abs(predict(learnt, fresh) / fresh.step_ns - 1)) < 0.005


def test_a_saved_calibration_prices_the_same(learnt: Calibration, tmp_path: Path) -> None:
    learnt.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert again == learnt
    plan = StepPlan.from_amounts(decode_rows=8, decode_context=4000, decode_squares=2_000_000, sampled_rows=8)
    mixed = StepPlan.from_amounts(
        decode_rows=8, decode_context=4000, decode_squares=2_000_000, sampled_rows=9, prefill_rows=1,
        prefill_tokens=300, prefill_pairs=45_150,
    )  # fmt: skip
    used = StepCost(learnt)
    times = [used.step_ns(one) for one in (plan, mixed)]
    for cost in (StepCost(again), pickle.loads(pickle.dumps(used))):  # a worker process gets a pickled one
        assert [cost.step_ns(one) for one in (plan, mixed)] == times


def test_the_simulator_prices_steps_as_the_fit_does(learnt: Calibration) -> None:
    steps = MeasuredSteps([measured(TRUTH, ENGINE, 11)])
    predicted, cost = predict(learnt, steps), StepCost(learnt)
    columns = sizes(600, 11)
    for at in range(0, 600, 7):
        amounts = {name: int(columns[name][at]) for name in AGGREGATES}
        rows, context = amounts["decode_rows"], amounts["decode_context"]
        amounts["decode_squares"] = context * context // max(rows, 1)
        assert cost.step_ns(StepPlan.from_amounts(**amounts)) == pytest.approx(predicted[at], rel=0.03)


def test_decode_steps_at_once_take_as_long_as_one_by_one(learnt: Calibration) -> None:
    for surfaces in (learnt.surfaces, replace(TRUTH, line_ns={"padded row": 3.3, "sampled row": 7.7})):
        cost = StepCost(replace(learnt, surfaces=surfaces)).scaled(1.07)
        rows, context, squares = 7, 2100, 640_000
        at_once = list(cost.decode_run_ns(rows, context, squares, 40))
        for duration in at_once:
            plan = StepPlan.from_amounts(
                decode_rows=rows, decode_context=context, decode_squares=squares, sampled_rows=rows
            )
            assert duration == cost.cpu_ns(plan) + cost.step_ns(plan)
            context, squares = context + rows, squares + 2 * context + rows


def test_a_cpu_that_is_a_line_keeps_its_prices() -> None:
    cpu = Deployment(model="random:smollm2", dtype="float32", scheduler=SCHEDULER)
    prices = np.array([5e6, 4e5, 20.0, 1e5, 3e5, 10.0, 2.0, 0.0, 1e4])
    tables = []
    for seed in range(5):
        bare = measured(TRUTH, ENGINE, seed)
        times = (MeasuredSteps([bare]).step @ prices).round().astype(np.int64)
        ends = np.cumsum(times)
        kept = bare.drop_columns(["plan_ns", "start_ns", "end_ns", "graph"])
        for name, column in (("plan_ns", ends - times), ("start_ns", ends - times), ("end_ns", ends)):
            kept = kept.append_column(name, pa.array(column))
        tables.append(kept)
    made, _ = calibrated(tables, cpu, "")
    assert made.surfaces is None and "timed by linear prices" in made.chosen


def test_own_kernels_are_exact_where_measured_and_between_otherwise(tmp_path: Path) -> None:
    base = kernels_of("H200", 0.0)
    known = {"op": "gemm", "model": "m", "dtype": "bf16", "kv_dtype": None, "rows": None, "context": None}
    known |= {"inputs": 4096, "outputs": 6144}
    slower = {16: 1.1, 64: 1.3, 1024: 0.9}
    rows = [
        {**known, "tokens": m, "median_ns": f * float(base.time(Gemm("", m, 6144, 4096)).ns)} for m, f in slower.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "kernels.parquet")
    own = OwnKernels(base, kernel_ratios(base, tmp_path / "kernels.parquet", "triton"))
    m = np.array([16.0, 64.0, 1024.0, 32.0, 1.0, 8192.0])
    ratio = own.time(Gemm("", m, 6144, 4096)).ns / base.time(Gemm("", m, 6144, 4096)).ns
    assert ratio[:4] == pytest.approx([1.1, 1.3, 0.9, np.sqrt(1.1 * 1.3)], rel=1e-6)
    assert ratio[4:] == pytest.approx([1.1, 0.9], rel=1e-6)
    other = Gemm("", 64, 4096, 4096)
    assert own.time(other).ns == base.time(other).ns


TABLE = {"model": "random:llama-3.1-8b", "dtype": "bf16", "kv_dtype": None, "rows": None, "context": None}
TABLE |= {"inputs": None, "outputs": None, "tokens": None, "part": "", "backend": "triton"}
PROMPT = {"op": "attention_prefill", "kv_dtype": "bf16", "rows": 1, "tokens": 512, "context": 512}


def written(path: Path, rows: list[dict[str, object]], **about: str) -> Path:
    table = pa.Table.from_pylist([TABLE | row for row in rows])
    pq.write_table(table.replace_schema_metadata({f"tokentwin.{name}": value for name, value in about.items()}), path)
    return path


def test_undivided_kv_is_another_kernel(tmp_path: Path) -> None:
    """Attention over undivided KV is that of the batch-invariant mode; number types without surfaces are left out."""
    base = kernels_of("H200", 0.0)
    rows = [PROMPT | {"median_ns": 1e5}, PROMPT | {"median_ns": 4e5, "part": "whole"}]
    rows += [{"op": "gemm", "dtype": "fp32", "tokens": 8, "inputs": 8, "outputs": 8, "median_ns": 1e3}]
    path = written(tmp_path / "kernels.parquet", rows, gpu="NVIDIA H200", dry_run="False")
    (divided,), (whole,) = (kernel_ratios(base, path, "triton", invariant) for invariant in (False, True))
    assert whole.log - divided.log == pytest.approx(np.log(4.0))
    assert not kernel_ratios(base, path, "hybrid")


def test_kernels_that_cannot_be_used_are_refused(learnt: Calibration, tmp_path: Path) -> None:
    rows = [PROMPT | {"median_ns": 1e5}]
    path = written(tmp_path / "kernels.parquet", rows, gpu="NVIDIA H100 80GB HBM3")
    steps = MeasuredSteps([measured(TRUTH, ENGINE, 0)])
    with pytest.raises(UserError, match="was measured on NVIDIA H100 80GB HBM3, not on H200"):
        _surfaces(steps, ENGINE, "NVIDIA H200", path)
    assert _surfaces(steps, ENGINE, "NVIDIA H100 80GB HBM3", path)[0][0].own
    cpu, unknown = (ENGINE.model_copy(update=one) for one in ({"device": "cpu"}, {"model": "random:none-such"}))
    for engine, gpu in ((cpu, ""), (unknown, "NVIDIA H200"), (ENGINE, "a GPU that nobody knows")):
        with pytest.raises(UserError, match="cannot be used") as refused:
            _surfaces(steps, engine, gpu, path)
        assert refused.value.field == "kernels"
    drafts = ENGINE.rescheduled(speculative={"method": "ngram"})
    assert _surfaces(steps, drafts, "NVIDIA H200", None) == ([], "speculative decoding has no kernel times here")
    with pytest.raises(UserError, match="cannot be used: speculative decoding has no kernel times here"):
        _surfaces(steps, drafts, "NVIDIA H200", path)
    written(path, rows, gpu="NVIDIA H200", dry_run="True")
    with pytest.raises(UserError, match="dry run"):
        _surfaces(steps, ENGINE, "NVIDIA H200", path)


def test_the_fit_judges_what_the_calibration_keeps() -> None:
    """Eager steps among them, whose share lies on the corrected times."""
    steps = MeasuredSteps([measured(TRUTH, ENGINE, seed) for seed in range(2)], knees=True)
    (feature,) = surfaces_for(steps, ENGINE, "NVIDIA H200")
    fitted = feature.learnt(np.ones(len(steps), dtype=np.bool_))
    kept = feature.surfaces(fitted)
    assert kept.eager > 0
    assert feature.predicted_ns(fitted) == pytest.approx(surface_ns(kept, ENGINE, steps.sizes), rel=1e-9)


def test_what_prices_the_steps_is_shown(learnt: Calibration, capsys: pytest.CaptureFixture[str]) -> None:
    print_calibration(learnt)
    said = capsys.readouterr().out
    assert "decode attention" in said and "steps beyond the CUDA graphs" in said and "cpu: plan" in said
    assert "step: " not in said
    assert learnt.surfaces is not None
    assert f"{learnt.surfaces.correction.factors['decode attention']:.3f}" in said


def test_a_clock_slows_computing_more_than_reading() -> None:
    tables = []
    for seed in range(5):
        table = measured(TRUTH, ENGINE, seed)
        speed = np.random.default_rng(seed).uniform(0.7, 1.0, len(table))
        sized = MeasuredSteps([table])
        whole = surface_ns(TRUTH, ENGINE, sized.sizes)
        (feature,) = surfaces_for(MeasuredSteps([table]), ENGINE, "H200")
        values = np.array(
            [TRUTH.correction.factors.get(n, TRUTH.correction.added_ns.get(n, 0.0)) for n in feature.columns]
        )
        computing = sum(
            v * column
            for v, (name, column) in zip(values, feature.columns.items(), strict=True)
            if name.startswith("compute") or name in ("prompt attention", "past attention")
        )
        times = (whole + computing * (1 / speed - 1)).round().astype(np.int64)
        ends = np.cumsum(times)
        kept = table.drop_columns(["plan_ns", "start_ns", "end_ns"])
        named = {"plan_ns": ends - times, "start_ns": ends - times, "end_ns": ends, "thread_ns": times, "speed": speed}
        for name, column in named.items():
            kept = kept.append_column(name, pa.array(column))
        tables.append(kept)
    made, _ = calibrated(tables, ENGINE, "H200")
    assert made.weather is not None and made.weather.compute_shares
    assert made.weather.compute_exponent - made.weather.exponent >= 0.5
