"""Learning a server from its clients' token times: its settings, its steps, the proof, and servers that mislead."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.learn_servers import GPU, SmallServer, changed, server, told
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.planning.costs import priced
from tokentwin.planning.deployments import stated_deployment
from tokentwin.planning.learn import questions as ask
from tokentwin.planning.learn import session
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.document import LearntServer
from tokentwin.planning.learn.kept_twin import KeptTwin
from tokentwin.planning.learn.learner import Learner
from tokentwin.planning.learn.proof import figures, made_up_traffic, predicted
from tokentwin.planning.learn.questions import Bounds, Question
from tokentwin.planning.learn.seen_steps import chunk_ns, decode_steps, prompt_steps
from tokentwin.planning.learn.server import TimeIsUp
from tokentwin.planning.learn.suspicions import suspicion
from tokentwin.planning.learn.twin import Setting, Twin
from tokentwin.planning.learn.watch import look
from tokentwin.planning.learn.watched import keep
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import WorkloadRequest

BOUNDS = Bounds(32, 8192)
FEW = Bounds(16, 2048, tokens=20_000, steps=100)  # short questions, which are simulated hundreds of times
KNOWN = {"policy": "vllm", "enable_prefix_caching": True}


def learnt_of_few(learner: Learner) -> Twin:
    """Return the twin, chosen among fewer candidates than usual: for each all answers are simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokentwin.planning.learn.learner._BUDGETS", (1024, 4096, 8192))
        patch.setattr("tokentwin.planning.learn.learner._FINALISTS", 2)
        patch.setattr("tokentwin.planning.learn.learner._AROUND", 3)
        patch.setattr("tokentwin.planning.learn.door_times._AFTER", (0.0, 0.5))
        patch.setattr("tokentwin.planning.learn.door_times._REQUEST_NS", (0.0, 1e5, 1e6))
        return learner.learn()


@pytest.fixture(scope="module")
def learnt() -> tuple[SmallServer, Learner, Twin]:
    """A server, what was asked, and its twin."""
    hidden = server("sglang", factor=1.2, max_num_batched_tokens=4096)
    known = {"async_scheduling": False, "policy": "sglang"}
    learner = Learner(hidden, told(), GPU, BOUNDS, known, within_pct=6.0)
    return hidden, learner, learnt_of_few(learner)


def test_all_settings_of_a_server_are_found(learnt) -> None:
    hidden, learner, twin = learnt
    true = hidden.deployment.scheduler
    found = twin.setting._replace(num_blocks=0)
    assert found == Setting("sglang", 4096, False, 24, 0, 16, True)
    # SGLang reserves the whole answer of a request, so numbers of blocks between two requests' worth behave alike.
    low, high = learner.findings.ranges["num_blocks"]
    assert low <= true.num_blocks <= high < 1.1 * low
    assert low <= twin.setting.num_blocks <= high
    document = session.document(learner, twin, (0.95, 1.05), (), session.KnownSettings({}, {}), "http://x", "twin")
    (blocks,) = [one for one in document.settings if one.name == "num_blocks"]
    assert blocks.others == f"{low:,} to {high:,} cannot be told apart"
    assert not learner.findings.at_least and not learner.findings.assumed


@pytest.mark.deep
@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm"])
def test_the_engine_and_its_loop_are_found(policy: str) -> None:
    hidden = server(policy, factor=0.9, max_num_batched_tokens=8192, async_scheduling=policy == "vllm")
    learner = Learner(hidden, told(), GPU, BOUNDS)
    setting = learner.learn().setting
    assert (setting.policy, setting.max_num_batched_tokens) == (policy, 8192)
    assert setting.async_scheduling == (policy == "vllm")
    assert not learner.findings.tried["policy"].alike_but(learner.findings.tried["policy"].values[0])


