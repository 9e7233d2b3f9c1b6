"""One description of a deployment resolves to the same settings and KV blocks, whichever way it comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.planning.sweep_samples import SCHEDULER, calibrated
from tokentwin.calibration.steps import external_calibration
from tokentwin.calibration.steps.measured_runs import MeasuredRuns
from tokentwin.dashboard.deployment_text import keep_deployment, kept_deployment
from tokentwin.planning.compare.request import Side
from tokentwin.planning.compare.runs import side_scenarios
from tokentwin.planning.deployments import read_deployment
from tokentwin.planning.plan.pricing import priced_candidates
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.planning.resolution import base_deployment, resolved, resolved_fleet
from tokentwin.planning.scenario import Scenario
from tokentwin.planning.sweep.settings import read_sweep
from tokentwin.planning.sweep.sweep import Sweep
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.gpu_spec import find_gpu, gpus
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload

TRAFFIC: dict[str, Any] = {
    "requests": 3,
    "arrivals": {"kind": "poisson", "rate": 5},
    "prompt": {"kind": "fixed", "tokens": 50},
    "output": {"kind": "fixed", "tokens": 5},
}
MODELS = ("Llama-3.1-8B", "gpt-oss-20b", "Qwen3-Next-80B-A3B", "Llama-3.1-70B")
Described = tuple[dict[str, Any], str]
Timed = dict[str, str]  # the GPU or the calibration that times the steps


class NoTime:
    """A cost model that is never asked for the time of a step."""

    def with_shared_prefix(self, tokens: int) -> NoTime:
        return self


@st.composite
def descriptions(draw: st.DrawFn, names: tuple[str, ...]) -> Described:
    """Draw the stated settings of a deployment, and a GPU."""
    scheduler = {
        "max_num_seqs": st.integers(1, 2000),
        "max_num_batched_tokens": st.integers(256, 20_000),
        "max_model_len": st.integers(512, 8192),
        "num_blocks": st.integers(600, 60_000),
        "block_size": st.sampled_from([16, 32]),
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
    }
    settings = {
        "model": st.sampled_from(names),
        "device": st.just("cuda"),
        "tensor_parallel_size": st.sampled_from([1, 2, 4]),
        "gpu_memory_utilization": st.floats(0.5, 0.95),
        "quantization": st.sampled_from(["none", "fp8"]),
        "policy": st.sampled_from(["vllm", "sglang", "sarathi", "fair"]),
        "scheduler": st.fixed_dictionaries({}, optional=scheduler),
    }
    return draw(st.fixed_dictionaries({}, optional=settings)), draw(st.sampled_from(sorted(gpus())))


def of_python(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    return parse(Scenario, {"deployment": stated, "workload": TRAFFIC, **by}, "simulate").priced().deployment


def of_a_file(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    (folder / "deployment.yaml").write_text(yaml.safe_dump(stated))
    made = read_deployment(str(folder / "deployment.yaml"), {}, base_deployment(by.get("calibration")))
    return of_python(made.as_stated(), by, folder)


def of_flags(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    flags = stated | stated.get("scheduler", {})
    rest = {name: value for name, value in stated.get("scheduler", {}).items() if name == "enable_prefix_caching"}
    (folder / "rest.yaml").write_text(yaml.safe_dump({"scheduler": rest}))
    if flags.keys() >= {"num_blocks", "gpu_memory_utilization"}:  # flags refuse both; in a file, blocks count
        del flags["gpu_memory_utilization"]
    made = read_deployment(str(folder / "rest.yaml"), flags, base_deployment(by.get("calibration")))
    return of_python(made.as_stated(), by, folder)


def of_a_twin(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    (folder / "twin.yaml").write_text(yaml.safe_dump(stated))
    calibration, gpu = by.get("calibration"), by.get("gpu")
    made = read_deployment(str(folder / "twin.yaml"), {}, base_deployment(calibration))
    whole, _ = resolved_fleet(made, calibration, gpu)
    return price_scenario(Workload(()), calibration, gpu, whole).deployment


def of_compare(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    side = parse(Side, {"deployment": stated}, "a")
    again = parse(Side, json.loads(json.dumps(side.as_json())), "a")
    calibration, gpu = by.get("calibration"), by.get("gpu")
    deployed = again.deployed(base_deployment(calibration))
    return side_scenarios([Workload(())], calibration, gpu, deployed)[0].deployment


def of_a_sweep(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    (point,) = Sweep.from_settings(read_sweep({"base": {"deployment": stated, "workload": TRAFFIC, **by}})).points
    scenario = Scenario.model_validate(json.loads(json.dumps(point.scenario)))
    return scenario.priced(whole=scenario.deployment).deployment


def of_the_page(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    kept = kept_deployment(folder, keep_deployment(folder, yaml.safe_dump(stated)))
    assert kept is not None
    return of_compare(kept, by, folder)


def of_a_plan(stated: dict[str, Any], by: Timed, folder: Path) -> Deployment:
    """A plan makes room for its longest request, so only a stated length can be the same."""
    source = {"gpus": [by["gpu"]]} if "gpu" in by else {"prices": {"cpu": 1}}
    asked = {"traffic": TRAFFIC, "slos": ["ttft_ms p99<=500"], "deployment": stated, **by, **source}
    asked.pop("gpu", None)
    (engine,) = priced_candidates(parse(PlanRequest, asked, "plan"), Workload(())).engines or [None]
    if engine is None:
        raise UserError("gpu", by["gpu"], "rules it out")
    return engine.deployment.model_copy(update={"gpu_memory_utilization": None})


WAYS: tuple[Callable[[dict[str, Any], Timed, Path], Deployment], ...] = (
    of_a_file,
    of_flags,
    of_a_twin,
    of_compare,
    of_a_sweep,
    of_the_page,
    of_a_plan,
)


@examples(2)
@given(descriptions(MODELS))
def test_every_way_gives_the_same_deployment(described: Described) -> None:
    stated, gpu = described
    ways = WAYS if "max_model_len" in stated.get("scheduler", {}) else WAYS[:-1]
    with TemporaryDirectory() as name, patch.object(external_calibration, "predicted_cost", lambda *_: NoTime()):
        try:
            expected = of_python(stated, {"gpu": gpu}, Path(name))
        except UserError:
            for way in ways:
                with pytest.raises(UserError):
                    way(stated, {"gpu": gpu}, Path(name))
            return
        for way in ways:
            assert_same(way(stated, {"gpu": gpu}, Path(name)), expected, way)


@pytest.mark.parametrize("way", [of_python, *WAYS])
def test_edf_needs_its_bounds_on_every_way(
    way: Callable[[dict[str, Any], Timed, Path], Deployment], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="edf_ttft_ms: is missing; policy edf needs TTFT bounds"):
        way({"policy": "edf"}, {"gpu": "H100"}, tmp_path)


def assert_same(made: Deployment, expected: Deployment, way: Callable[..., Deployment]) -> None:
    assert made.model_copy(update={"fleet": expected.fleet}) == expected, way.__name__


def outcome(pools: Callable[[], PricedScenario]) -> list[Deployment] | str:
    """Return the deployment of each pool, or the refusal."""
    try:
        return [pool.deployment.model_copy(update={"fleet": None}) for pool in pools().all_pools]
    except UserError as error:
        return error.remedy


@examples(4)
@given(descriptions(MODELS), descriptions(MODELS))
def test_a_sweep_simulates_the_pools_of_a_fleet_as_they_are(described: Described, pool: Described) -> None:
    (stated, gpu), (own, other) = described, pool
    pools = [{"name": "a", "replicas": 2}, {"name": "b", "gpu": other, "deployment": own}]
    run = {"deployment": stated | {"fleet": {"pools": pools}}, "gpu": gpu, "workload": TRAFFIC}

    def swept() -> PricedScenario:
        (point,) = Sweep.from_settings(read_sweep({"base": run})).points
        scenario = Scenario.model_validate(json.loads(json.dumps(point.scenario)))
        return scenario.priced(whole=scenario.deployment)

    with patch.object(external_calibration, "predicted_cost", lambda *_: NoTime()):
        assert outcome(swept) == outcome(lambda: parse(Scenario, run, "simulate").priced())


@pytest.mark.parametrize("stated", [{}, {"policy": "fair", "scheduler": {"max_num_seqs": 8}}])
def test_a_calibration_supplies_what_is_not_stated(stated: dict[str, Any], tmp_path: Path) -> None:
    by = {"calibration": str(calibrated(tmp_path))}
    expected = of_python(stated, by, tmp_path)
    assert expected.scheduler.num_blocks == SCHEDULER.num_blocks
    assert expected.scheduler.max_num_seqs == stated.get("scheduler", {}).get("max_num_seqs", SCHEDULER.max_num_seqs)
    for way in WAYS:
        assert_same(way(stated, by, tmp_path), expected, way)


CALIBRATED: dict[str, Any] = {"model": "Llama-3.1-8B", "device": "cuda", "quantization": "fp8"}
LIMITS = {"max_num_seqs": 7, "max_model_len": 4096}


@pytest.mark.parametrize(
    ("changed", "gpu", "blocks"),
    [
        ({}, "H100", 9000),
        ({"policy": "fair", "scheduler": {"max_num_batched_tokens": 512}}, "H100", 9000),
        ({}, "H200", None),
        ({"model": "Llama-3.2-1B"}, "H100", None),
        ({"quantization": "none"}, "H100", None),
        ({"kv_cache_dtype": "fp8"}, "H100", None),
        ({"tensor_parallel_size": 4}, "H100", None),
        ({"pipeline_parallel_size": 2}, "H100", None),
        ({"scheduler": {"block_size": 32}}, "H100", None),
        ({"gpu_memory_utilization": 0.9}, "H100", None),
    ],
)
def test_a_calibration_supplies_quantization_to_its_model_and_blocks_to_its_memory(
    changed: dict[str, Any], gpu: str, blocks: int | None, tmp_path: Path
) -> None:
    learnt = json.dumps(CALIBRATED | {"scheduler": LIMITS | {"num_blocks": 9000}})
    MeasuredRuns("H100", learnt, (), (), "", "").save(tmp_path)
    own = {} if "model" in changed else {"quantization": "fp8"}
    alone: dict[str, Any] = {**CALIBRATED, "quantization": "none", **own, "gpu_memory_utilization": 0.9, **changed}
    alone["scheduler"] = LIMITS | changed.get("scheduler", {}) | ({"num_blocks": blocks} if blocks else {})
    stated = changed | {"scheduler": {"max_model_len": 4096} | changed.get("scheduler", {})}
    fleet = {"fleet": {"pools": [{"name": "pool", "deployment": changed, "gpu": gpu}]}}
    with patch.object(external_calibration, "predicted_cost", lambda *_: NoTime()):
        expected = of_python(alone, {"gpu": gpu}, tmp_path)
        for way in WAYS:
            assert_same(way(stated, {"calibration": str(tmp_path), "gpu": gpu}, tmp_path), expected, way)
        whole, _ = resolved_fleet(parse(Scenario, {"deployment": fleet, "calibration": str(tmp_path),
                                  "workload": TRAFFIC}, "simulate").described(), str(tmp_path), None)  # fmt: skip
        for deployment in (parse(Deployment, fleet, "d"), whole):  # also as a sweep has it
            run = {"deployment": deployment.as_stated(), "calibration": str(tmp_path), "workload": TRAFFIC}
            (pool,) = parse(Scenario, run, "simulate").priced().all_pools
            assert_same(pool.deployment, expected, way)


@examples(5)
@given(descriptions(tuple(models())))
def test_a_resolved_deployment_resolves_to_itself(described: Described) -> None:
    """Also after it was written as JSON, as the configuration of a sweep's run is."""
    stated, gpu = described
    try:
        made, _ = resolved(parse(Deployment, stated, "deployment"), find_gpu(gpu))
    except UserError:
        return
    again = parse(Deployment, json.loads(made.model_dump_json()), "deployment")
    assert resolved(again, find_gpu(gpu)) == (made, "")
