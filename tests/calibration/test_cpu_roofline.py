"""Kernel times of a CPU: the roofline of one balance, and the balances among which steps decide."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.test_surfaces import ADDED, FACTORS, SCHEDULER, measured
from tokentwin.calibration.kernels.cpu_roofline import BALANCES, CpuRoofline
from tokentwin.calibration.operations import Gemm
from tokentwin.calibration.steps.correction import Correction
from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.surface_fit import known_model, surfaces_for
from tokentwin.calibration.steps.surfaces import CPU, Surfaces
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.config import Deployment

SIDES = st.integers(1, 20_000)


@examples(0.2)
@given(SIDES, SIDES, SIDES, st.floats(0.5, 200))
def test_a_time_is_the_larger_of_reading_and_computing(m: int, n: int, k: int, balance: float) -> None:
    """Twice the balance takes at least half the time, and no longer; below the balance only bytes count."""
    gemm = Gemm("gate and up", np.array([m]), n, k)
    (ns,), (doubled,) = (CpuRoofline(factor * balance).time(gemm).ns for factor in (1, 2))
    assert ns / 2 <= doubled * (1 + 1e-12) and doubled <= ns
    (intensity,) = np.asarray(gemm.flops) / np.asarray(gemm.bytes)
    (of_bytes,) = CpuRoofline(1e9).time(gemm).ns
    assert ns == pytest.approx(of_bytes * max(intensity / balance, 1))


def test_a_decode_step_reads_and_a_long_prompt_computes_at_every_balance() -> None:
    """The GEMM of one token has one FLOP for each byte of a 16-bit weight, that of 4,096 tokens some thousands."""
    one, many = (Gemm("gate and up", np.array([m]), 11_008, 4096) for m in (1, 4096))
    times = [[float(CpuRoofline(balance).time(gemm).ns[0]) for gemm in (one, many)] for balance in BALANCES]
    assert len({reading for reading, _ in times}) == 1
    for (least, most), ((_, slower), (_, faster)) in zip(pairwise(BALANCES), pairwise(times), strict=True):
        assert slower / faster == pytest.approx(most / least)
    assert CpuRoofline(BALANCES[0]).time(many).level.tolist() == [TrustLevel.INTERPOLATED]


@pytest.mark.parametrize("balance", [BALANCES[1], BALANCES[3]])
def test_steps_of_a_known_balance_choose_it(balance: float) -> None:
    engine = Deployment(model="random:smollm2", device="cpu", dtype="bfloat16", scheduler=SCHEDULER)
    model = known_model(engine.model).model_dump_json()
    truth = Surfaces(model, CPU, Correction(FACTORS, ADDED), balance)
    steps = MeasuredSteps([measured(truth, engine, 3)])
    used = np.ones(len(steps.step_ns), dtype=bool)
    errors = {tried.balance: tried.error(tried.learnt(used), used) for tried in surfaces_for(steps, engine, "cpu")}
    assert tuple(errors) == BALANCES
    assert min(errors, key=errors.__getitem__) == balance and errors[balance] < 0.01