def test_the_twin_predicts_traffic_that_taught_it_nothing(learnt) -> None:
    hidden, _, twin = learnt
    for question in made_up_traffic(twin, BOUNDS):
        answer = hidden.ask(question)
        seen, said = figures(answer.sent_ns, answer.tokens_ns, list(answer.tokens_ns)), predicted(twin, answer)
        for (metric, statistic), value in seen.items():
            allowed = 0.08 if statistic == "p99" else 0.03
            assert said[metric, statistic] == pytest.approx(value, rel=allowed), (question.name, metric, statistic)


def test_the_twin_is_a_calibration_that_every_command_takes(learnt, tmp_path: Path) -> None:
    hidden, learner, twin = learnt
    interval = session.interval_of(learner, twin)
    assert 0.8 < interval[0] < 1 < interval[1] < 1.25
    traffic = made_up_traffic(twin, BOUNDS)
    late_ms = session.late_ms_of(learner, twin)
    assert 0 <= late_ms < 5
    proof = session.prove(learner, twin, interval, late_ms, traffic, print)
    assert {figure.traffic for figure in proof} == {"chats", "long-prompts"}
    assert all(figure.floor_pct == 0 for figure in proof if figure.traffic == "chats")  # this server has no noise
    document = session.document(
        learner, twin, interval, proof, session.KnownSettings({}, {}), "http://x", str(tmp_path)
    )
    session.save(tmp_path, learner, twin, interval, document)
    assert LearntServer.read(json.loads((tmp_path / "learnt.json").read_text())) == document
    assert "-c" in str(list(document.report())[-1])
    deployment = stated_deployment(tmp_path / "deployment.yaml")
    assert yaml.safe_load((tmp_path / "deployment.yaml").read_text())["scheduler"]["max_num_batched_tokens"] == 4096
    cost = priced(str(tmp_path), None, deployment).cost
    sizes = decode_steps(next(a for a in learner.answers if a.question.name == "plateau-16-128")).sizes
    assert cost.pure.parts(sizes).keys() and np.allclose(sum(cost.pure.parts(sizes).values()), twin.step_ns(sizes))
    assert FrontDoor.load(tmp_path).client_ns == pytest.approx(3e6, rel=0.5)

    kept = KeptTwin.load(tmp_path)
    assert kept.twin.setting == twin.setting
    assert not look(kept, hidden, {}).drifted
    slower = SmallServer(hidden.deployment, factor=1.5)
    assert {"decode steps", "prefill"} <= {layer.layer for layer in look(kept, slower, {}).drifted}
    farther = SmallServer(hidden.deployment, FrontDoor(client_ns=40e6), factor=1.2)
    assert [layer.layer for layer in look(kept, farther, {}).drifted] == ["API server"]
    forgetful = server("sglang", factor=1.2, max_num_batched_tokens=4096, enable_prefix_caching=False)
    assert [layer.layer for layer in look(kept, forgetful, {}).drifted] == ["prefix caching"]
    assert [layer.layer for layer in look(kept, hidden, {"num_blocks": 17}).drifted] == ["KV blocks"]
    assert 'tokentwin_twin_drift{layer="KV blocks"} 1' in look(kept, hidden, {"num_blocks": 17}).metrics()

    assert trust_in(tmp_path) == "validated"
    keep(tmp_path, look(kept, farther, {}), None)
    assert trust_in(tmp_path) == "extrapolated"
    keep(tmp_path, look(kept, hidden, {}), None)
    assert trust_in(tmp_path) == "validated"


def trust_in(folder: Path) -> str:
    """Return the level of trust in decode steps of the twin in `folder`, which is not that of a changed server."""
    cost = priced(str(folder), None, stated_deployment(folder / "deployment.yaml")).cost
    cost.decode_run_ns(4, 4 * 500, 4 * 500**2, 1)
    trust = cost.trust()
    assert ("the server has changed since its twin was learnt" in trust.reason) == (trust.level == "extrapolated")
    return trust.level


def test_known_settings_are_not_asked_about_and_what_no_question_reaches_is_a_lower_limit() -> None:
    hidden = server(max_num_seqs=200)
    known = KNOWN | {"max_num_batched_tokens": 2048, "async_scheduling": False, "num_blocks": 3000}
    learner = Learner(hidden, told(), GPU, FEW, known, within_pct=50.0)
    found = learnt_of_few(learner).setting._asdict()
    assert found == found | known and found["max_num_seqs"] >= 200
    assert learner.findings.at_least == {"max_num_seqs": 16}
    assert not [name for name in hidden.asked if name.startswith("full-memory")]


