"""The runs that a sweep's file defines, their identities, and their columns."""

import os
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.planning.sweep_samples import base, calibrated
from tokentwin.planning.scenario import Scenario
from tokentwin.planning.sweep.columns import parameter_fields, parameter_values, partition_keys, run_schema
from tokentwin.planning.sweep.estimate import sweep_estimate
from tokentwin.planning.sweep.points import Point, input_digests, points
from tokentwin.planning.sweep.settings import SobolRange, SweepSettings, load_sweep
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError

RATE = "workload.arrivals.rate"
SEQS = "deployment.scheduler.max_num_seqs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tmp_path_factory.mktemp("calibration"))


def sweep(folder: Path, **more: Any) -> SweepSettings:
    return parse(SweepSettings, {"base": base(folder), **more}, where="FILE")


def made(folder: Path, **more: Any) -> list[Point]:
    return points(sweep(folder, **more))


def test_every_entry_meets_every_combination_every_sobol_point_and_every_seed(folder: Path) -> None:
    runs = made(
        folder,
        list=[{"router": "least-tokens", "replicas": 2}, {"replicas": 1}],
        grid={RATE: [5, 10, 20], SEQS: [4, 8]},
        sobol={"points": 4, "ranges": {"deployment.scheduler.num_blocks": {"low": 100, "high": 400, "integer": True}}},
        seeds=[3, 8],
    )
    assert len(runs) == len({run.id for run in runs}) == 2 * 6 * 4 * 2
    seen = {(r.parameters["replicas"], r.parameters[RATE], r.parameters[SEQS], r.parameters["seed"]) for r in runs}
    assert seen == set(product((1, 2), (5, 10, 20), (4, 8), (3, 8)))
    for run in runs:
        scheduler = run.config["deployment"]["scheduler"]
        assert run.config["workload"]["arrivals"]["rate"] == run.parameters[RATE]
        assert scheduler["max_num_seqs"] == run.parameters[SEQS]
        assert scheduler["sjf_seed"] == run.config["workload"]["seed"] == run.parameters["seed"]
        assert scheduler["max_model_len"] == 512  # from the calibrated deployment


AXES = st.dictionaries(
    st.sampled_from([RATE, SEQS, "replicas", "workload.requests"]), st.sets(st.integers(1, 50), min_size=1, max_size=7)
)


@given(AXES, st.sampled_from([(), ({"router": "round-robin"}, {"router": "least-tokens"})]), st.integers(1, 3))
def test_an_estimate_checks_every_value_in_few_runs(axes: dict[str, set[int]], entries: Any, seeds: int) -> None:
    grid = {path: sorted(values) for path, values in axes.items()}
    given = {"gpu": "H100", "workload": {"requests": 10, "arrivals": {"kind": "poisson", "rate": 1}, "prompt": 9,
             "output": 9}}  # fmt: skip
    settings = parse(SweepSettings, {"base": given, "grid": grid, "list": entries, "seeds": seeds}, where="FILE")
    assert settings.runs == len(list(settings.variations()))
    samples = list(settings.samples())
    assert len(samples) <= 60
    for path, values in grid.items():
        assert {sample[path] for sample in samples} == set(values)
    assert {sample.get("router") for sample in samples} == {entry["router"] for entry in entries} or not entries
    assert sweep_estimate(settings, 1).startswith(f"{settings.runs} run")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"deployment": {"model": "nope"}}, "model: 'nope': "),
        ({"calibration": "nodir"}, "calibration: 'nodir"),
        ({"gpu": "nope"}, "gpu: 'nope': "),
        ({"deployment": {"fleet": {"pools": [{"gpu": "nope"}]}}}, "gpu: 'nope': "),
        ({"deployment": {"model": "Llama-3.1-70B"}}, "gpu: .*: has room for"),
    ],
)
def test_an_estimate_refuses_what_the_sweep_refuses(more: dict[str, Any], message: str) -> None:
    spec = {"requests": 10, "arrivals": {"kind": "poisson", "rate": 1}, "prompt": 9, "output": 9}
    settings = parse(SweepSettings, {"base": {"gpu": "H100", "workload": spec, **more}}, where="FILE")
    for refused in (points, sweep_estimate):
        with pytest.raises(UserError, match=message):
            refused(settings)


