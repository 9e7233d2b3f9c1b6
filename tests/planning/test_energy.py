"""Power, energy and carbon in the answers of `simulate`, `sweep` and `plan`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.planning.test_run_costs import simulate
from tokentwin.calibration.operations import KernelTimes
from tokentwin.calibration.steps.observed import ObservedOperations
from tokentwin.cli import cli
from tokentwin.planning.energy import energy_factors, power_factors
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.plan.energy import check_power_known
from tokentwin.planning.plan.planner import plan
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.vllm_command import vllm_command_of
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.metrics.power import IDLE
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

SPEC = {
    "requests": 40,
    "arrivals": {"kind": "constant", "rate": 4},
    "prompt": {"kind": "fixed", "tokens": 300},
    "output": {"kind": "fixed", "tokens": 60},
}


def test_a_simulated_run_states_its_energy_and_carries_it(tmp_path: Path) -> None:
    found = json.loads(simulate(tmp_path, "--pue", "1.3", "--grid-gco2-per-kwh", "380", "--format", "json").stdout)
    assert found["power_w"] > 1.3 * IDLE * 700
    assert found["co2_g"] == pytest.approx(380 * found["energy_kwh"])
    low, high = power_factors(find_gpu("H100"))
    assert found["bands"]["power_w"]["value"] == pytest.approx([low * found["power_w"], high * found["power_w"]])
    recorded = RunMetrics.from_recording(Recording.load(tmp_path / "run")).scalars()
    assert recorded["power_w"] == found["power_w"] and recorded["co2_g_per_mtok_out"] == found["co2_g_per_mtok_out"]
    shown = simulate(tmp_path, "--force").stdout
    assert (
        "joules_per_token" in shown and "co2_g" not in shown and "by a fit to published power of Hopper GPUs" in shown
    )


def test_energy_that_is_not_known_is_refused(tmp_path: Path) -> None:
    pools = [{"name": "fast"}, {"name": "cheap", "gpu": "L40S"}]
    with pytest.raises(UserError, match=r"grid_gco2_per_kwh.*needs the power of one known GPU"):
        simulate(tmp_path, "--grid-gco2-per-kwh", "380", fleet={"pools": pools})
    with pytest.raises(UserError, match=r"pue.*needs recorded steps"):
        simulate(tmp_path, "--pue", "1.2", "--summary-only")
    assert (
        json.loads(simulate(tmp_path, "--format", "json", "--no-band", fleet={"pools": pools}).stdout)["power_w"]
        is None
    )


def test_a_power_limit_slows_prompts_more_than_decoding_and_is_marked(tmp_path: Path) -> None:
    runs = {}
    for limit in (None, 350.0):
        limited = {} if limit is None else {"power_limit_w": limit}
        (tmp_path / "d.yaml").write_text(json.dumps({"model": "Llama-3.1-8B", "device": "cuda", **limited}))
        (tmp_path / "s.yaml").write_text(json.dumps(SPEC | {"prompt": 2000}))
        words = ["simulate", tmp_path / "s.yaml", "-d", tmp_path / "d.yaml", "--gpu", "H100", "-o", tmp_path / "run"]
        words += ["--force", "--no-band", "--format", "json"]
        runs[limit] = json.loads(CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False).stdout)
    whole, limited = runs[None], runs[350.0]
    prefill, decode = (
        limited["distributions"][m]["p50"] / whole["distributions"][m]["p50"] for m in ("prefill_ms", "tpot_ms")
    )
    assert prefill > 1.15 and 1.0 <= decode < 1.1
    assert limited["power_w"] < whole["power_w"]
    assert "power limit (350 W)" in limited["trust"]["reason"] and limited["trust"]["level"] == "extrapolated"
    assert "power_limit_w" not in Deployment().model_dump()  # recordings of before keep their bytes


def kernels_under(power_limit_w: float | None) -> KernelTimes:
    deployment = Deployment(model="Llama-3.1-8B", device="cuda", power_limit_w=power_limit_w)
    (cost,) = price_scenario(Workload(()), None, "H100", deployment).judged
    assert isinstance(cost, ObservedOperations)
    return cost.pure.kernels


def test_limits_are_checked_and_the_boards_own_changes_nothing() -> None:
    with pytest.raises(UserError, match=r"power_limit_w.*must be from 280 to 700 on H100"):
        kernels_under(800.0)
    assert kernels_under(700.0) is kernels_under(None) is not kernels_under(600.0)


@pytest.fixture(scope="module")
def planned() -> PlanDocument:
    request = PlanRequest(
        traffic=SPEC,
        model="Llama-3.1-8B",
        gpus=("H100",),
        slos=("ttft_ms p99<=500",),
        vary={"power_limit_w": (400, 700)},
        spares=1,
        grid_gco2_per_kwh=400.0,
    )
    return plan(request, jobs=1, surroundings=False)


def test_a_plan_has_a_column_of_energy(planned: PlanDocument) -> None:
    best = planned.recommendation
    assert best is not None and best.energy is not None and best.power_w is not None
    assert best.power_w > best.gpus * IDLE * 700  # the spare takes idle power
    offers = [best, *planned.runners_up]
    watts = {"power_limit_w=400" in offer.engine: offer.power_w or 0.0 for offer in offers}
    assert 0 < watts[True] <= watts[False]
    low, high = energy_factors(find_gpu("H100"))
    joules = best.energy.joules_per_token
    assert best.energy.joules_per_token_interval == pytest.approx((low * joules, high * joules))
    assert best.co2_g_per_mtok_out == pytest.approx(joules / 3.6 * 400) and best.joules_per_token == joules
    table = planned.shown_offers()
    assert {"W", "J/tok\noutput", "gCO2/Mtok\noutput"} <= {column.name for column in table.columns}
    assert any("J per output token" in getattr(line, "text", "") for line in planned.report())
    read = PlanDocument.read(json.loads(planned.dumps())).recommendation
    assert read is not None and read.energy == best.energy
    without = [
        o.model_copy(update=dict.fromkeys(("power_w", "joules_per_token", "co2_g_per_mtok_out"))) for o in offers
    ]
    assert "W" not in {column.name for column in planned.fleets(without, []).columns}


def test_the_command_sets_the_limit() -> None:
    limited = Engine("H100", 1.0, Deployment(model="Llama-3.1-8B", device="cuda", power_limit_w=400.0))
    assert str(vllm_command_of(limited)).startswith("sudo nvidia-smi --power-limit=400 && vllm serve ")


def test_questions_without_an_answer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(json.dumps(SPEC))
    words = ["plan", tmp_path / "s.yaml", "--model", "Llama-3.1-8B", "--slo", "ttft_ms p99<=500", "--gpu", "H100"]
    words += ["--replicas", 1, "--energy"]
    with pytest.raises(UserError, match="cannot be combined with --replicas"):
        CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False, standalone_mode=False)
    with pytest.raises(UserError, match="has no known utilisation or power"):
        check_power_known([Engine("cpu", 1.0, Deployment())])
