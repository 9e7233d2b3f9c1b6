"""The rate beyond which requests pile up, for an engine whose capacity is known: ten rows, 10 ms a step, 10 steps."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tokentwin.calibration.steps.observed import observed
from tokentwin.planning.capacity import Capacity
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.simulation import SimulatedRun, recorded
from tokentwin.serving.answers.terminal import print_report
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.user_code.own_cost import OwnCost
from tokentwin.serving.workload import Workload
from tokentwin.traces.synth import parse_spec, synthesise

_SERVED = 100.0  # requests per second: 10 rows / (10 steps x 10 ms)
_SCHEDULER = SchedulerConfig(max_num_seqs=10, max_num_batched_tokens=512, max_model_len=512, num_blocks=600)


@dataclass
class TenMilliseconds:
    interval: tuple[float, float] = (0.8, 1.25)

    def step_ns(self, plan: StepPlan) -> int:
        return 10_000_000


def arriving(**arrivals: object) -> Workload:
    spec = {"name": "arriving", "requests": 1500, "arrivals": arrivals, "prompt": 20, "output": 10}
    return synthesise(parse_spec(spec, where="arriving"))


def run(workload: Workload, out: Path) -> SimulatedRun:
    cost = observed(OwnCost("ten", TenMilliseconds()))
    scenario = PricedScenario(workload, Deployment(scheduler=_SCHEDULER), cost)
    return recorded(scenario, out, details=False)


@pytest.mark.parametrize(("rate", "within"), [(88, True), (100, True), (115, True), (160, False)])
def test_capacity_and_its_band(rate: float, within: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(arriving(kind="poisson", rate=rate), tmp_path / "run")
    capacity = done.capacity
    assert capacity is not None and capacity.is_within_error == within
    assert capacity.value == pytest.approx(_SERVED, rel=0.05)
    assert 0.9 * _SERVED / 1.25 < capacity.low < _SERVED / 1.2
    assert _SERVED / 0.84 < capacity.high < 1.1 * _SERVED / 0.8
    print_report(done.report())
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).startswith(capacity.sentence)
    assert ("ttft_ms" in shown) == ("e2e_ms" in shown) == (not within)
    assert "tpot_ms" in shown


@pytest.mark.parametrize("arrivals", [{"kind": "poisson", "rate": 40}, {"kind": "closed", "concurrency": 40}])
def test_runs_without_capacity(arrivals: dict[str, object], tmp_path: Path) -> None:
    done = run(arriving(**arrivals), tmp_path / "run")
    assert done.capacity is None and "ttft_ms" in str(list(done.report()))


def test_the_sentence_says_on_which_side_the_arrivals_lie() -> None:
    ends = [Capacity(arrival_rate=rate, value=10, low=8, high=12).sentence for rate in (7, 9, 13)]
    assert [end.rpartition(": ")[2][:20] for end in ends] == [
        "requests do not pile",
        "stable or not is wit",
        "requests pile up",
    ]
    assert all(one != other for one, other in pairwise(ends))


@pytest.mark.parametrize("requests", [30, 60, 120])
def test_an_overload_too_short_to_serve_anything_is_said_to_be(requests: int, tmp_path: Path) -> None:
    """Whose backlog grows as fast as requests arrive: the band of what can be served would reach below zero."""
    spec = {"name": "short", "requests": requests, "arrivals": {"kind": "poisson", "rate": 900}, "output": 40}
    done = run(synthesise(parse_spec(spec | {"prompt": 20}, where="short")), tmp_path / "run")
    assert done.capacity is not None and done.capacity.low <= 0
    sentence = done.capacity.sentence
    assert "too short to tell how many can be served" in sentence and "-" not in sentence
