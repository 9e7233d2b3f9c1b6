"""Several vLLMs behind our router: every step of each, and every choice of the router, is made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.vllm.environment import needs_vllm
from tests.vllm.tiny_model import TINY
from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.planning.measure.engine_fleet import EngineFleet
from tokentwin.planning.measure.vllm_process import VllmProcess
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.fleet import RouterConfig
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise

pytestmark = [pytest.mark.deep, pytest.mark.vllm, needs_vllm]

SCHEDULER = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 384, "num_blocks": 13, "block_size": 32,
}  # fmt: skip


def traffic() -> Workload:
    """Return requests with three system prompts; some clients hang up.

    The requests come almost at once, so that a machine of any speed has to preempt.
    """
    spec = {
        "name": "x",
        "seed": 3,
        "requests": 60,
        "arrivals": {"kind": "poisson", "rate": 100_000},
        "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.8, "max": 200},
        "output": {"kind": "lognormal", "mean": 12, "sigma": 0.8, "max": 60},
        "system_prompts": {"count": 3, "tokens": {"kind": "fixed", "tokens": 64}},
    }
    made = synthesise(parse_spec(spec, where="x"))
    return replace(
        made, requests=[replace(r, cancel_ns=r.arrival_ns + 20_000_000) if r.id % 9 == 0 else r for r in made.requests]
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    stated = {"model": str(folder), "engine": "vllm", "dtype": "float32", "scheduler": SCHEDULER}
    of_two = {"fleet": {"pools": [{"name": "all", "replicas": 2}]}}
    made = EngineFleet(parse(Deployment, stated | of_two, where="test"), VllmProcess)
    made.warm_up()
    yield made
    made.close()


@pytest.mark.parametrize("router", ["least-tokens", "kv-aware", "prefix-affinity"])
@pytest.mark.timeout(600)
def test_every_decision_is_made_again(
    router: str, fleet: EngineFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = fleet.deployment.fleet
    assert alone is not None
    routed = alone.model_copy(update={"router": RouterConfig(name=router)})
    monkeypatch.setattr(fleet, "deployment", fleet.deployment.model_copy(update={"fleet": routed}))
    done = fleet.record(traffic(), tmp_path / "run")
    assert done.status == "complete"
    recording = Recording.load(tmp_path / "run")
    result = replay_decisions(recording)
    assert result.exact and result.identical_routes == 60, result
    assert set(recording.requests["replica"].to_pylist()) == {0, 1}
    assert sum(recording.steps["preempted"].to_pylist()) > 0
    assert "cancelled" in recording.requests["status"].to_pylist()
    assert not recording.steps["speed"].null_count
