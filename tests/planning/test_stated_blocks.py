"""KV blocks that are stated override those that follow from memory, wherever a deployment is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tokentwin
from tokentwin.planning.deployments import read_deployment, with_settings
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.planning.sweep.dataset import FORMAT
from tokentwin.planning.sweep.estimate import sweep_estimate
from tokentwin.planning.sweep.results import SweepResults
from tokentwin.planning.sweep.settings import SweepSettings
from tokentwin.planning.sweep.sweep import Sweep
from tokentwin.serving.answers.report import Line
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload

TRAFFIC: dict[str, Any] = {
    "requests": 3,
    "arrivals": {"kind": "poisson", "rate": 5},
    "prompt": {"kind": "fixed", "tokens": 50},
    "output": {"kind": "fixed", "tokens": 5},
}
BOTH = {
    "model": "Llama-3.1-8B",
    "device": "cuda",
    "gpu_memory_utilization": 0.9,
    "scheduler": {"num_blocks": 1000},
}
BLOCKS, MEMORY = "deployment.scheduler.num_blocks", "deployment.gpu_memory_utilization"


def swept(deployment: dict[str, Any], out: Path, **grid: Any) -> list[int]:
    settings = {"base": {"deployment": deployment, "gpu": "H100", "workload": TRAFFIC}, "grid": grid}
    return sorted(tokentwin.sweep(settings, out, jobs=1).runs["kv_blocks"].to_pylist())


def test_in_python_and_in_a_file(tmp_path: Path) -> None:
    run = tokentwin.simulate(TRAFFIC, BOTH, gpu="H100", band=False)
    assert run.recording.run["num_blocks"] == 999
    file = tmp_path / "d.yaml"
    file.write_text("gpu_memory_utilization: 0.9\nscheduler: {num_blocks: 1000}\n")
    assert read_deployment(str(file), {}).gpu_memory_utilization is None


def test_a_flag_overrides_what_the_file_states(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("model: Llama-3.1-8B\nscheduler: {num_blocks: 1000}\n")
    made = read_deployment(str(file), {"gpu_memory_utilization": 0.5})
    assert made.gpu_memory_utilization == 0.5
    assert not made.scheduler.states("num_blocks")


def test_in_a_pool() -> None:
    pools = [{"name": "a"}, {"name": "b", "deployment": {"scheduler": {"num_blocks": 500}}}]
    data = {**BOTH, "scheduler": {}, "fleet": {"pools": pools}}
    scenario = price_scenario(Workload(()), None, "H100", parse(Deployment, data, where="deployment"))
    large, small = (pool.deployment.scheduler.num_blocks for pool in scenario.all_pools)
    assert small == 500 < large


def test_every_run_of_a_sweep_has_what_it_varies(tmp_path: Path) -> None:
    memory = {**BOTH, "scheduler": {}}
    assert swept(memory, tmp_path / "blocks", **{BLOCKS: [600, 800]}) == [599, 799]
    assert swept(BOTH, tmp_path / "base") == [999]
    half, most = swept(BOTH, tmp_path / "memory", **{MEMORY: [0.5, 0.9]})
    assert 999 < half < most


def test_a_swept_share_of_memory_replaces_the_blocks_of_a_pool(tmp_path: Path) -> None:
    pool = {"deployment": {"gpu_memory_utilization": 0.9, "scheduler": {"num_blocks": 700}}}
    whole = {**BOTH, "scheduler": {}, "fleet": {"pools": [pool]}}
    path = "deployment.fleet.pools.0.deployment."
    assert swept(whole, tmp_path / "blocks", **{f"{path}scheduler.num_blocks": [600, 800]}) == [599, 799]
    half, most = swept(whole, tmp_path / "memory", **{f"{path}gpu_memory_utilization": [0.5, 0.9]})
    assert 699 < half < most


@pytest.mark.parametrize("scheduler", [None, "x", [1]])
def test_a_scheduler_that_is_no_mapping_is_refused_in_one_line(scheduler: Any) -> None:
    run = {"deployment": {"scheduler": scheduler}, "gpu": "H100", "workload": TRAFFIC}
    settings = parse(SweepSettings, {"base": run, "grid": {MEMORY: [0.5, 0.9]}}, where="sweep")
    for refused in (lambda: Sweep.from_settings(settings), lambda: sweep_estimate(settings)):
        with pytest.raises(UserError, match="scheduler: "):
            refused()
    with pytest.raises(UserError, match="scheduler: "):
        with_settings(Deployment(), {"scheduler": scheduler, "gpu_memory_utilization": 0.5})


def test_both_at_once_are_refused() -> None:
    grid = {BLOCKS: [600, 800], MEMORY: [0.5, 0.9]}
    settings = {"base": {"deployment": BOTH, "gpu": "H100", "workload": TRAFFIC}, "grid": grid}
    with pytest.raises(UserError, match="num_blocks: 600: cannot be combined with gpu_memory_utilization"):
        Sweep.from_settings(parse(SweepSettings, settings, where="sweep"))
    with pytest.raises(UserError, match="num_blocks: 600: cannot be combined with gpu_memory_utilization"):
        with_settings(Deployment(), {"num_blocks": 600, "gpu_memory_utilization": 0.5})


def test_an_impossible_pair_ends_no_other_run_of_the_sweep() -> None:
    base = {"deployment": {**BOTH, "scheduler": {}}, "gpu": "H100", "workload": TRAFFIC}
    settings = parse(SweepSettings, {"base": base, "grid": {BLOCKS: [2000, None], MEMORY: [None, 0.5]}}, where="sweep")
    made = [(*run.parameters.values(), run.error) for run in Sweep.from_settings(settings).points]
    good, pair, neither, (blocks, share, error) = made
    assert good == (2000, None, "") and pair[:2] == (2000, 0.5) and neither[:2] == (None, None)
    assert "cannot be combined with gpu_memory_utilization" in pair[2] and "num_blocks: " in neither[2]
    assert blocks > 2000 and share == 0.5 and not error


def test_more_than_the_memory_of_a_gpu_is_refused(tmp_path: Path) -> None:
    """20 TB of KV on one L40S, wherever it is stated."""
    memory = {"model": "Llama-3.1-8B", "device": "cuda", "scheduler": {"num_blocks": 10_000_000}}
    base = {"deployment": memory, "gpu": "L40S", "workload": TRAFFIC}
    wanted = "num_blocks: 10000000: takes 19,531.2 GiB of KV beside 15.0 GiB of weights, and the device has 44.4 GiB"
    with pytest.raises(UserError, match=wanted):
        tokentwin.simulate(TRAFFIC, memory, gpu="L40S", band=False)
    with pytest.raises(UserError, match=wanted):
        tokentwin.plan(TRAFFIC, slos=["ttft_ms p99<=500"], gpus=["L40S"], deployment=memory, jobs=1)
    with pytest.raises(UserError, match=wanted):
        tokentwin.sweep({"base": base, "grid": {"deployment.scheduler.max_num_seqs": [16, 64]}}, tmp_path / "o", jobs=1)


def test_so_many_blocks_as_just_fit_are_simulated() -> None:
    def simulated(blocks: int) -> None:
        scheduler = {"num_blocks": blocks}
        tokentwin.simulate(TRAFFIC, {**BOTH, "scheduler": scheduler}, gpu="L40S", band=False)

    simulated(15_068)
    with pytest.raises(UserError, match="so 15,068 blocks at most"):
        simulated(15_069)


H100 = {"gpu": "H100", "calibration": None}
SIZED = {"deployment": {"gpu_memory_utilization": None, "scheduler": {"num_blocks": 4096}}}


@pytest.mark.parametrize(
    ("config", "base", "varied", "format", "marked"),
    [
        (H100 | SIZED, {}, {}, 2, True),
        (H100 | SIZED, {}, {}, FORMAT, False),
        (H100 | SIZED, {"deployment": {"scheduler": {"num_blocks": 4096}}}, {}, 2, False),
        (H100 | SIZED, {}, {"num_blocks": 4096}, 2, False),
        (H100 | SIZED, {}, {"num_blocks": None}, 2, True),
        (H100 | {"deployment": {"gpu_memory_utilization": 0.9, "scheduler": {}}}, {}, {}, 2, False),
        ({"gpu": None, "calibration": "of/our/engine"} | SIZED, {}, {}, 2, False),
    ],
)
def test_sweeps_of_the_old_sizing_are_marked(
    config: dict[str, Any], base: dict[str, Any], varied: dict[str, Any], format: int, marked: bool
) -> None:
    """Up to format 2, a GPU whose blocks and share of memory nobody stated had the 4,095 blocks of our own engine."""
    runs = pa.Table.from_pylist([{"status": "complete", "config": json.dumps(config), **varied}])
    found = SweepResults(runs, tuple(varied), dict.fromkeys(varied, BLOCKS), {}, base, format)
    assert ("old sizing, 4,095 KV blocks" in found.old_sizing) == marked
    assert (found.old_sizing in {line.text for line in found.report() if isinstance(line, Line)}) == marked
