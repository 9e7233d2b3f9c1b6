"""Learning a server: the engines behind a URL, the block size of its prefix cache, and the choice of questions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.planning.learn_servers import GPU, SmallServer, changed, server, told
from tokentwin.calibration.steps.external_calibration import blind, predicted_cost
from tokentwin.planning.learn import questions as ask
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.committee import Committee, Member
from tokentwin.planning.learn.engines import engines_of
from tokentwin.planning.learn.findings import Findings
from tokentwin.planning.learn.memory import with_block_size
from tokentwin.planning.learn.proof import made_up_traffic
from tokentwin.planning.learn.questions import Bounds
from tokentwin.planning.learn.recorded_steps import recorded_settings, recorded_steps
from tokentwin.planning.learn.reported import counted, running, sglang_blocks, sglang_settings, vllm_settings
from tokentwin.planning.learn.seen_steps import seen_steps
from tokentwin.planning.learn.session import OwnTraffic
from tokentwin.planning.learn.step_times import CorrectedKernels
from tokentwin.planning.learn.twin import ROUTERS, Setting, Twin
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.live_recording import Journal
from tokentwin.traces.recording import JOURNAL

BOUNDS = Bounds(64, 8192)


def fleet(replicas: int, router: str = ROUTERS[0], policy: str = "vllm", **scheduler: int) -> SmallServer:
    """Return `replicas` servers behind a router."""
    one = server(policy, **scheduler)
    setting = Setting.of(one.deployment)._replace(replicas=replicas, router=router)
    return replace(one, deployment=setting.applied(one.deployment))


def twin_of(hidden: SmallServer, **settings: object) -> Twin:
    """Return the twin of a small server that knows everything, but for other `settings`."""
    times = CorrectedKernels(GPU, blind(GPU, hidden.deployment).correction)
    return Twin(told(), Setting.of(hidden.deployment)._replace(**settings), times, hidden.front_door)


@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_engines_are_counted_by_the_streams_that_a_prompt_delays(replicas: int, router: str, policy: str) -> None:
    hidden = fleet(replicas, router, policy, max_num_batched_tokens=8192)
    assert engines_of(hidden.ask(ask.prompts_into_decodes(12, BOUNDS))) == replicas


def test_steps_of_two_engines_are_told_apart() -> None:
    hidden = fleet(2)
    answer = hidden.ask(ask.plateau(32, 128, BOUNDS))
    twin = twin_of(hidden)
    (said,) = twin.answers([answer])
    assert len(said.of_each_engine) == 2
    steps = seen_steps(answer, said)
    assert len(steps) > 10 and set(steps.sizes.decode_rows.tolist()) <= {0, 16}


class CheapSmallSteps:
    """Costs of which those of steps with few tokens are only a `share`."""

    def __init__(self, cost: CostModel, share: float) -> None:
        self.cpu_ns, self._cost, self._share = cost.cpu_ns, cost, share

    def step_ns(self, plan: StepPlan) -> int:
        return round(self._cost.step_ns(plan) * (self._share if plan.prefill_tokens < 200 else 1))


@pytest.mark.parametrize("size", [1, 16, 32, 64])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_block_size_is_claimed_only_if_prefixes_exclude_the_others(size: int, noise: float) -> None:
    """Whatever a further step really costs, and the more so if times are noisy, as on a CPU."""
    hidden = fleet(2, block_size=size, enable_prefix_caching=True)
    rng = np.random.default_rng(size)

    def noisy(answer: Answer) -> Answer:
        factors = {id: np.exp(rng.normal(0, noise)) for id in answer.tokens_ns}
        return changed(answer, lambda id, times: answer.sent_ns[id] + (times - answer.sent_ns[id]) * factors[id])

    claimed = []
    for share in (1.0, 0.4):  # of the cost of a further step that the twin knows
        real = replace(hidden, cost=CheapSmallSteps(predicted_cost(GPU, hidden.deployment), share))
        findings, believed = Findings({}), twin_of(hidden, block_size=16, num_blocks=6000)
        twin = with_block_size(believed, lambda question, real=real: noisy(real.ask(question)), BOUNDS, findings)
        tokens = twin.setting.num_blocks * twin.setting.block_size
        assert tokens == pytest.approx(6000 * 16, rel=0.01) and not findings.assumed
        if not findings.undecided:
            claimed.append(twin.setting.block_size)
        else:
            assert findings.tried["block_size"].alike_but(None)
    assert set(claimed) <= {size} and (noise or claimed)


def test_the_next_question_is_one_about_which_twins_differ() -> None:
    hidden = server(max_num_batched_tokens=2048)
    twins = [twin_of(hidden, max_num_batched_tokens=budget) for budget in (2048, 8192)]
    traffic = made_up_traffic(twins[0], BOUNDS)
    committee = Committee([Member(twin) for twin in twins], [0.0, 0.0], traffic)
    calm, telling = ask.plateau(4, 128, BOUNDS), ask.prompts_at_once(3000, BOUNDS)
    assert committee.narrowing(calm) == pytest.approx(0, abs=1e-9) and committee.narrowing(telling) > 0
    assert committee.best_question([calm, telling]) == telling
    agreed = Committee(committee.members, [0.0, -50.0], traffic)
    assert agreed.band_pct < 0.01 < committee.band_pct
    assert committee.weights == pytest.approx([0.5, 0.5])


def test_a_slow_server_is_proved_on_shorter_traffic() -> None:
    twin = twin_of(server())
    slow = replace(twin, times=twin.times.scaled(60.0))
    for quick, short in zip(made_up_traffic(twin, BOUNDS), made_up_traffic(slow, BOUNDS), strict=True):
        usual, few = (list(question.workload.requests) for question in (quick, short))
        assert len(usual) == 120 and 40 <= len(few) < 120
        assert np.mean([one.output_len for one in few]) < np.mean([one.output_len for one in usual])
        assert few[-1].arrival_ns < 200e9


@pytest.mark.parametrize(("count", "taught", "proof"), [(400, 60, 300), (40, None, 40), (100, 25, 75)])
def test_traffic_of_ones_own_is_cut_into_a_question_and_the_proof(count: int, taught: int | None, proof: int) -> None:
    requests = [WorkloadRequest(n, 1_000_000 * n, ((PRIVATE, 100),), 10) for n in range(count)]
    requests.append(WorkloadRequest(count, 10**9, ((PRIVATE, 9000),), 10))  # longer than allowed
    own = OwnTraffic.of(Workload(requests, "own"), BOUNDS)
    asked = [] if own.taught is None else list(own.taught.workload.requests)
    held_back = list(own.proof.workload.requests)
    assert (len(asked) or None, len(held_back)) == (taught, proof)
    assert held_back[0].arrival_ns == 0 and not {one.id for one in asked} & {one.id for one in held_back}
    assert own.proof.workload.concurrency == BOUNDS.concurrency


VLLM = """
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="512"} 1.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="1",num_gpu_blocks="512"} 1.0
vllm:iteration_tokens_total_count{engine="0"} 100.0
vllm:iteration_tokens_total_count{engine="1"} 50.0
vllm:num_preemptions_total{engine="0"} 3.0
"""


def test_what_vllm_reports_is_read() -> None:
    expected = {"num_blocks": 512, "block_size": 32, "enable_prefix_caching": True, "policy": "vllm", "replicas": 2}
    assert vllm_settings(VLLM) == expected
    assert "policy" not in vllm_settings(VLLM + "tokentwin:recording 0\n")  # our server imitates vLLM's metrics
    assert vllm_settings("") == {}
    later = VLLM.replace("100.0", "140.0").replace("3.0", "4.0")
    assert counted(VLLM, later) == (40, 1)
    assert counted("", "") is None


@pytest.mark.parametrize("gauge", ["vllm:num_requests_running", "sglang:num_running_reqs"])
def test_running_requests_are_read(gauge: str) -> None:
    assert running(f'{gauge}{{engine="0"}} 2.0\n{gauge}{{engine="1"}} 1.0\n') == 3
    assert running(VLLM) == 0


def test_what_sglang_reports_is_read() -> None:
    info = {"disable_radix_cache": False, "disable_overlap_schedule": False, "chunked_prefill_size": 8192}
    info |= {"max_running_requests": None, "page_size": 16, "dp_size": 1, "max_total_num_tokens": 160_000}
    assert sglang_settings(info) == {
        "policy": "sglang",
        "enable_prefix_caching": True,
        "async_scheduling": True,
        "max_num_batched_tokens": 8192,
        "block_size": 16,
        "replicas": 1,
        "num_blocks": 10_000,
    }
    assert sglang_settings({"version": "1"}) == {}


def test_what_sglang_reports_in_its_metrics_is_read() -> None:
    ranks = [
        f'sglang:page_size{{tp_rank="{rank}"}} 16.0\nsglang:num_pages{{tp_rank="{rank}"}} 900.0\n' for rank in "01"
    ]
    expected = {"policy": "sglang", "block_size": 16, "num_blocks": 900}
    assert sglang_blocks("".join(ranks)) == expected
    assert sglang_blocks('sglang:cache_config_info{page_size="16",num_pages="900"} 1.0\n') == expected  # before 0.5.11
    assert sglang_blocks(VLLM) == {}


def test_counted_steps_tell_a_twin_with_other_steps() -> None:
    hidden = server(max_num_batched_tokens=2048)
    answer = hidden.ask(ask.prompts_at_once(3000, BOUNDS))
    right, wrong = twin_of(hidden), twin_of(hidden, max_num_batched_tokens=8192)
    (said,) = right.answers([answer])
    knowing = replace(answer, counted=said.counted)
    assert right.likelihood([knowing]) == pytest.approx(right.likelihood([answer]))
    assert wrong.likelihood([knowing]) < wrong.likelihood([answer]) - 0.1


def test_the_recorder_of_a_server_tells_its_steps_and_settings(tmp_path: Path) -> None:
    hidden = server()
    answer = hidden.ask(ask.closed_loop(16, BOUNDS))
    twin = twin_of(hidden)
    (said,) = twin.answers([answer])
    with pytest.raises(UserError, match="recorder"):
        recorded_steps(tmp_path)
    journal = Journal(tmp_path / JOURNAL)
    journal.add("run", {"clock": "real"})
    for row in said.steps.to_pylist():
        journal.add("step", row)
    stated = hidden.deployment.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(stated))
    assert recorded_settings(tmp_path) == Setting.of(hidden.deployment)._asdict()
    steps = recorded_steps(tmp_path)
    assert len(steps) == said.steps.num_rows - 1
    assert abs(np.median(np.log(steps.measured_ns / twin.step_ns(steps.sizes)))) < 0.02
