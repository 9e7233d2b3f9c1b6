"""KV capacity: vLLM's own logs, invariants of the arithmetic, and its one-line errors.

Logged figures are of vLLM engines that others ran; each says where it was published.
"""

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import KvCapacity, kv_capacity, weight_bytes
from tokentwin.serving.deployments.kv_layout import kv_groups, most_held, with_kv_groups
from tokentwin.serving.deployments.model_catalogue import find_model, models
from tokentwin.serving.deployments.weight_types import weights_dtype
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.blocks import blocks_for

GIB = 1024**3
DATA = Path(__file__).parents[3] / "shared" / "data" / "inference-sim"


def capacity(model: str, gpu: str, scheduler: dict[str, Any] | None = None, **engine: Any) -> KvCapacity:
    limits = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 8192, **(scheduler or {})}
    return kv_capacity(find_model(model), find_gpu(gpu), Deployment(scheduler=limits, **engine))


# model, GPU, engine, scheduler -> blocks that vLLM logged, error allowed
LOGGED = [
    # vLLM 0.11, H100, inference-sim's ground truth, in shared/data
    ("CodeLlama-34B", "H100", {}, {"max_num_batched_tokens": 4096}, 2537, 0.03),
    # vLLM 0.31, A100 80 GB, its defaults; a public lab notebook's log
    ("Llama-3.1-8B", "A100-80G", {"gpu_memory_utilization": 0.92}, {"max_num_batched_tokens": 2048}, 28781, 0.01),
    # vLLM 0.7.2 (V0), 2 x RTX 4090; vllm-project/vllm issue 13061
    (
        "Qwen2.5-14B",
        "RTX-4090",
        {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.98, "engine": "vllm 0.7.2"},
        {"max_num_batched_tokens": 2048},
        5096,
        0.03,
    ),
    # vLLM 0.9.0 with LMCache, 2 x RTX 4090; LMCache/LMCache issue 1241
    (
        "Qwen2.5-32B",
        "RTX-4090",
        {"tensor_parallel_size": 2, "quantization": "fp8", "engine": "vllm 0.9.0"},
        {"max_num_batched_tokens": 2048},
        1134,
        0.1,
    ),
    (
        "Qwen3-30B-A3B-FP8",
        "RTX-4090",
        {"tensor_parallel_size": 2, "engine": "vllm 0.9.0"},
        {"max_num_batched_tokens": 2048},
        5474,
        0.1,
    ),
    # vLLM of July 2025, 4 x H100, its defaults; vllm-project/vllm issue 21348
    ("Qwen3-235B-A22B-FP8", "H100", {"tensor_parallel_size": 4}, {"max_num_seqs": 1024}, 11180, 0.18),
]


@pytest.mark.parametrize(("model", "gpu", "engine", "scheduler", "blocks", "allowed"), LOGGED)
def test_blocks_are_those_that_vllm_logged(model, gpu, engine, scheduler, blocks, allowed):
    predicted = capacity(model, gpu, scheduler=scheduler, **engine)
    low, high = predicted.interval
    assert predicted.num_blocks == pytest.approx(blocks, rel=allowed)
    assert low <= blocks <= high


def test_the_log_in_shared_data_still_says_so() -> None:
    logs = sorted(DATA.glob("*codellama34b*/vllm.log.gz"))
    if not logs:
        pytest.skip("shared/data/inference-sim is not here")
    text = gzip.decompress(logs[0].read_bytes()).decode()
    predicted = capacity("CodeLlama-34B", "H100", scheduler={"max_num_batched_tokens": 4096})
    blocks = re.search(r"num_gpu_blocks is: (\d+)", text)
    weights = re.search(r"Model loading took ([\d.]+) GiB", text)
    assert blocks is not None
    assert weights is not None
    assert predicted.num_blocks == pytest.approx(int(blocks[1]), rel=0.03)
    assert predicted.weights / GIB == pytest.approx(float(weights[1]), rel=1e-4)


