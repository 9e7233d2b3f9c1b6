"""The times of adapters against vLLM's own: measurements that Agullo et al. published (arXiv 2508.08343).

Their repository (GPULLMAdapterOptimization, `digital_twin_dynamic/estimators`) has runs of vLLM 0.8.5 on an H100
with 64 GB. The constants were fitted to Llama; Qwen was held out.
"""

import pytest
import yaml

from tokentwin.calibration.adapter_fit import SPREAD, fitted_times
from tokentwin.calibration.validation.external.schedule import schedule
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.adapter_times import AdapterTimes
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.traces.synth import parse_spec, synthesise

LLAMA, QWEN = "Llama-3.1-8B", "Qwen2.5-7B"
H100_64G = find_gpu("H100").model_copy(update={"memory_bytes_per_s": 2.0e12})
MS = 1e6


def times(model: str, slots: int, rank: int, **more: object) -> AdapterTimes:
    deployment = Deployment(model=model, lora={"max_loras": slots, "max_lora_rank": rank, **more})
    found = fitted_times(find_model(model), H100_64G, deployment)
    assert found is not None
    return found


# model, requests at once, median ITL in ms without LoRA, and with 300 slots of rank 8 by adapters of the requests
DECODES = [
    (LLAMA, 220, 16.99, {1: 35.35, 32: 45.15, 64: 54.78, 96: 62.81, 128: 69.30, 192: 79.36, 256: 84.52, 300: 87.09}),
    (QWEN, 250, 19.58, {1: 36.10, 32: 46.24, 64: 56.16, 96: 64.22, 128: 71.58, 192: 82.96, 256: 88.88, 300: 93.40}),
]


@pytest.mark.parametrize(("model", "rows", "plain_ms", "itl_ms"), DECODES)
def test_decode_steps_are_as_long_as_measured(model, rows, plain_ms, itl_ms):
    for adapters, measured in itl_ms.items():
        # each request chose one of them at random; the mean number of different ones in a step
        present = round(adapters * (1 - (1 - 1 / adapters) ** rows))
        chosen = {str(at): rows // present + (at < rows % present) for at in range(present)}
        added_ms = times(model, 300, 8).added_ns(chosen, rows) / MS
        assert plain_ms + added_ms == pytest.approx(measured, rel=0.04 if model == LLAMA else 0.1), adapters


# output tokens per second of 220 clients by number of adapters, Llama with 300 slots of rank 8
THROUGHPUT = {0: 11_091, 1: 5_612, 128: 2_977}


def test_runs_are_as_fast_as_measured(tmp_path):
    gpu = tmp_path / "gpu.yaml"
    gpu.write_text(yaml.safe_dump({"H100-64G": H100_64G.model_dump(mode="json", exclude={"name"}, exclude_none=True)}))
    scheduler = {"max_num_seqs": 220, "max_model_len": 2048, "enable_prefix_caching": False, "async_scheduling": False}
    for adapters, measured in THROUGHPUT.items():
        sent = {
            "seed": 1,
            "requests": 880,
            "arrivals": {"kind": "closed", "concurrency": 220},
            "prompt": 5,
            "output": 100,
        }
        given = {"model": LLAMA, "device": "cuda", "gpu_memory_utilization": 0.9, "scheduler": scheduler}
        if adapters:
            sent["adapters"] = {"count": adapters, "exponent": 0.0}
            given["lora"] = {"max_loras": 300, "max_lora_rank": 8, "load_ms": 0}
        made = price_scenario(synthesise(parse_spec(sent)), None, str(gpu), Deployment.model_validate(given))
        _, metrics = made.measured({})
        assert metrics.scalars()["output_throughput"] == pytest.approx(measured, rel=0.07), adapters


def test_the_measurement_that_a_plan_asks_for_needs_no_adapters():
    deployment = Deployment(model=LLAMA, lora={"max_loras": 2})
    sent = {"seed": 1, "requests": 4, "arrivals": {"kind": "closed", "concurrency": 2}, "prompt": 50, "output": 10}
    plain = synthesise(parse_spec(sent))
    assert schedule(plain, deployment) == schedule(plain, Deployment(model=LLAMA))


@pytest.mark.parametrize(("model", "longer_ms"), [(LLAMA, 18.84 - 12.98), (QWEN, 17.64 - 12.46)])
def test_unused_slots_take_time(model, longer_ms):
    """One request alone, with 8 and with 256 slots."""
    few, many = (times(model, slots, 8).added_ns({"a": 1}, 1) / MS for slots in (8, 256))
    assert many - few == pytest.approx(longer_ms, rel=0.05)


@pytest.mark.parametrize(("model", "longer_ms"), [(LLAMA, 15.99 - 15.07), (QWEN, 15.06 - 14.26)])
def test_higher_ranks_take_time(model, longer_ms):
    """One request alone, with 96 slots of ranks 8 and 32."""
    low, high = (times(model, 96, rank).added_ns({"a": 1}, 1) / MS for rank in (8, 32))
    assert high - low == pytest.approx(longer_ms, rel=0.2)


# ms to load from disk and to copy into a slot, by rank
LOADS = {8: (69.7, 6.61), 16: (92.5, 6.38), 32: (141.4, 6.37)}


def test_loads_take_as_long_as_measured():
    for rank, (load_ms, copy_ms) in LOADS.items():
        found = times(LLAMA, 1, rank)
        assert found.load_ns / MS == pytest.approx(load_ms, rel=0.05)
        assert copy_ms / SPREAD < found.copy_ns / MS < copy_ms * SPREAD
    assert times(LLAMA, 1, 8, load_ms=12.5).load_ns == 12.5 * MS


def test_fewer_modules_take_less_time():
    whole, part = times(LLAMA, 4, 16), times(LLAMA, 4, 16, target_modules=["qkv_proj", "o_proj"])
    assert part.step_ns == whole.step_ns / 2  # two of four GEMMs
    assert all(less < more for less, more in zip(part, whole, strict=True))


def test_what_is_not_known_is_refused():
    with pytest.raises(UserError, match="not known for models with experts"):
        times("Mixtral-8x7B", 1, 16)
