"""MFU and MBU: the work of a step against the operations that the cost model has of it, and against its GPU."""

import json

import numpy as np
import pytest

from tests.traces.test_run_metrics import MS, finished, requests_table, steps_table
from tokentwin.calibration.operations import Collective, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.step_plan import AGGREGATES
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.step_metrics import StepWork
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter


def run(deployment: Deployment, **changes) -> dict:
    usual = {"clock": "virtual", "notes": '{"gpu": "H100"}', "hardware": "", "deployment": deployment.model_dump_json()}
    return usual | changes


def row_of(sizes) -> dict:
    return {name: int(getattr(sizes, name)) for name in AGGREGATES}


@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Qwen3-30B-A3B", "Gemma-2-9B", "gpt-oss-120b", "DeepSeek-V3"])
@pytest.mark.parametrize("step", [(256, 6000, 0, 0, 0), (0, 0, 4, 2048, 0), (64, 512, 1, 1024, 9000)])
def test_work_is_that_of_the_operations(model: str, step: tuple[int, ...]) -> None:
    """Kernels do at least the model's work; decode over latent vectors multiplies far more, to read less."""
    deployment = Deployment(model=model, tensor_parallel_size=2)
    sizes = uniform_step(*step)
    work, table = StepWork.from_run(run(deployment)), steps_table([row_of(sizes)])
    assert work is not None
    operations = [o for o in step_operations(find_model(model), deployment, sizes) if not isinstance(o, Collective)]
    flops, moved = (2 * sum(float(o.count * getattr(o, unit)) for o in operations) for unit in ("flops", "bytes"))
    latent = 8 if model == "DeepSeek-V3" and sizes.decode_rows else 1
    assert 0.95 < flops / work.flops(table)[0] < 1.1 * latent
    assert moved > 0.95 * work.moved_bytes(table)[0]
    assert sizes.prefill_tokens or moved < 1.6 * work.moved_bytes(table)[0]  # prompts also move activations


def test_a_run_uses_what_its_steps_use_of_the_time_and_gpus_there_were(tmp_path, monkeypatch) -> None:
    deployment = Deployment(model="Llama-3.1-8B", tensor_parallel_size=4)
    step = row_of(uniform_step(64, 1000, 0, 0, 0)) | {"replica": 0, "waiting": 0, "used_blocks": 1, "waiting_blocks": 0}
    rows = [step | {"start_ns": at * MS, "end_ns": (at + 10) * MS, "running": 64} for at in (0, 20)]
    steps, work = steps_table(rows), StepWork.from_run(run(deployment))
    assert work is not None
    requests = requests_table([finished(0, 0, 10, 40, 2)])
    m = RunMetrics(requests, steps, {"replicas": 2}, work=work)
    gpu, model = find_gpu("H100"), find_model("Llama-3.1-8B")
    matrices = model.parameters - model.vocab_size * model.hidden_size  # all weights but the embedding's
    flops = 64 * (2 * matrices + 4 * 32 * 128 * 32 * 1001)
    moved = 2 * matrices + 64 * 1001 * model.kv_bytes_per_token(2)
    assert m.values("mfu") == pytest.approx(flops / (0.01 * 4 * gpu.bf16_flop_per_s), rel=1e-3)
    assert m.values("mbu") == pytest.approx(moved / (0.01 * 4 * gpu.memory_bytes_per_s), rel=1e-3)
    assert m.scalars()["mfu"] == pytest.approx(m.values("mfu").sum() * 10 / 40 / 2)
    with RecordingWriter(tmp_path / "run", {"clock": "virtual", "deployment": "{}"}) as writer:
        writer.add_steps({name: steps[name].combine_chunks() for name in steps.column_names})
        writer.add_requests({name: requests[name].combine_chunks() for name in requests.column_names})
    recording = Recording(tmp_path / "run")
    monkeypatch.setattr("tokentwin.traces.metrics.step_metrics._PIECE", 1)
    read = RunMetrics(recording, run={"replicas": 2}, work=work)
    for pieces in (read, RunMetrics(requests, steps, {"replicas": 2}, work=work)):
        assert pieces.values("mbu") == pytest.approx(m.values("mbu"))
        assert pieces.scalars() == pytest.approx(m.scalars(), nan_ok=True)
    assert np.isnan(RunMetrics(requests, steps).values("mbu")).all()
    assert RunMetrics(requests, steps).scalars()["mfu"] is None


def test_the_peak_is_that_of_the_gpu_that_is_named_or_stated() -> None:
    deployment = Deployment(model="Llama-3.1-8B")

    def peak(gpu: str) -> float | None:
        work = StepWork.from_run(run(deployment, clock="wall", hardware=json.dumps({"gpu": gpu})))
        return work and work.bytes_per_s

    devices = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H200": "H200"}
    devices |= {"NVIDIA A100-SXM4-40GB": "A100-40G", "NVIDIA L4": "L4", "NVIDIA GeForce RTX 4090": "RTX-4090"}
    for device, name in devices.items():
        assert peak(device) == find_gpu(name).memory_bytes_per_s
    assert peak("NVIDIA L40") is None and peak("") is None
    cpu = run(Deployment(), clock="wall", hardware='{"cpu": "AMD EPYC"}')
    assert StepWork.from_run(cpu) is None
    stated = StepWork.from_run(cpu, find_gpu("L4"))
    assert stated is not None and stated.bytes_per_s == find_gpu("L4").memory_bytes_per_s
    assert StepWork.from_run(run(Deployment(model="random:llama"))) is None  # a model that is not catalogued
    mixed = {"pools": [{"name": "a"}, {"name": "b", "gpu": "H200"}]}
    assert StepWork.from_run(run(Deployment.model_validate({"model": "Llama-3.1-8B", "fleet": mixed}))) is None


def test_no_steps_have_no_work() -> None:
    work = StepWork.from_run(run(Deployment(model="Llama-3.1-8B")))
    assert work is not None and len(work.flops(steps_table([]))) == len(work.moved_bytes(steps_table([]))) == 0
