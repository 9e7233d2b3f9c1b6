"""Expert imbalance: the busiest device on a roofline in closed form, random routing by counting, and refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.calibration.step_model_samples import LLAMA, MIXTURE, Roofline, deployment
from tokentwin.calibration.expert_routing import expected_maximum, random_imbalance
from tokentwin.calibration.operations import Experts, floor_ns, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan

SPREAD = {"tensor_parallel_size": 4, "data_parallel_size": 2, "enable_expert_parallel": True}


def experts(rows: int, imbalance: float | str) -> Experts:
    engine = deployment(**SPREAD, expert_imbalance=imbalance)
    sizes = uniform_step(rows, 100, 0, 2, 0)
    (operation,) = [o for o in step_operations(MIXTURE, engine, sizes) if isinstance(o, Experts)]
    return operation


@pytest.mark.parametrize("imbalance", [1.0, 1.3, 8.0])
@pytest.mark.parametrize("rows", [1, 100, 100_000])
def test_the_busiest_device_by_hand(rows: int, imbalance: float) -> None:
    tokens = imbalance * 2 * rows  # both ranks of attention send theirs
    operation = experts(rows, imbalance)
    rows_here = tokens * 4 / 8  # 4 of 64 experts a token, on 8 devices
    assert operation.flops == pytest.approx(6 * rows_here * 4096 * 1024)
    touched = 8 * (1 - (1 - 4 / 64) ** tokens)
    assert operation.bytes == pytest.approx(3 * 2 * 4096 * 1024 * touched + rows_here * (4 * 4096 + 6 * 1024))
    by_hand = 1e9 * max(operation.flops / Roofline.gpu.flop_per_s("bfloat16"), operation.bytes / 3.35e12)
    assert floor_ns(Roofline.gpu, operation) == pytest.approx(by_hand, rel=0.01)


def a_step(rows: int) -> StepPlan:
    plan = StepPlan(0, DecodeSet(16), 0)
    plan.add_decodes(rows, rows * 100, rows * 100 * 100)
    return plan


def test_steps_take_longer_the_more_uneven_experts_are() -> None:
    costs = [
        OperationCost(MIXTURE, deployment(**SPREAD, expert_imbalance=ratio), Roofline()) for ratio in (1, 1.1, 2, 4, 8)
    ]
    for rows in (1, 8, 64):
        times = [cost.step_ns(a_step(rows)) for cost in costs]
        assert times == sorted(times)
        assert len(set(times)) == len(times)


def test_even_experts_cost_what_they_did_to_the_bit() -> None:
    engines = deployment(**SPREAD), deployment(**SPREAD, expert_imbalance=1)
    assert engines[0] == engines[1]
    operation = experts(37, 1.0)
    plain = Experts("experts", 2 * 37, 4096, 1024, 4, 64, 1, 8, "bfloat16", 30)
    assert (operation.flops, operation.bytes, operation.touched) == (plain.flops, plain.bytes, plain.touched)


# Chance


@pytest.mark.parametrize(("count", "known"), [(2, np.pi**-0.5), (3, 1.5 * np.pi**-0.5), (10, 1.538753)])
def test_the_expected_maximum_of_normals_is_the_known_one(count: int, known: float) -> None:
    assert expected_maximum(count) == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize(("choices", "topk", "devices"), [(64, 4, 8), (128, 8, 2), (256, 8, 32), (8, 2, 8)])
@pytest.mark.parametrize(("tokens", "off"), [(1, 0.22), (8, 0.1), (64, 0.04), (1024, 0.01)])
def test_random_routing_is_what_counting_finds(choices: int, topk: int, devices: int, tokens: int, off: float) -> None:
    rng = np.random.default_rng(1)
    tries = max(1_000_000 // (tokens * choices), 80)
    busiest = 0
    for _ in range(tries):
        chosen = np.argpartition(rng.random((tokens, choices)), topk - 1, axis=1)[:, :topk]
        busiest += np.bincount((chosen // (choices // devices)).ravel(), minlength=devices).max()
    counted = busiest / tries / (tokens * topk / devices)
    assert random_imbalance(choices, topk, devices, tokens) == pytest.approx(counted, rel=off)


@pytest.mark.parametrize("devices", [2, 8, 32])
def test_groups_of_experts_make_chance_less_even_as_counting_finds(devices: int) -> None:
    """DeepSeek-V3: 8 of 256 experts, out of 4 of 8 groups."""
    rng, tokens, tries = np.random.default_rng(1), 64, 200
    group_of = np.arange(256) // 32
    busiest = 0
    for _ in range(tries):
        groups = np.argpartition(rng.random((tokens, 8)), 3, axis=1)[:, :4]
        allowed = (group_of == groups[:, :, None]).any(axis=1)
        chosen = np.argpartition(np.where(allowed, rng.random((tokens, 256)), 2.0), 7, axis=1)[:, :8]
        busiest += np.bincount((chosen // (256 // devices)).ravel(), minlength=devices).max()
    counted = busiest / tries / (tokens * 8 / devices)
    imbalance = random_imbalance(256, 8, devices, tokens, (8, 4))
    assert imbalance == pytest.approx(counted, rel=0.04)
    assert imbalance > random_imbalance(256, 8, devices, tokens)


@given(st.integers(1, 10**6), st.sampled_from([(64, 4), (8, 2), (256, 8), (16, 16)]), st.sampled_from([2, 4, 8]))
def test_chance_fades_with_tokens_but_never_spares_any(tokens: int, mixture: tuple[int, int], devices: int) -> None:
    ratios = random_imbalance(*mixture, devices, np.array([tokens, tokens + 1, 2 * tokens]))
    assert (np.diff(ratios) <= 0).all()
    assert (ratios >= 1).all()
    assert (ratios <= devices).all()
    loads = ratios * np.array([tokens, tokens + 1, 2 * tokens])
    assert (np.diff(loads) >= 0).all()


def test_chance_lies_between_even_and_worst_experts() -> None:
    even, chance, worst = (experts(16, ratio).flops for ratio in (1.0, "random", 8.0))
    assert even < chance < worst
    assert chance / even == pytest.approx(random_imbalance(64, 4, 8, 32))


# Refusals


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"expert_imbalance": 0.9}, "x.expert_imbalance: 0.9: must be random, or a number of at least 1"),
        ({"expert_imbalance": "much"}, "x.expert_imbalance: 'much': must be random, or a number of at least 1"),
        ({"expert_imbalance": True}, "x.expert_imbalance: True: must be random, or a number of at least 1"),
        ({"expert_imbalance": 2}, "expert_imbalance: 2.0: needs enable_expert_parallel and more than one device"),
        (
            {"expert_imbalance": 9, **SPREAD},
            "expert_imbalance: 9.0: must be at most 8, the number of devices that share the experts",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(Deployment, settings, "x")
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


def test_a_dense_model_has_no_experts_to_be_uneven() -> None:
    with pytest.raises(
        UserError, match=r"expert_imbalance: 1\.5: cannot be set, because llama-8b has no experts; leave it out"
    ):
        OperationCost(LLAMA, deployment(**SPREAD, expert_imbalance=1.5), Roofline())
