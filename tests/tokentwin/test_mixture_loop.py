"""A mixture of experts through the whole loop: recorded, calibrated, simulated; its load beside what is assumed."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from tokentwin import api
from tokentwin.calibration.expert_routing import experts_touched
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.weights import load_model_files
from tokentwin.realengine.replay import record
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.recording import Recording

pytestmark = pytest.mark.engine


def test_what_experts_got_is_recorded_and_held_against_the_assumption(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_blocks=60)
    deployment = Deployment(model="random:qwen2-moe", dtype="float32", quantization="int4", scheduler=scheduler)
    engine = Engine(deployment, load_model_files(deployment.model, Path()))
    asked = [WorkloadRequest(n, n * 10**7, (("", 5 + 7 * (n % 9)),), 20 + n) for n in range(18)]
    record(Workload(asked, "mixture"), engine, tmp_path / "real")
    api.calibrate(out=tmp_path / "calibration", recordings=[tmp_path / "real"])
    report = api.validate([tmp_path / "real"], tmp_path / "calibration", tmp_path / "report")
    assert report.rungs.replay is not None and report.rungs.replay.exact
    simulated = Recording.load(tmp_path / "report" / "simulated").steps
    assert simulated["experts_hit"].null_count == len(simulated)

    real = Recording.load(tmp_path / "real").steps
    tokens = np.add(real["prefill_tokens"], real["decode_rows"])
    hit = real["experts_hit"].to_numpy()
    assert (hit >= 4).all() and (hit <= np.minimum(16, 4 * tokens)).all()
    assert (hit[tokens == 1] == 4).all() and (tokens == 1).any()
    found = report.rungs.experts
    assert found is not None and (found.steps, found.experts, found.topk) == (len(real), 16, 4)
    assert found.hit == pytest.approx(hit.mean())
    assert found.hit_even == pytest.approx(experts_touched(16, 4, tokens).mean())
    load = np.array(real["expert_tokens"].to_pylist())
    assert (load.sum(axis=1) == 4 * tokens * engine.spec.moe_layers).all() and load.shape[1] == 16
    assert found.busiest == pytest.approx(load.sum(axis=0).max() / load.sum(axis=0).mean())
    assert [load.devices for load in found.devices] == [2, 4, 8, 16]
    for load in found.devices:
        measured = [dict(step)[load.devices] for step in real["expert_imbalance"].to_pylist()]
        assert load.imbalance == pytest.approx(np.average(measured, weights=tokens))
        assert load.imbalance_random is not None and 1 < load.imbalance_random < load.devices
