"""Engines on several nodes: devices that a link joins, times of collectives over it, and refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.operations import Collective, floor_ns, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import kernels, predicted_cost
from tokentwin.calibration.steps.pipeline_cost import PipelineCost
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.gpu_spec import find_gpu, gpus
from tokentwin.serving.deployments.inter_node import (
    InterNodeConfig,
    data_group,
    hops_between_nodes,
    nodes_of,
    tensor_group,
)
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan

NVLINK = sorted(name for name, gpu in gpus().items() if gpu.link_bytes_per_s > gpu.pcie_bytes_per_s)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LINKS = ("infiniband-xdr", "infiniband-ndr", "infiniband-hdr", "roce-400", "roce-100")


def engine(tp: int = 1, pp: int = 1, dp: int = 1, model: str = "Llama-3.1-70B", **more: Any) -> Deployment:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return parse(Deployment, {"model": model, "device": "cuda", **sizes, **more}, where="engine")


def collective(kind: str, elements: Any, nodes: int, per_node: int = 8, link: str = "infiniband-ndr") -> Collective:
    joined = InterNodeConfig(link=link).of_a_device if nodes > 1 else None  # type: ignore[arg-type]
    return Collective("c", kind, 2 if kind == "p2p" else nodes * per_node, elements, nodes=nodes, link=joined)


@given(
    gpu=st.sampled_from(sorted(gpus())),
    kind=st.sampled_from((*KINDS, "p2p")),
    link=st.sampled_from(LINKS),
    nodes=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    elements=st.tuples(st.integers(1, 2**30), st.integers(1, 2**30)),
)
def test_never_cheaper_with_more_bytes_or_more_nodes(gpu, kind, link, nodes, elements):
    (few, many), (small, large) = sorted(nodes), sorted(elements)
    if kind == "p2p":
        few, many = min(few, 2), min(many, 2)
    time = kernels(gpu).time
    least = time(collective(kind, small, few, link=link)).ns
    assert least <= time(collective(kind, large, few, link=link)).ns * (1 + 1e-9)
    assert least <= time(collective(kind, small, many, link=link)).ns * (1 + 1e-9)


@given(
    gpu=st.sampled_from(NVLINK),
    kind=st.sampled_from(KINDS),
    elements=st.integers(1, 2**30),
    shape=st.sampled_from([(2, 8, 4), (2, 8, 8), (4, 4, 8), (1, 8, 2), (2, 4, 4), (1, 16, 2)]),
)
def test_the_same_devices_on_more_nodes_are_never_faster(gpu, kind, elements, shape):
    """Over NVLink, which is faster than any of these links."""
    nodes, per_node, more = shape
    whole = nodes * per_node
    fewer = kernels(gpu).time(collective(kind, elements, nodes, per_node))
    spread = kernels(gpu).time(collective(kind, elements, more, whole // more))
    assert fewer.ns <= spread.ns * (1 + 1e-9)
    assert spread.level == TrustLevel.EXTRAPOLATED


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_take_the_rate_of_the_link(kind: str) -> None:
    """A GPU shares the message with its node's others, and has one adapter: a closed form of its own."""
    ring = {"all_reduce": 2 * 3 / 4 / 8, "all_gather": 3 / 4 / 8, "reduce_scatter": 3 / 4 / 8, "all_to_all": 3 / 4}
    message = collective(kind, 2.0**33, 4)
    sent = 2 * 2.0**33 * ring[kind]
    assert message.sent_between_nodes == pytest.approx(sent)
    slow = replace(message, link=message.link._replace(bytes_per_s=1e8))  # type: ignore[union-attr]
    assert kernels("H100").time(slow).ns == pytest.approx(1e9 * sent / 1e8, rel=0.05)
    assert kernels("H100").time(slow).ns >= floor_ns(find_gpu("H100"), slow)


