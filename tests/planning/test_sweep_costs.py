"""The cost of a sweep's run, and the errors of its numbers."""

from pathlib import Path
from typing import Any

import pytest

from tests.planning.sweep_samples import base, calibrated, sweep_file
from tokentwin.planning.scenario import Scenario
from tokentwin.planning.sweep.one_run import Measure
from tokentwin.planning.sweep.points import points
from tokentwin.planning.sweep.settings import load_sweep
from tokentwin.planning.sweep.sweep import Sweep
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError

WORKLOAD = base(Path())["workload"]
ON_H100 = {
    "gpu": "H100",
    "deployment": {"model": "Llama-3.1-8B", "device": "cuda", "gpu_memory_utilization": 0.9, "tensor_parallel_size": 2},
    "workload": WORKLOAD,
    "replicas": 3,
}


def values(tmp_path: Path, run: dict[str, Any], bands: bool = False, **settings: Any) -> dict[str, Any]:
    """The one row of a sweep of one run."""
    file = sweep_file(tmp_path / "s.yaml", run, seeds=1, bands=bands, **settings)
    (point,) = points(load_sweep(file))
    outcome = Measure(bands=bands)(point)
    assert outcome.values["status"] == "complete", outcome.values
    return outcome.values


@pytest.mark.parametrize(("prices", "usd"), [({}, find_gpu("H100").usd_per_hour), ({"H100": 2.0, "L4": 9.0}, 2.0)])
def test_a_fleet_that_stays_as_it_is_costs_its_gpus(tmp_path: Path, prices: dict[str, float], usd: float) -> None:
    row = values(tmp_path, ON_H100 | {"prices": prices})
    assert row["gpus"] == 6
    assert row["cost_usd"] == pytest.approx(row["gpu_hours"] * usd)
    for tokens, per_mtok in (("output", "out"), ("input", "in"), ("total", "total")):
        expected = 6 * usd / (row[f"{tokens}_throughput"] * 3600) * 1e6
        assert row[f"usd_per_mtok_{per_mtok}"] == pytest.approx(expected)


def test_pools_cost_what_each_of_them_does(tmp_path: Path) -> None:
    pools = [{"name": "fast", "replicas": 1}, {"name": "cheap", "gpu": "L40S", "replicas": 2}]
    deployment = ON_H100["deployment"] | {"fleet": {"pools": pools}}
    run = {name: value for name, value in ON_H100.items() if name != "replicas"} | {"deployment": deployment}
    row = values(tmp_path, run | {"prices": {"H100": 3.0, "L40S": 1.0}})
    hours = row["gpu_hours"] / row["gpus"]
    assert row["cost_usd"] == pytest.approx(hours * (2 * 3.0 + 4 * 1.0))


def test_what_has_no_price_costs_nothing_that_is_known(tmp_path: Path) -> None:
    run = base(calibrated(tmp_path / "calibration"))
    row = values(tmp_path, run)
    assert row["cost_usd"] is row["usd_per_mtok_out"] is None
    assert values(tmp_path, run | {"prices": {"cpu": 0.1}})["cost_usd"] == pytest.approx(0.1 * row["gpu_hours"])


def test_a_price_of_no_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="H1000 is not a GPU of the catalogue"):
        parse(Scenario, ON_H100 | {"prices": {"H1000": 2.0}}, where="base")


def test_bands_hold_the_run_and_are_columns_only_when_asked_for(tmp_path: Path) -> None:
    row = values(tmp_path, ON_H100 | {"slo": {"ttft_ms": 30}}, bands=True)
    names = [name.removesuffix("_low") for name in row if name.endswith("_low")]
    assert {"ttft_ms_p99", "tpot_ms_p50", "e2e_ms_p90", "output_throughput", "slo_attainment"} < set(names)
    assert all(row[f"{name}_low"] <= row[name] <= row[f"{name}_high"] for name in names)
    assert row["tpot_ms_p50_low"] < row["tpot_ms_p50"] < row["tpot_ms_p50_high"]
    without = values(tmp_path, ON_H100 | {"slo": {"ttft_ms": 30}})
    assert {name: row[name] for name in without} == without
    for bands in (True, False):
        file = sweep_file(tmp_path / "s.yaml", ON_H100, seeds=1, bands=bands)
        columns = set(Sweep.from_settings(load_sweep(file)).schema.names)
        assert (set(row) <= columns) == bands and set(without) <= columns