def test_a_device_without_kernel_times_has_linear_prices(tmp_path: Path) -> None:
    hidden = SmallServer(server(max_num_batched_tokens=1024).deployment, cost=TokenCost(20_000_000, 200_000, 40))
    known = KNOWN | {"async_scheduling": False}
    learner = Learner(hidden, told(), None, Bounds(32, 4096, tokens=40_000, steps=150), known, within_pct=8.0)
    twin = learnt_of_few(learner)
    assert twin.setting.max_num_batched_tokens == 1024 and twin.setting.max_num_seqs == 24
    assert twin.setting.num_blocks == pytest.approx(3000, rel=0.02)
    answer = hidden.ask(made_up_traffic(twin, BOUNDS)[0])
    seen, said = figures(answer.sent_ns, answer.tokens_ns, list(answer.tokens_ns)), predicted(twin, answer)
    assert all(said[name] == pytest.approx(seen[name], rel=0.1) for name in seen if name[1] != "p99")
    document = session.document(
        learner, twin, (0.95, 1.05), (), session.KnownSettings({}, {}), "http://x", str(tmp_path)
    )
    session.save(tmp_path, learner, twin, (0.95, 1.05), document)
    cost = priced(str(tmp_path), None, stated_deployment(tmp_path / "deployment.yaml")).cost
    assert cost.pure.calibration.interval == (0.95, 1.05)
    kept = KeptTwin.load(tmp_path)
    assert kept.twin.setting == twin.setting
    assert trust_in(tmp_path) == "interpolated"
    keep(tmp_path, look(kept, hidden, {"num_blocks": 17}), None)
    assert trust_in(tmp_path) == "extrapolated"


class Hurried(SmallServer):
    """A server whose time for questions is over after some of them."""

    most = 0

    def ask(self, question: Question) -> Answer:
        if len(self.asked) >= self.most:
            raise TimeIsUp
        return super().ask(question)


@pytest.mark.parametrize("most", [3, 7])
def test_without_time_it_says_what_it_assumed(most: int) -> None:
    hidden = Hurried(server().deployment)
    hidden.most = most
    known = KNOWN | {"max_num_batched_tokens": 2048, "async_scheduling": False}
    learner = Learner(hidden, told(), GPU, FEW, known)
    if most == 3:
        with pytest.raises(UserError, match="minutes"):
            learner.learn()
        return
    learnt_of_few(learner)
    assert learner.findings.assumed == {"num_blocks", "block_size"}


# Steps from token times


@cache
def decoded(rows: int, context: int) -> tuple[Answer, OperationCost]:
    hidden = server(num_blocks=20_000)
    return hidden.ask(ask.plateau(rows, context, BOUNDS)), predicted_cost(GPU, hidden.deployment)


@given(st.sampled_from([2, 5, 24]), st.sampled_from([100, 3000]), st.integers(0, 2**16))
def test_decode_steps_are_those_of_the_engine(rows: int, context: int, jitter: int) -> None:
    """However the tokens of a step are spread over a tenth of it."""
    answer, cost = decoded(rows, context)
    draw = np.random.default_rng(jitter)
    late = changed(answer, lambda id, times: times + draw.integers(0, 500_000, len(times)))
    steps = decode_steps(late)
    assert len(steps) > 3
    expected = sum(cost.parts(steps.sizes).values()) + cost.host.step_ns + cost.host.row_ns * rows
    assert np.median(np.abs(steps.measured_ns / expected - 1)) < 0.02
    assert max(steps.sizes.decode_rows) == rows