def test_what_an_entry_does_not_name_is_as_in_base(folder: Path) -> None:
    runs = made(folder, list=[{"replicas": 2}, {RATE: 7}])
    assert [run.parameters for run in runs] == [{"replicas": 2, RATE: 20}, {"replicas": None, RATE: 7}]


def test_the_id_is_of_what_is_run_not_of_how_it_is_written(folder: Path) -> None:
    (plain,) = made(folder)
    (spelt,) = made(folder, list=[{RATE: 20.0, "workload.seed": 0, "deployment.policy": "vllm"}])
    (other,) = made(folder, list=[{RATE: 21}])
    assert plain.id == spelt.id != other.id


@pytest.mark.parametrize("changed", [{"replicas": 2}, {"slo.ttft_ms": 9}, {"workload.seed": 1}, {SEQS: 15}])
def test_the_id_changes_with_every_setting(folder: Path, changed: dict[str, Any]) -> None:
    assert made(folder, list=[changed])[0].id != made(folder)[0].id


def test_what_cannot_run_is_a_point_with_an_error_unless_all_are(folder: Path) -> None:
    *good, bad, other = made(folder, grid={"deployment.scheduler.max_num_seqs": [4, 0]}, seeds=2)
    assert not any(run.error for run in good)
    assert bad.error == other.error
    assert "base.deployment.scheduler.max_num_seqs: 0: " in bad.error
    assert (bad.parameters["seed"], other.parameters["seed"]) == (0, 1)
    with pytest.raises(UserError, match="max_num_seq: 4: is not a setting"):
        made(folder, grid={"deployment.scheduler.max_num_seq": [4, 5]}, seeds=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": {"replicas": [1, 1]}}, "is in the sweep twice"),
        ({"grid": {RATE: [1]}, "list": [{RATE: 2}]}, "set twice"),
        ({"grid": {RATE: [1], "workload.arrivals": [{"kind": "poisson", "rate": 2}]}}, "set twice"),
        ({"grid": {"workload.seed": [1]}, "seeds": 2}, "seeds and workload.seed set the same value"),
        ({"grid": {"workload.arrivals.rate.x": [1]}}, "single value"),
        ({"grid": {"replicas": []}}, "must not be empty"),
        ({"grid": {"replicas": 2}}, "grid.replicas: 2: must be a list"),
        ({"grids": {}}, "is not a setting"),
        ({"partition": ["gpu"]}, "partition gpu must be a path"),
        ({"sobol": {"points": 6, "ranges": {RATE: {"low": 1, "high": 2}}}}, "power of two"),
        ({"sobol": {"points": 4, "ranges": {RATE: {"low": 0, "high": 2, "scale": "log"}}}}, "above 0"),
        ({"sobol": {"points": 4, "ranges": {RATE: {"low": 2, "high": 2}}}}, "below high"),
        ({"base": {"workload": {"trace": "t.csv"}, "deployment": {}}}, "give gpu or calibration"),
        ({"list": [{"slo.ttft": 5}]}, "is not a known latency; choose one of ttft_ms"),
        ({"seeds": 10**9}, "runs: '1,000,000,000': must be at most 50,000; split the sweep"),
        ({"sobol": {"points": 2**15, "ranges": {RATE: {"low": 1, "high": 2}}}, "seeds": [1, 2]}, "runs: '65,536'"),
        ({"seeds": []}, "seeds: .*give at least one"),
        ({"seeds": 0}, "seeds: 0: must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        made(folder, **settings)
    assert "\n" not in str(error.value)


def test_files_are_read_with_their_mistakes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    for text, message in (
        ("- 1", "must be a mapping"),
        ("a: [", "not YAML"),
        ("base: {a: 2026-01-01}", "may only hold text"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            load_sweep(file)
    with pytest.raises(UserError, match="cannot be read"):
        load_sweep(tmp_path / "none.yaml")
    (tmp_path / "deployment.yaml").write_text("policy: fair")
    file.write_text(yaml.safe_dump({"base": {**base(folder), "deployment": str(tmp_path / "deployment.yaml")}}))
    assert points(load_sweep(file))[0].config["deployment"]["policy"] == "fair"


@given(
    low=st.integers(1, 1000),
    width=st.integers(1, 1000),
    scale=st.sampled_from(["linear", "log"]),
    share=st.floats(0, 1, exclude_max=True),
)
def test_a_range_keeps_within_its_ends(low: int, width: int, scale: Any, share: float) -> None:
    for integer in (False, True):
        span = SobolRange(low=low, high=low + width, scale=scale, integer=integer)
        value = span.value_at(share)
        assert low <= value <= low + width + 1e-9
        assert isinstance(value, int) == integer
        assert span.value_at(0.0) == low


def test_whole_numbers_are_equally_likely_ends_included() -> None:
    span = SobolRange(low=1, high=4, integer=True)
    assert [span.value_at(k / 8) for k in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_log_range_is_even_in_the_logarithm() -> None:
    assert SobolRange(low=1, high=10_000, scale="log").value_at(0.5) == pytest.approx(100)


@examples(0.1)
@given(st.integers(0, 6), st.integers(0, 2**32))
def test_a_sobol_sample_is_balanced_and_begins_with_the_smaller_one(power: int, seed: int) -> None:
    ranges = {"x": {"low": 0, "high": 1}, "y": {"low": 0, "high": 1}}
    count = 2**power
    big, small = (
        list(SweepSettings(base={}, sobol={"points": n, "seed": seed, "ranges": ranges}).variations())
        for n in (2 * count, count)
    )
    assert big[:count] == small
    for path in "xy":  # one point in each of `count` equal slices
        assert sorted(int(values[path] * count) for values, _ in small) == list(range(count))


def test_columns_are_named_shortly_typed_and_explained(folder: Path) -> None:
    grid = {
        RATE: [1, 2.5],
        "deployment.policy": ["vllm", "edf"],
        "deployment.scheduler.policy": ["fcfs", "priority"],
        "workload.requests": [5],
        "workload.output": [5, {"kind": "uniform", "low": 1, "high": 9}],
        "deployment.scheduler.enable_prefix_caching": [True],
        "deployment.scheduler.num_blocks": [300],
    }
    runs = made(folder, grid=grid, seeds=1)
    schema = run_schema(runs)
    fields = parameter_fields(schema)
    assert {path: (field.name, field.type) for path, field in fields.items()} == {
        RATE: ("rate", pa.float64()),
        "deployment.policy": ("deployment_policy", pa.string()),
        "deployment.scheduler.policy": ("scheduler_policy", pa.string()),
        "workload.requests": ("requests", pa.int64()),
        "deployment.scheduler.num_blocks": ("num_blocks", pa.int64()),
        "workload.output": ("output", pa.string()),
        "deployment.scheduler.enable_prefix_caching": ("enable_prefix_caching", pa.bool_()),
        "seed": ("seed", pa.int64()),
    }
    assert parameter_values(runs[1], schema)["output"] == '{"high":9,"kind":"uniform","low":1}'
    assert len(set(schema.names)) == len(schema.names)
    assert schema.field("ttft_ms_p99").metadata[b"unit"] == b"ms"
    assert all(field.metadata[b"definition"] for field in schema)
    assert partition_keys(None, runs, schema) == ["deployment_policy", "scheduler_policy"]
    assert partition_keys([RATE, "seed"], runs, schema) == ["rate", "seed"]
    with pytest.raises(UserError, match="must be a single value"):
        partition_keys(["workload.output"], runs, schema)


def test_the_files_that_runs_read_are_known_by_their_content(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n")
    run = {"workload": {"trace": str(trace)}, "calibration": str(folder)}
    runs = points(SweepSettings(base=run))
    before = input_digests(runs)
    assert sorted(before) == sorted([str(folder), str(trace)])
    trace.write_text(trace.read_text() + "1,9,9\n")
    after = input_digests(runs)
    assert before[str(folder)] == after[str(folder)]
    assert before[str(trace)] != after[str(trace)]
    trace.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        input_digests(runs)
    os.mkfifo(trace)
    with pytest.raises(UserError, match="is not a regular file"):
        input_digests(runs)


def test_the_example_in_the_documentation_is_as_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    example = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    runs = points(parse(SweepSettings, example, where="FILE"))
    assert f"= {len(runs)} runs" in text
    assert not any(run.error for run in runs)


def test_no_key_of_base_is_also_the_name_of_a_metric() -> None:
    run = Point({}, dict.fromkeys(Scenario.model_fields, 1))
    names = run_schema([run]).names
    assert len(set(names)) == len(names)