@pytest.mark.parametrize(
    ("model", "tp", "logged_gib", "allowed"),
    [
        ("CodeLlama-34B", 1, 62.8571, 1e-4),
        ("Llama-3.1-8B", 1, 14.9888, 1e-4),
        ("Llama-3.2-1B", 1, 2.3185, 1e-3),
        ("Qwen3-8B", 1, 15.2683, 1e-3),
        ("Qwen2.5-32B", 2, 30.7098, 0.01),
        ("gpt-oss-120b", 1, 64.38, 0.01),  # Triton kernels; 65.97 with Marlin's, which pad more
        ("gpt-oss-20b", 1, 13.72, 0.05),
    ],
)
def test_weights_are_those_that_vllm_logged(model: str, tp: int, logged_gib: float, allowed: float) -> None:
    taken = weight_bytes(find_model(model), Deployment(tensor_parallel_size=tp))
    assert taken / GIB == pytest.approx(logged_gib, rel=allowed)


@pytest.mark.parametrize(
    ("model", "seqs", "logged_gib"),
    [
        ("Qwen3-30B-A3B", 256, 1.40),
        ("Qwen3-32B", 1024, 5.58),
        ("gpt-oss-120b", 1024, 7.43),
        ("Llama-3.1-8B", 256, 1.20),
    ],
)
def test_sampling_bounds_the_activations_of_large_vocabularies(model: str, seqs: int, logged_gib: float) -> None:
    predicted = capacity(model, "H200", scheduler={"max_num_seqs": seqs})
    assert predicted.activations == predicted.sampler
    assert predicted.sampler / GIB == pytest.approx(logged_gib, rel=0.03)


# model, rank, numbers of slots, and the tokens of KV that vLLM logged for them (0.8.5, H100 with 64 GB):
# arXiv 2508.08343, GPULLMAdapterOptimization, find_available_gpu_memory_depending_on_loaded_adapters
SLOTS = [
    ("Llama-3.1-8B", 8, (8, 384), (305_104, 154_240)),
    ("Llama-3.1-8B", 16, (8, 224), (302_000, 138_272)),
    ("Llama-3.1-8B", 32, (8, 96), (296_352, 168_064)),
    ("Qwen2.5-7B", 8, (8, 384), (700_816, 430_432)),
    ("Qwen2.5-7B", 16, (8, 384), (694_848, 165_664)),
    ("Qwen2.5-7B", 32, (8, 224), (683_472, 67_136)),
]


@pytest.mark.parametrize(("model", "rank", "slots", "tokens"), SLOTS)
def test_slots_for_adapters_take_the_memory_that_vllm_logged(model, rank, slots, tokens) -> None:
    spec = find_model(model)
    few, many = (capacity(model, "H100", lora={"max_loras": n, "max_lora_rank": rank}) for n in slots)
    # until 2025 a slot of Llama also had room for 256 more tokens in the embedding and in the head
    more = 2 * 2 * 256 * spec.hidden_size if spec.family == "llama" else 0
    predicted = (many.adapters - few.adapters) / (slots[1] - slots[0]) + more
    logged = (tokens[0] - tokens[1]) * spec.kv_bytes_per_token(2) / (slots[1] - slots[0])
    assert predicted == pytest.approx(logged, rel=0.05)
    assert few.num_blocks - many.num_blocks == pytest.approx((many.adapters - few.adapters) / few.block, abs=1)


def test_devices_share_the_slots_but_not_whole_matrices() -> None:
    one, two = (
        capacity("Llama-3.1-70B", "H100", tensor_parallel_size=tp, lora={"max_loras": 4}).adapters for tp in (1, 2)
    )
    assert one / 2 < two < one


def test_the_arithmetic_adds_up() -> None:
    parts = dict(capacity("CodeLlama-34B", "H100").explain())
    left = parts.pop("left for KV")
    assert sum(parts.values()) == pytest.approx(left, abs=1e-6)


FITTING = ("Llama-3.1-8B", "Qwen3-30B-A3B", "gpt-oss-20b", "Mistral-7B-v0.3", "Gemma-2-9B")


