"""The predicted times and memory of vision towers, against what was published of vLLM."""

import pytest

from tokentwin.calibration.vision_tower import SPREAD, TowerTimes, tower_operations
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.multimodal import MultimodalConfig, find_tower, towers
from tokentwin.serving.encoder_times import encoder_times
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Item, Workload, WorkloadRequest

QWEN = "Qwen2.5-VL-7B"


def deployment(**more):
    given = {"multimodal": {}, "device": "cuda", "gpu_memory_utilization": 0.9, **more}
    return Deployment(model=QWEN, **given)


def times(**more):
    scenario = price_scenario(Workload(()), None, "H100", deployment(**more))
    return encoder_times(scenario.cost)


def image(tokens, frames=1, kind="image"):
    return Item(0, tokens, "", kind, frames)


# billions of parameters: with the tower, and of the text model alone, as published on Hugging Face
PUBLISHED = {
    "Qwen2-VL-7B": (8.29, "Qwen2-7B"),
    "Qwen2.5-VL-7B": (8.29, "Qwen2.5-7B"),
    "Qwen2.5-VL-3B": (3.75, "Qwen2.5-3B"),
    "Qwen3-VL-8B": (8.77, "Qwen3-8B"),
    "Qwen3-VL-2B": (2.13, "Qwen3-1.7B"),
    "Gemma-3-27B": (27.43, "Gemma-3-27B"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_towers_have_as_many_weights_as_published(name):
    whole, text = PUBLISHED[name]
    model, tower = find_model(text), find_tower(name, MultimodalConfig())
    assert model.parameters + tower.parameters(model.hidden_size) == pytest.approx(1e9 * whole, rel=0.005)


def test_memory_is_that_of_a_log():
    """vLLM 0.8.2 with Qwen2.5-VL-7B on an H100 logged 15.6271 GiB of weights (QwenLM/Qwen3-VL issue 1057)."""
    alone = deployment().model_copy(update={"multimodal": None})
    model, gpu = find_model(QWEN), find_gpu("H100")
    with_tower, without = (kv_capacity(model, gpu, one) for one in (deployment(), alone))
    cache = 2 * 16384 * model.hidden_size
    assert (with_tower.weights + with_tower.encoder - cache) / 2**30 == pytest.approx(15.6271, rel=0.015)
    assert with_tower.num_blocks < without.num_blocks


def test_an_image_takes_as_long_as_in_a_published_trace():
    """vLLM 0.19.1 with Qwen2.5-VL-7B on an H100: 126 ms from the start of a request with an image of 1080p to its
    first token, encoding included, in a prompt of 2,718 tokens (vllm-project/vllm issue 41267)."""
    placed = (1932 // 28) * (1092 // 28)  # 1920 x 1080 in patches of 28
    items = (Item(15, placed),)
    workload = Workload([WorkloadRequest(0, 0, (("", 2718),), 1, items=items)])
    scenario = price_scenario(workload, None, "H100", deployment(scheduler={"max_num_batched_tokens": 8192}))
    (row,) = scenario.requests().to_pylist()
    ttft_ms = row["first_token_ns"] / 1e6
    encode_ms = encoder_times(scenario.cost).encode_ns(items) / 1e6
    assert ttft_ms / SPREAD < 126 < ttft_ms * SPREAD
    assert ttft_ms == pytest.approx(126, rel=0.3)
    assert 0.1 < encode_ms / ttft_ms < 0.6


def test_times_follow_the_work():
    tower = times()
    assert isinstance(tower, TowerTimes)
    one = tower.encode_ns([image(1024)])
    assert one < tower.encode_ns([image(1024), image(1024)]) < 2 * one  # weights are read once
    assert tower.encode_ns([image(300), image(900)]) == tower.encode_ns([image(900), image(300)])
    assert tower.encode_ns([image(8192, 16, "video")]) < tower.encode_ns([image(8192)])  # frames are apart
    assert tower.scaled(2).encode_ns([image(1024)]) == pytest.approx(2 * one)


def test_tensor_parallelism_by_weights_and_by_data():
    items = [image(2048)] * 4
    whole = times().encode_ns(items)
    for mode in ("weights", "data"):
        split = times(tensor_parallel_size=4, multimodal={"mm_encoder_tp_mode": mode}).encode_ns(items)
        assert whole / 4 < split < whole


def test_flops_are_those_of_the_layers():
    """2 FLOPs for each weight and patch, as textbooks count, and 4 for each pair and element of attention."""
    tower, model = find_tower(QWEN, MultimodalConfig()), find_model(QWEN)
    operations = tower_operations(tower, model, deployment(), [(1024, 1)])
    flops = sum(one.count * float(one.flops) for one in operations)
    patches, layer = 4096, 4 * 1280**2 + 3 * 1280 * 3420
    merger = 5120**2 + 5120 * 3584
    gemms = 2 * (patches * (32 * layer + 1176 * 1280) + 1024 * merger)
    pairs = 4 * patches**2 + 28 * patches * 64
    assert flops == pytest.approx(gemms + 4 * 1280 * pairs)


def test_what_is_not_known_is_refused():
    with pytest.raises(UserError, match=r"kind.*audio.*encoder_us_per_token"):
        times().encode_ns([image(100, kind="audio")])
    with pytest.raises(UserError, match=r"multimodal\.tower.*is not known"):
        find_tower("any", MultimodalConfig(tower="any"))
    assert find_tower("Llama-3.1-8B", MultimodalConfig()) is None
    assert all(tower.models and tower.source for tower in towers().values())
