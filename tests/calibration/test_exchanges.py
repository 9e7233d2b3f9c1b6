"""Tokens to experts and back by DeepEP: copies counted, measured times, growth, and who cannot have it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.kernels.collectives import read_exchanges
from tokentwin.calibration.operations import Collective, Exchange, KernelTimes, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.inter_node import InterNodeConfig
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError

MODES = ("low_latency", "high_throughput")
KERNELS: dict[str, KernelTimes] = {name: load_kernels(find_gpu(name)) for name in (*read_exchanges(), "A100-80G")}


def exchange(mode: str, kind: str, nodes: int, tokens: float, link: str = "infiniband-ndr", topk: int = 8) -> Exchange:
    joined = InterNodeConfig(link=link).of_a_device if nodes > 1 else None  # type: ignore[arg-type]
    of_model: dict[str, Any] = {"hidden": 7168, "topk": topk, "mode": mode, "fp8": kind == "dispatch"}
    return Exchange("", kind, 8 * nodes, tokens * 7168, nodes=nodes, link=joined, **of_model)


@pytest.mark.parametrize(
    ("mode", "kind", "nodes", "tokens", "measured_us", "within"),
    [  # H100 with InfiniBand NDR: aiconfigurator's wideep_deepep_ll and wideep_deepep_normal, SGLang 0.5.6
        ("low_latency", "dispatch", 2, 128, 102.1, 0.08),
        ("low_latency", "combine", 2, 128, 186.2, 0.12),
        ("low_latency", "dispatch", 4, 32, 55.2, 0.08),
        ("low_latency", "combine", 8, 256, 579.5, 0.08),
        ("high_throughput", "dispatch", 2, 4096, 893.2, 0.25),
        ("high_throughput", "combine", 4, 4096, 3633.7, 0.4),
    ],
)
def test_measured_exchanges_are_found_again(mode, kind, nodes, tokens, measured_us, within):
    time = KERNELS["H100"].time(exchange(mode, kind, nodes, tokens))
    assert float(time.ns) / 1e3 == pytest.approx(measured_us, rel=within)
    assert time.level == TrustLevel.INTERPOLATED


@given(
    gpu=st.sampled_from(sorted(KERNELS)),
    mode=st.sampled_from(MODES),
    kind=st.sampled_from(("dispatch", "combine")),
    nodes=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    tokens=st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
    link=st.sampled_from(("infiniband-ndr", "infiniband-hdr", "roce-100")),
)
def test_never_cheaper_with_more_tokens_nodes_or_experts(gpu, mode, kind, nodes, tokens, link):
    (few, many), (small, large) = sorted(nodes), sorted(tokens)
    time = KERNELS[gpu].time
    least = time(exchange(mode, kind, few, small, link)).ns
    for more in (
        exchange(mode, kind, few, large, link),
        exchange(mode, kind, many, small, link),
        exchange(mode, kind, few, small, link, topk=9),
    ):
        assert least <= time(more).ns * (1 + 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_copies_are_those_that_drawing_experts_gives(mode: str) -> None:
    """4 nodes of 8 devices, 8 experts a token, 20,000 tokens of one device."""
    rng = np.random.default_rng(0)
    device = rng.integers(0, 32, (20_000, 8))
    node = device // 8
    if mode == "low_latency":
        apart, within = np.sum(node > 0, axis=1), np.sum((node == 0) & (device > 0), axis=1)
    else:
        apart = sum((np.any(node == other, axis=1) for other in range(1, 4)), np.zeros(20_000, dtype=int))
        within = sum((np.any(device == other, axis=1) for other in range(1, 32)), np.zeros(20_000, dtype=int))
    counted = exchange(mode, "combine", 4, 1.0)
    assert counted.sent_between_nodes / (2 * 7168) == pytest.approx(apart.mean(), rel=0.02)
    assert counted.sent_within_node / (2 * 7168) == pytest.approx(within.mean(), rel=0.02)


def test_what_no_table_has_is_extrapolated_and_less_sure() -> None:
    known = exchange("low_latency", "dispatch", 2, 64.0)
    sure = KERNELS["H100"].time(known)
    for gpu, other in (
        ("H100", exchange("low_latency", "dispatch", 2, 64.0, "infiniband-hdr")),
        ("H100", exchange("low_latency", "dispatch", 16, 64.0)),
        ("H100", replace(known, hidden=16384)),
        ("B200", known),
        ("A100-80G", exchange("low_latency", "dispatch", 1, 64.0)),
    ):
        time = KERNELS[gpu].time(other)
        assert time.level == TrustLevel.EXTRAPOLATED and time.sigma > sure.sigma
    assert KERNELS["H100"].time(exchange("low_latency", "dispatch", 1, 64.0)).level == TrustLevel.INTERPOLATED


def deepseek(**more: Any) -> Deployment:
    split = {"data_parallel_size": 16, "enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"}
    data = {"model": "DeepSeek-V3", "device": "cuda", "kv_cache_dtype": "fp8", **split, **more}
    return parse(Deployment, data, where="engine")


def test_a_deepseek_on_two_nodes() -> None:
    explained = explain(predicted_cost("H100", deepseek()), uniform_step(64, 1000, 0, 2, 0))
    network = {operation.name: operation for operation in explained.operations if operation.bound == "network"}
    assert list(network) == ["dispatch between nodes", "combine between nodes"]
    assert all(operation.count == 58 for operation in network.values())
    sizes, model = uniform_step(64, 1000, 0, 2, 0), find_model("DeepSeek-V3")
    tp8 = [
        (o.name, o.gpus, o.nodes, o.count)
        for o in step_operations(model, deepseek(tensor_parallel_size=8, data_parallel_size=2), sizes)
        if isinstance(o, Collective)
    ]
    assert tp8 == [  # experts bring back whole sums, so only attention and dense layers need all-reduces
        ("all-reduce", 8, 1, 2 * 61 - 58),
        ("gather logits", 8, 1, 1),
        ("dispatch between nodes", 16, 2, 58),
        ("combine between nodes", 16, 2, 58),
        ("gather tokens", 8, 1, 58),
    ]


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"data_parallel_size": 1}, "needs data_parallel_size above 1"),
        ({"enable_expert_parallel": False}, "and enable_expert_parallel"),
        ({"inter_node": {"link": "ethernet-100", "latency_us": 30}}, "needs RDMA"),
    ],
)
def test_deepep_without_what_it_needs_is_one_line(wrong: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        deepseek(**wrong)


def test_a_gpu_without_nvlink_has_no_deepep() -> None:
    with pytest.raises(UserError, match="needs NVLink, which L40S lacks"):
        load_kernels(find_gpu("L40S")).time(exchange("low_latency", "dispatch", 1, 64.0))
    assert "all2all_backend" not in Deployment().model_dump_json()