@given(
    model=st.sampled_from(FITTING),
    tp=st.sampled_from([1, 2, 4, 8]),
    seqs=st.integers(1, 2048),
    tokens=st.integers(64, 32768),
    utilization=st.floats(0.3, 1.0),
)
def test_more_room_never_gives_fewer_blocks(model: str, tp: int, seqs: int, tokens: int, utilization: float) -> None:
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    engine = {"tensor_parallel_size": tp, "gpu_memory_utilization": utilization}
    here = capacity(model, "H100", scheduler=limits, **engine)
    low, high = here.interval
    assert low <= here.num_blocks <= high
    assert here.num_blocks * here.block * here.pages <= max(here.left, 0)
    assert capacity(model, "H200", scheduler=limits, **engine).num_blocks >= here.num_blocks
    fewer = {**limits, "max_num_seqs": max(seqs // 2, 1)}
    assert capacity(model, "H100", scheduler=fewer, **engine).num_blocks >= here.num_blocks
    fp8 = capacity(model, "H100", scheduler=limits, kv_cache_dtype="fp8", **engine)
    assert fp8.block * 2 == here.block
    assert fp8.num_blocks in (2 * here.num_blocks, 2 * here.num_blocks + 1)


@pytest.mark.parametrize("name", models())
def test_devices_share_the_weights(name: str) -> None:
    spec = find_model(name)
    one = weight_bytes(spec, Deployment())
    two = weight_bytes(spec, Deployment(tensor_parallel_size=2))
    stages = weight_bytes(spec, Deployment(pipeline_parallel_size=2))
    assert one / 2 <= two < 0.53 * one
    assert one / 2 < stages + spec.embedding_parameters < one + spec.embedding_parameters
    fp8 = weight_bytes(spec, Deployment(quantization="fp8"))
    assert fp8 < one if spec.checkpoint_quantization == "none" else fp8 >= one


def test_kv_heads_are_repeated_where_devices_outnumber_them() -> None:
    four, eight = (capacity("Qwen3-30B-A3B", "H100", tensor_parallel_size=tp) for tp in (4, 8))
    assert four.block == eight.block
    assert eight.weights > four.weights / 2


def test_stages_hold_their_own_layers() -> None:
    whole, half = capacity("CodeLlama-34B", "H100"), capacity("CodeLlama-34B", "H100", pipeline_parallel_size=2)
    assert half.block * 2 == whole.block
    assert half.num_blocks > 2 * whole.num_blocks


def test_a_data_parallel_group_shares_experts_and_nothing_else() -> None:
    spec = find_model("Qwen3-30B-A3B")
    alone, shared = (weight_bytes(spec, Deployment(data_parallel_size=ranks)) for ranks in (1, 4))
    experts = 2 * spec.moe_layers * spec.num_experts * spec.expert_parameters
    assert alone - shared == pytest.approx(0.75 * experts, rel=1e-9)
    dense = find_model("Qwen3-32B")
    assert weight_bytes(dense, Deployment(data_parallel_size=4)) == weight_bytes(dense, Deployment())


def test_layers_with_a_window_share_blocks_with_full_ones() -> None:
    oss = capacity("gpt-oss-120b", "H200")
    assert oss.block == 2 * 18 * 8 * 64 * 16 * 2  # keys and values, half of the layers, heads, head size, tokens, bytes
    assert oss.num_blocks == oss.left // oss.block
    llama = capacity("Llama-3.1-8B", "H200")
    assert (llama.block, llama.pages) == (16 * 131_072, 1)


def test_weights_are_kept_as_the_deployment_says_or_as_published() -> None:
    llama, oss = find_model("Llama-3.1-8B"), find_model("gpt-oss-20b")
    assert weights_dtype(llama, Deployment()) == "bfloat16"
    assert weights_dtype(llama, Deployment(quantization="fp8")) == "fp8"
    assert weights_dtype(oss, Deployment()) == "mxfp4"


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        ({}, 4 + 16 / 128),
        ({"group": 128, "zeros": True}, 4 + 20 / 128),
        ({"group": 32}, 4 + 16 / 32),
        ({"group": 0}, 4 + 16 / 8192),
    ],
)
def test_scales_and_zero_points_count_as_the_checkpoint_has_them(stored: dict[str, Any], bits: float) -> None:
    """A 70B in 4 bits: every linear weight with its share, everything else in 16 bits."""
    model = find_model("Llama-3.1-70B")
    if stored:
        names = {"group": "checkpoint_group_size", "zeros": "checkpoint_zero_points"}
        fields = {names[key]: value for key, value in stored.items()}
        model = model.model_copy(update={"checkpoint_quantization": "int4", **fields})
    taken = weight_bytes(model, Deployment() if stored else Deployment(quantization="int4"))
    wide = weight_bytes(find_model("Llama-3.1-70B"), Deployment())
    linear = model.parameters - model.embedding_parameters - (2 * model.num_layers + 1) * model.hidden_size
    assert taken == pytest.approx(wide - linear * (16 - bits) / 8, abs=1)
    assert taken / 1e9 == pytest.approx(40, rel=0.1)


