"""The power of a GPU, and the energy of runs: idle replicas, power limits, and what is not known."""

import json
from typing import Any

import numpy as np
import pytest

from tests.traces.test_run_metrics import MS, finished, requests_table, steps_table
from tests.traces.test_step_work import row_of, run
from tokentwin.calibration.operations import uniform_step
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu, gpus
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.power import IDLE, GpuPower
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.step_metrics import StepWork

LLAMA = Deployment(model="Llama-3.1-8B", tensor_parallel_size=2)
ENERGY = ("power_w", "energy_kwh", "joules_per_token", "tokens_per_joule", "co2_g", "co2_g_per_mtok_out")


def power(gpu: str, limit_w: float | None = None) -> GpuPower:
    found = GpuPower.from_gpu(find_gpu(gpu), limit_w)
    assert found is not None
    return found


@pytest.mark.parametrize("gpu", gpus())
def test_power_lies_between_idle_and_the_limit_and_grows_with_the_work(gpu: str) -> None:
    whole, shares = power(gpu), np.linspace(0, 1, 21)
    watts = whole.watts(shares[:, None], shares[None, :])
    assert whole.idle_w == IDLE * whole.board_w <= watts[0, 0] and watts.max() == whole.board_w
    assert (np.diff(watts, axis=0) >= 0).all() and (np.diff(watts, axis=1) >= 0).all()
    assert (power(gpu, 0.5 * whole.board_w).watts(shares, shares) <= 0.5 * whole.board_w).all()


def test_a_limit_slows_what_computing_bounds_and_hardly_what_memory_bounds() -> None:
    """Splitwise (Patel et al., ISCA 2024) measured that half the power slows prompts on an H100, and not decoding."""
    gemm, decode = (0.7, 0.2, 1.0), (0.02, 0.65, 0.05)  # rate, bandwidth, share of the time that depends on the clock
    factors = [
        (power("H100", watts).slowdown(*gemm), power("H100", watts).slowdown(*decode)) for watts in (700, 500, 350)
    ]
    assert factors[0] == (1.0, 1.0)
    assert 1.1 < factors[1][0] < factors[2][0] < 2.0
    assert factors[2][1] < 1.05
    assert power("H100", 350).slowdown(0.0, 0.3, 0.05) == 1.0  # the limit does not bind
    shares = np.linspace(0, 1, 11)
    assert power("H100", 300).slowdown(shares, shares, shares) == pytest.approx(
        [power("H100", 300).slowdown(share, share, share) for share in shares]
    )


def test_a_limit_that_the_gpu_cannot_have_is_refused() -> None:
    for watts in (900.0, 100.0):
        with pytest.raises(UserError, match=r"power_limit_w.*must be from 280 to 700 on H100"):
            GpuPower.from_gpu(find_gpu("H100"), watts)
    unknown = GpuSpec(**{**find_gpu("H100").model_dump(), "name": "mine", "power_w": None})
    assert GpuPower.from_gpu(unknown) is None
    with pytest.raises(UserError, match=r"needs the power of mine; add power_w"):
        GpuPower.from_gpu(unknown, 300.0)


def energies(steps: int, replicas: int = 1, deployment: Deployment = LLAMA, **site: float) -> dict[str, Any]:
    """Return the metrics of a run of 10 s with `steps` decode steps of 10 ms, 20 tokens, and `replicas`."""
    one = {"replica": 0, "waiting": 0, "used_blocks": 1, "waiting_blocks": 0, "running": 64}
    one |= row_of(uniform_step(64, 1000, 0, 0, 0))
    rows = [one | {"start_ns": at * 10 * MS, "end_ns": (at + 1) * 10 * MS} for at in range(steps)]
    life = {"pool": "a", "gpus": 2, "started_ns": 0, "ready_ns": 0, "ended_ns": None}
    about = {"replica_lives": [life] * replicas, "duration_ns": 10_000 * MS, "notes": json.dumps({"site": site})}
    work = StepWork.on(deployment, find_gpu("H100"))
    return RunMetrics(requests_table([finished(0, 0, 10, 40, 20)]), steps_table(rows), about, work=work).scalars()


def test_energy_is_that_of_the_steps_and_of_idle_gpus() -> None:
    found, idle_w = energies(100), power("H100").idle_w
    busy_w = found["power_w"] * 10 - 9 * 2 * idle_w  # steps run in one of ten seconds, and two GPUs idle in the others
    assert 2 * idle_w < busy_w < 2 * 700
    assert found["energy_kwh"] == pytest.approx(found["power_w"] * 10 / 3.6e6)
    assert found["joules_per_token"] == pytest.approx(found["power_w"] * 10 / 20) == 1 / found["tokens_per_joule"]
    assert energies(200)["power_w"] - found["power_w"] == pytest.approx((busy_w - 2 * idle_w) / 10)
    assert energies(100, replicas=3)["power_w"] - found["power_w"] == pytest.approx(4 * idle_w)
    assert found["co2_g"] is None


def test_a_step_of_a_data_parallel_rank_takes_the_power_of_its_own_gpus() -> None:
    ranks = LLAMA.model_copy(update={"tensor_parallel_size": 1, "data_parallel_size": 2})
    found = [energies(100, deployment=one)["power_w"] for one in (ranks, Deployment(model="Llama-3.1-8B"))]
    assert found[0] == pytest.approx(found[1])


def test_pue_and_grid_count_only_if_stated() -> None:
    plain, sited = energies(100), energies(100, pue=1.2, grid_gco2_per_kwh=400.0)
    assert sited["power_w"] == pytest.approx(1.2 * plain["power_w"])
    assert sited["co2_g"] == pytest.approx(400 * sited["energy_kwh"])
    assert sited["co2_g_per_mtok_out"] == pytest.approx(sited["co2_g"] / 20 * 1e6)


def test_what_is_not_known_has_no_figure() -> None:
    mixed = {"pools": [{"name": "a"}, {"name": "b", "gpu": "H200"}]}
    fleet = Deployment.model_validate({"model": "Llama-3.1-8B", "fleet": mixed})
    for unknown in (fleet, Deployment(model="random:llama")):
        assert {energies(10, deployment=unknown)[name] for name in ENERGY} == {None}
    assert StepWork.from_run(run(Deployment(), clock="wall", hardware='{"cpu": "AMD EPYC"}')) is None
    assert energies(0)["power_w"] is None  # a run without recorded steps
