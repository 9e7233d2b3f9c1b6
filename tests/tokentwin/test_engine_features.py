"""What the engine can do through the whole loop: recorded, calibrated, decided again, simulated, and compared."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="tiny models are made with it; install the dev extra")

from tests.realengine import packed_checkpoints, tiny_models
from tests.realengine.test_structured_output import folder  # noqa: F401
from tokentwin import api
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.weights import load_model_files
from tokentwin.realengine.replay import record
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.kv_tiers import KvTier, KvTiersConfig
from tokentwin.serving.workload import Segment, Workload, WorkloadRequest
from tokentwin.traces.recording import Recording

pytestmark = pytest.mark.engine

REQUESTS = 24  # a hundred steps are the least to calibrate by, and drafts save some
DRAFTS = {"speculative": {"model": "random:qwen3", "num_speculative_tokens": 3}}
HOST = KvTiersConfig(tiers=(KvTier(name="cpu", capacity_gib=0.01, read_gb_s=10, write_gb_s=10),))


def user(n: int) -> tuple[Segment, ...]:
    """Return a user's prompt: own words, or words of the answer to the request before, seldom ended by then."""
    words = (f"u{n % 5}", 5 + 4 * (n % 5))
    return ((f"out:{n - 1}", 16), words) if n % 3 == 2 else (words,)


def named(n: int) -> str:
    return f"a{n % 5}" if n % 3 else ""


@pytest.mark.parametrize(
    ("feature", "column"),
    [
        ("windows", None),
        ("weights in 4 bits", None),
        ("draft model", "draft_tokens"),
        ("KV in host memory", "kv_transfers"),
        ("structured output", "masked_rows"),
        ("adapters", "adapters"),
    ],
)
def test_a_feature_is_recorded_calibrated_simulated_and_validated(feature, column, tmp_path, request):
    model, kv_tiers, lora, settings = "random:llama", None, None, {}
    if feature == "windows":
        model = str(tmp_path / "model")
        tiny_models.save("mistral", tmp_path / "model", {"sliding_window": 9})
    elif feature == "weights in 4 bits":
        model = str(tmp_path / "awq")
        tiny_models.save("qwen2", tmp_path / "plain")
        packed_checkpoints.write(tmp_path / "plain", tmp_path / "awq", tmp_path / "dense", "awq")
    elif feature == "adapters":
        lora = {"max_loras": 2, "adapters": "random:8"}
    elif feature == "structured output":
        model = str(request.getfixturevalue("folder"))
    elif feature == "draft model":
        settings = DRAFTS
    else:
        kv_tiers, settings = HOST, {"num_blocks": 40, "scheduler_reserve_full_isl": False}
    usual: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 128, "num_blocks": 120}
    config = SchedulerConfig(**{**usual, "block_size": 4, **settings})
    deployment = Deployment(model=model, dtype="float32", scheduler=config, kv_tiers=kv_tiers, lora=lora)
    draft = load_model_files("random:qwen3", Path()) if feature == "draft model" else None
    engine = Engine(deployment, load_model_files(model, Path()), draft)
    structured = feature == "structured output"
    asked = [
        WorkloadRequest(
            n, n * 10**7, (("system", 8), *user(n)), 20 + n, structured=structured, adapter=named(n) if lora else ""
        )
        for n in range(REQUESTS)
    ]
    record(Workload(asked, feature), engine, tmp_path / "real")
    if feature == "draft model":  # what was quoted before it was said is no part of the answer
        sent = Recording.load(tmp_path / "real").workload().requests
        assert any(name.startswith("unsaid:out:") for one in sent for name, _ in one.prompt)
    if column is not None:
        assert Recording.load(tmp_path / "real").filled("steps", [column])
    api.calibrate(out=tmp_path / "calibration", recordings=[tmp_path / "real"])
    report = api.validate([tmp_path / "real"], tmp_path / "calibration", tmp_path / "report")
    assert report.rungs.replay is not None and report.rungs.replay.exact
    assert {row.metric for row in report.rungs.run.rows} >= {"ttft_ms", "tpot_ms", "e2e_ms"}
    simulated = Recording.load(tmp_path / "report" / "simulated")
    assert sorted(simulated.requests["output_tokens"].to_pylist()) == [20 + n for n in range(REQUESTS)]
    if column in ("draft_tokens", "masked_rows"):
        assert simulated.filled("steps", [column])
    if lora:
        load_ps = Calibration.load(tmp_path / "calibration").cpu_prices_ps["adapter_loads"]
        loads = [one for one in Recording.load(tmp_path / "real").steps["adapters"].to_pylist() if one]
        assert load_ps == pytest.approx(1000 * sum(x["load_ns"] for x in loads) / sum(x["loads"] for x in loads), abs=1)