def test_ranks_fill_nodes_as_vllm_numbers_them() -> None:
    assert nodes_of(engine(8)) == 1 and tensor_group(engine(8)) == (8, 1, None)
    assert tensor_group(engine(16))[:2] == (16, 2)
    assert tensor_group(engine(8, dp=4))[:2] == (8, 1)  # every rank in a node of its own
    assert data_group(engine(8, dp=4))[:2] == (4, 4)
    assert data_group(engine(1, dp=16))[:2] == (16, 2)
    assert data_group(engine(2, pp=4, dp=2))[:2] == (2, 2)
    assert hops_between_nodes(engine(4, pp=4)) == [False, True, False]
    assert hops_between_nodes(engine(8, pp=2)) == [True]
    assert hops_between_nodes(engine(8, inter_node={"gpus_per_node": 4}, pp=1)) == []
    assert tensor_group(engine(8, inter_node={"gpus_per_node": 4}))[:2] == (8, 2)


def test_adapters_that_a_node_shares_are_slower() -> None:
    own = InterNodeConfig(link="infiniband-hdr").of_a_device
    assert own == (25e9, 0.0)
    assert InterNodeConfig(link="infiniband-hdr", nics_per_node=2).of_a_device.bytes_per_s == 25e9 / 4
    assert InterNodeConfig(link="ethernet-100", latency_us=30, bandwidth_gb_s=10).of_a_device == (10e9, 30e3)


@pytest.mark.parametrize(
    ("wrong", "field", "remedy"),
    [
        ({"inter_node": {"link": "infiniband"}}, "engine.inter_node.link", "'infiniband-ndr'"),
        ({"inter_node": {"link": "ethernet-100"}}, "inter_node.link", "set latency_us"),
        ({"inter_node": {"bandwidth_gb_s": 0}}, "engine.inter_node.bandwidth_gb_s", "more than 0"),
        ({"inter_node": {"gpus_per_node": 0}}, "engine.inter_node.gpus_per_node", "at least 1"),
        ({"tp": 6, "dp": 2}, "tensor_parallel_size", "must divide the 8 GPUs of a node"),
    ],
)
def test_wrong_values_are_one_line(wrong: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(UserError) as refused:
        engine(**wrong)
    assert refused.value.field == field and remedy in refused.value.remedy


def test_what_fits_in_a_node_is_unchanged() -> None:
    """To the operation and to the byte, whatever joins the nodes that it does not use."""
    plain, joined = engine(8), engine(8, inter_node={"link": "infiniband-hdr"})
    sizes = uniform_step(64, 1000, 1, 512, 0)
    model = find_model(plain.model)
    assert step_operations(model, plain, sizes) == step_operations(model, joined, sizes)
    assert "inter_node" not in plain.model_dump() and "inter_node" not in plain.model_dump_json()
    assert Deployment.model_validate_json(joined.model_dump_json()) == joined


def test_explain_names_the_network() -> None:
    sizes = uniform_step(64, 1000, 0, 2, 0)
    wide = explain(predicted_cost("H100", engine(16)), sizes)
    network = {operation.name: operation for operation in wide.operations if operation.bound == "network"}
    assert list(network) == ["all-reduce between nodes", "gather logits between nodes"]
    assert wide.level is TrustLevel.EXTRAPOLATED and "between nodes" in wide.why
    slower = engine(16, inter_node={"link": "infiniband-hdr"})
    assert explain(predicted_cost("H100", slower), sizes).step_ns > wide.step_ns


def test_only_hops_that_leave_the_node_take_the_network() -> None:
    cost = predicted_cost("H100", engine(2, pp=8))
    assert isinstance(cost, PipelineCost)
    plan = StepPlan.from_amounts(prefill_rows=1, prefill_tokens=1024, sampled_rows=1, prefill_pairs=1024 * 1025 // 2)
    near, far = sorted(set(cost.transfers_ns(plan)))
    assert cost.transfers_ns(plan) == [near, near, near, far, near, near, near]
    sent = 2 * 1024 * 2 * 8192 / 2  # half of the hidden states and residuals each
    assert far - near > 0.5 * 1e9 * sent / 50e9
    whole = np.sum(cost.stages_ns(plan)) + np.sum(cost.transfers_ns(plan))
    assert whole == pytest.approx(cost.step_ns(plan), rel=1e-3)