def test_steps_with_prompts_are_those_of_the_engine() -> None:
    hidden, question = server(), ask.prompts_into_decodes(2, BOUNDS)
    learner = Learner(hidden, told(), GPU, BOUNDS, KNOWN)
    settings = Setting.of(hidden.deployment)._asdict()
    calm = [hidden.ask(one) for one in (ask.lone_prompts(BOUNDS), *ask.plateaus(BOUNDS))]
    twin = learner.prior("vllm").having(**settings).fitted(calm, learner.prior("vllm").times)
    answer = hidden.ask(question)
    (said,) = twin.answers([answer])
    steps = prompt_steps(answer, said)
    assert len(steps) >= 8 and max(steps.sizes.prefill_tokens) == 2046  # the rest of the budget beside two decodes
    cost = predicted_cost(GPU, hidden.deployment)
    expected = sum(cost.parts(steps.sizes).values()) + cost.host.step_ns + 3 * cost.host.row_ns
    assert np.max(np.abs(steps.measured_ns / expected - 1)) < 0.03
    late = changed(answer, lambda id, times: times + 30_000_000 * (id % 2))
    assert len(prompt_steps(late, said)) < len(steps) / 2  # tokens of one step that come apart


def test_the_time_to_write_a_token_is_seen() -> None:
    hidden = SmallServer(server().deployment, FrontDoor(client_ns=1e6, chunk_ns=50_000))
    assert chunk_ns([hidden.ask(ask.plateau(16, 128, BOUNDS))]) == pytest.approx(50_000, rel=0.05)


# Servers that mislead


@pytest.fixture(scope="module")
def lone() -> Answer:
    return server().ask(ask.lone_prompts(BOUNDS))


@pytest.fixture(scope="module")
def repeated() -> Answer:
    return server().ask(ask.repeated_prompt(1, BOUNDS))


def test_an_honest_server_is_not_suspected(lone, repeated) -> None:
    assert suspicion(lone, repeated, [repeated]) == ""


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("buffers tokens", lambda id, times: times[np.minimum(np.arange(len(times)) // 4 * 4 + 3, len(times) - 1)]),
        ("in one piece", lambda id, times: times[-1:]),
        ("different GPUs", lambda id, times: times[0] + (times - times[0]) * (1 + id % 2)),
        ("changed its speed", lambda id, times: times[0] + (times - times[0]) * (1 + (id < 7))),
    ],
)
def test_a_server_that_is_not_one_engine_is_named(what: str, how: Any, lone, repeated) -> None:
    assert what in suspicion(changed(lone, how), repeated, [repeated])


def test_a_cache_of_answers_and_a_rate_limit_are_named(lone, repeated) -> None:
    cached = changed(repeated, lambda id, times: times if id == 0 else times[0] + np.arange(len(times)) * 1000)
    assert "cache of answers" in suspicion(lone, cached, [cached])
    limited = Answer(repeated.question, repeated.sent_ns, repeated.tokens_ns, unanswered=5)
    assert "5 of 8 requests" in suspicion(lone, repeated, [limited])


# Questions


@given(st.integers(16, 512), st.integers(256, 32_768))
def test_no_question_asks_for_more_than_is_allowed(concurrency: int, longest: int) -> None:
    bounds = Bounds(concurrency, longest)
    for question in (
        ask.lone_prompts(bounds),
        *ask.plateaus(bounds),
        ask.prompts_into_decodes(2, bounds),
        ask.prompts_at_once(3000, bounds),
        ask.burst(bounds),
        ask.full_memory(10**6, concurrency, 2048, bounds),
        ask.repeated_prompt(3, bounds),
        ask.cached_prefixes(longest // 2, 3, bounds) or ask.burst(bounds),
        *ask.long_plateaus(bounds),
        ask.closed_loop(16, bounds),
        ask.two_lengths(64, longest, bounds),
    ):
        requests = list(question.workload.requests)
        assert all(one.prompt_len + one.output_len <= longest for one in requests), question.name
        assert all(one.prompt_len > 0 and one.output_len > 0 for one in requests)
        assert at_once(requests, question.workload.concurrency) <= concurrency, question.name


def at_once(requests: list[WorkloadRequest], concurrency: int | None) -> int:
    if concurrency is not None:
        return concurrency
    return sum(one.turn == 0 for one in requests)  # one turn of a session follows another
