"""Every command that simulates a GPU takes the same settings from its engine where nobody states them, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokentwin
from lab.claims.claim import Experiment
from tests import command
from tokentwin.planning.compare.comparer import compare
from tokentwin.planning.compare.request import CompareRequest
from tokentwin.planning.costs import priced
from tokentwin.planning.deployments import served, with_settings
from tokentwin.planning.plan.planner import plan
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.planning.resolution import resolved_fleet
from tokentwin.planning.sweep.settings import SweepSettings
from tokentwin.planning.sweep.sweep import Sweep
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.workload import Workload

H100 = (1024, 8192, True)
L40S = (256, 2048, True)
LIMITS = "defaults of vllm 0.33 on H100: max_num_seqs 1,024, max_num_batched_tokens 8,192, async_scheduling true"
TOLD = f"{LIMITS}, max_model_len 131,072"
TRAFFIC: dict[str, Any] = {
    "requests": 5,
    "arrivals": {"kind": "poisson", "rate": 5},
    "prompt": {"kind": "fixed", "tokens": 50},
    "output": {"kind": "fixed", "tokens": 5},
}
MODEL = {"model": "Llama-3.1-8B", "device": "cuda", "gpu_memory_utilization": 0.9}


def settings(scheduler: Any) -> tuple[Any, ...]:
    data = scheduler if isinstance(scheduler, dict) else scheduler.model_dump()
    return data["max_num_seqs"], data["max_num_batched_tokens"], data["async_scheduling"]


def sweep(deployment: dict[str, Any], **more: Any) -> Sweep:
    base = {"deployment": deployment, "gpu": "H100", "workload": TRAFFIC}
    return Sweep.from_settings(parse(SweepSettings, {"base": base, **more}, where="sweep"))


def test_simulate(tmp_path: Path) -> None:
    made = tokentwin.simulate(TRAFFIC, gpu="H100", out=tmp_path / "run", band=False)
    assert settings(json.loads(made.recording.run["deployment"])["scheduler"]) == H100
    assert made.defaults == (TOLD,)
    again = tokentwin.simulate(TRAFFIC, json.loads(made.recording.run["deployment"]), gpu="H100", band=False)
    assert again.defaults == ()


def test_plan() -> None:
    request = {"traffic": TRAFFIC, "slos": ["ttft_ms p99<=500"], "gpus": ["H100", "L40S"]}
    found = plan(parse(PlanRequest, request, where="plan"), jobs=1, surroundings=False)
    by_gpu = {one.gpu: settings(one.deployment["scheduler"]) for one in found.candidates.values()}
    assert by_gpu == {"H100": H100, "L40S": L40S}
    assert found.candidates["TP1 H100"].defaults == LIMITS  # a plan makes room for its longest request


def test_compare() -> None:
    asked = {"a": {}, "b": {"gpu": "L40S"}, "traffic": TRAFFIC, "timing": {"gpu": "H100"}}
    found = compare(parse(CompareRequest, asked, where="compare"))
    assert [settings(side.deployment.scheduler) for side in (found.a, found.b)] == [H100, L40S]
    assert found.a.defaults == (TOLD,)


def test_a_setting_of_one_side_states_no_other() -> None:
    made = with_settings(served(), {"policy": "fair", "max_num_seqs": 64})
    assert settings(priced(None, "H100", made).deployment.scheduler) == (64, 8192, True)


def test_sweep() -> None:
    found = sweep(MODEL, grid={"gpu": ["H100", "L40S"]})
    assert [settings(point.config["deployment"]["scheduler"]) for point in found.points] == [H100, L40S]
    assert found.defaults[0] == TOLD
    assert len(found.defaults) == 2


def test_claims_and_what_a_step_costs() -> None:
    assert settings(parse(Experiment, {"figure": "kernels"}, where="claim").serves.scheduler) == H100
    explained = json.loads(command.tokentwin("explain", "--gpu", "H100", "--format", "json").stdout)
    assert explained["defaults"] == TOLD


def test_each_pool_of_a_fleet_has_the_defaults_of_its_own_gpu() -> None:
    pools = [{"name": "large"}, {"name": "small", "gpu": "L40S"}]
    stated = parse(Deployment, {**MODEL, "fleet": {"pools": pools}}, where="deployment")
    whole, lines = resolved_fleet(stated, None, "H100")
    assert settings(whole.scheduler) == H100
    assert whole.fleet is not None
    own = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "num_blocks": 12_113}
    assert whole.fleet.pools[1].deployment == {"scheduler": own}
    assert [line.split(":")[0] for line in lines] == ["defaults of vllm 0.33 on H100", "defaults of vllm 0.33 on L40S"]
    priced_pools = pools_of(stated), pools_of(whole)
    assert priced_pools[0] == priced_pools[1] == [H100, L40S]


def pools_of(deployment: Deployment) -> list[tuple[Any, ...]]:
    scenario = price_scenario(Workload(()), None, "H100", deployment)
    return [settings(pool.deployment.scheduler) for pool in scenario.all_pools]


def test_our_own_engine_keeps_its_small_limits() -> None:
    """Only what a GPU's kernel tables time has an engine's defaults."""
    assert settings(Deployment().scheduler) == (128, 2048, False)