def test_what_does_not_fit_or_split_is_refused_in_one_line() -> None:
    deployment = Deployment()
    with pytest.raises(UserError, match=r"131.4 GiB of weights.*use more or larger devices") as caught:
        capacity("Llama-3.1-70B", "H100").check(deployment)
    assert "\n" not in str(caught.value)
    capacity("Llama-3.1-8B", "H100").check(deployment)
    with pytest.raises(UserError, match="tensor_parallel_size"):
        capacity("Qwen2.5-7B", "H100", tensor_parallel_size=8)


@pytest.mark.parametrize(
    ("layers", "sliding", "groups"),
    [
        (32, 32, (4096,)),  # Mistral 7B v0.1
        (36, 18, (4096, 0)),  # gpt-oss
        (62, 52, (4096,) * 6 + (0,)),  # Gemma 3 27B: the last group is padded
        (25, 12, (4096, 0)),  # nearly even: vLLM pads the rarer kind
        (28, 7, (4096, 0, 0, 0)),
        (32, 0, ()),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(layers: int, sliding: int, groups: tuple[int, ...]) -> None:
    window = {"num_layers": layers, "sliding_layers": sliding, "sliding_window": 4096 if sliding else 0}
    spec = find_model("Llama-3.1-8B").model_copy(update=window)
    limits = {"max_model_len": 100_000, "max_num_batched_tokens": 8192}
    deployment = Deployment(scheduler=limits)
    assert kv_groups(spec, deployment) == groups
    most = most_held(deployment.rescheduled(kv_groups=groups).scheduler, 100_000)
    local = blocks_for(4095 + 8192, 16) + 1
    assert most == 6250 * max(groups.count(0), not groups) + local * (len(groups) - groups.count(0))
    whole = kv_capacity(spec, find_gpu("H100"), deployment)
    assert whole.block * max(len(groups), 1) >= 16 * spec.kv_bytes_per_token(2)
    staged = kv_groups(spec, Deployment(scheduler=limits, pipeline_parallel_size=2))
    assert staged == ()


def test_groups_follow_from_the_model_and_cannot_be_others() -> None:
    assert with_kv_groups(Deployment(model="gpt-oss-20b")).scheduler.kv_groups == (128, 0)
    assert with_kv_groups(Deployment(model="Llama-3.1-8B")).scheduler.kv_groups == ()
    own = Deployment(model="unheard of", scheduler={"kv_groups": (64, 0)})
    assert with_kv_groups(own).scheduler.kv_groups == (64, 0)
    with pytest.raises(UserError, match=r"scheduler.kv_groups: \[64\]: is \[128, 0\] for gpt-oss-20b; leave it out"):
        with_kv_groups(Deployment(model="gpt-oss-20b", scheduler={"kv_groups": (64,)}))
    assert "kv_groups" not in Deployment().model_dump_json()
