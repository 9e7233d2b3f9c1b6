"""A user's own cost model: the example of the docs, and results that cannot be times."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.command import tokentwin
from tokentwin.commands.compare import NO_DIFFERENCE
from tokentwin.commands.simulate import simulate
from tokentwin.planning.costs import priced
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.user_code.own_cost import OwnCost, identity
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.recording import Recording

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
PLAN = StepPlan.from_amounts(decode_rows=3, decode_context=60, decode_squares=1200, sampled_rows=3)
SCHEDULER = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512, "num_blocks": 200}
TRACE = "".join(
    json.dumps({"arrival_s": at / 20, "prompt_tokens": 40 + at, "output_tokens": 20}) + "\n" for at in range(12)
)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL))
    (tmp_path / "affine_of_the_docs.py").write_text(code, encoding="utf-8")
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "affine_of_the_docs:Affine"


def test_the_example_of_the_docs_prices_a_simulation(example: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "deployment.yaml").write_text(json.dumps({"scheduler": SCHEDULER}))
    command = [str(tmp_path / "trace.jsonl"), "-c", example, "-d", str(tmp_path / "deployment.yaml")]
    done = CliRunner().invoke(simulate, [*command, "-o", str(tmp_path / "out"), "--format", "json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["trust"]["level"] == "unknown" and example in told["trust"]["reason"]
    assert (
        told["bands"]["e2e_ms"]["p50"][0] < told["distributions"]["e2e_ms"]["p50"] < told["bands"]["e2e_ms"]["p50"][1]
    )
    run = Recording.load(tmp_path / "out")
    assert run.run["calibration"] == identity(example) and example in run.run["calibration"]
    cost = TokenCost(5_000_000, 20_000, 400)
    for step in run.steps.to_pylist():
        plan = StepPlan.from_amounts(
            **{name: step[name] for name in ("prefill_tokens", "prefill_pairs", "decode_rows")}
        )
        plan.decode_context = step["decode_context"]
        assert step["end_ns"] - step["start_ns"] == cost.step_ns(plan)


SWEEP = {
    "base": {
        "deployment": {"scheduler": SCHEDULER},
        "calibration": "mine.py:roofline",
        "workload": {"trace": "trace.jsonl"},
    },
    "grid": {"deployment.scheduler.max_num_seqs": [2, 8]},
}


def test_the_commands_of_the_docs_work(example: str, tmp_path: Path) -> None:
    """And a sweep, whose file the page leaves out."""
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "deployment.yaml").write_text(json.dumps({"scheduler": SCHEDULER}))
    (tmp_path / "sweep.yaml").write_text(json.dumps(SWEEP))
    commands = re.findall(r"^tokentwin (.*mine\.py:.*)$", DOCS, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["simulate", "diagnose", "plan", "compare"]
    for command in [*commands, "sweep sweep.yaml -o swept --jobs 1"]:
        done = tokentwin(*shlex.split(command), cwd=tmp_path)
        assert done.returncode == (NO_DIFFERENCE if command.startswith("compare") else 0), done


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def wrong(plan): return 1.5", "returned 1.5 instead of whole nanoseconds"),
        ("def wrong(plan): raise SystemExit", "raised SystemExit"),
        ("def wrong(): return 1", "raised TypeError"),
        ("wrong = 3", "neither a function of a step's plan nor a class with step_ns"),
        ("class wrong: pass", "neither a function of a step's plan nor a class with step_ns"),
        ("def other(plan): return 1", "has no wrong"),
    ],
)
def test_a_function_that_is_no_cost_model_is_one_line(body: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(UserError, match=says) as caught:
        priced(f"{tmp_path}/mine.py:wrong", None, Deployment()).cost.step_ns(PLAN)
    assert "\n" not in str(caught.value)


def test_steps_in_a_row_cost_what_each_costs_alone(example: str) -> None:
    cost = priced(example, None, Deployment()).cost
    plans = [StepPlan.from_amounts(decode_rows=3, decode_context=60 + 3 * at, sampled_rows=3) for at in range(5)]
    assert list(cost.decode_run_ns(3, 60, 1200, 5)) == [cost.cpu_ns(plan) + cost.step_ns(plan) for plan in plans]
    fast, slow = cost.ends()
    assert (fast.step_ns(PLAN), slow.step_ns(PLAN)) == tuple(round(f * cost.step_ns(PLAN)) for f in (0.9, 1.15))


def test_many_leaps_are_priced(example: str) -> None:
    """More than an observer of other cost models notes at once."""
    cost = priced(example, None, Deployment()).cost
    assert {tuple(cost.decode_run_ns(3, 60, 1200, 2)) for _ in range(4200)} == {(5_060_025, 5_060_026)}


def answering(**methods: Any) -> Any:
    def always(answer: Any) -> Any:
        def method(self: Any, *arguments: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return method

    return type("Mine", (), {name: always(answer) for name, answer in methods.items()})()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (1.5e6, "returned 1500000.0 instead of whole nanoseconds"),
        (float("nan"), "returned nan instead of whole"),
        (None, "returned None instead of whole"),
        (True, "returned True instead of whole"),
        (-1, "returned -1 ns"),
        (10**30, "instead of a time of 0 or more"),
        (ZeroDivisionError("no\ntime"), "raised ZeroDivisionError"),
        (SystemExit(0), "raised SystemExit"),
    ],
)
@pytest.mark.parametrize("method", ["step_ns", "cpu_ns", "decode_run_ns"])
def test_an_answer_that_is_no_time_is_one_line_with_model_and_step(method: str, answer: Any, says: str) -> None:
    given = [answer] if method == "decode_run_ns" and not isinstance(answer, BaseException) else answer
    cost = OwnCost("mine:Mine", answering(**{"step_ns": 5, method: given}))
    with pytest.raises(UserError) as caught:
        list(cost.decode_run_ns(3, 60, 1200, 1)) if method == "decode_run_ns" else getattr(cost, method)(PLAN)
    line = str(caught.value)
    assert "\n" not in line and says in line
    assert "mine:Mine" in line and method in line and "decode_rows=3, decode_context=60" in line


def test_a_run_of_another_length_is_refused() -> None:
    with pytest.raises(UserError, match="returned 1 times instead of 2"):
        list(OwnCost("mine:Mine", answering(step_ns=5, decode_run_ns=[5])).decode_run_ns(3, 60, 1200, 2))


UNEQUAL = """
calls = 0

class Mine:
    def step_ns(self, plan):
        global calls
        calls += 1
        return 5_000_000 + 20_000 * plan.tokens

class Writes(Mine):
    def step_ns(self, plan):
        plan.sampled_rows = 0
        return super().step_ns(plan)

class Shortens(Mine):
    def step_ns(self, plan):
        for row in plan.listed:
            row.request.true_len = row.request.known + 1
        return super().step_ns(plan)

class EverySecondCall(Mine):
    def step_ns(self, plan):
        return super().step_ns(plan) if calls % 2 else super().step_ns(plan) // 2

class CheapOnceSeen(Mine):
    seen = set()
    def step_ns(self, plan):
        try:
            return super().step_ns(plan) // (1 + (plan in self.seen))
        finally:
            self.seen.add(plan)

class Drifts(Mine):
    def step_ns(self, plan):
        return super().step_ns(plan) - calls // 40

class DriftsOnTheCpu(Mine):
    def cpu_ns(self, plan):
        return calls // 40

class CheapRuns(Mine):
    def decode_run_ns(self, rows, context, squares, steps):
        return [1] * steps
"""


@pytest.mark.parametrize("leaps", [False, True])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Mine", ""),
        ("Writes", "step_ns raised AttributeError: can't set attribute"),
        ("Shortens", "step_ns raised AttributeError: 'StepAmounts' object has no attribute 'listed'"),
        ("EverySecondCall", r"step_ns returned [\d,]+ ns, and later [\d,]+ ns, in a step of"),
        ("CheapOnceSeen", r"step_ns returned [\d,]+ ns, and later [\d,]+ ns, in a step of"),
        ("Drifts", r"step_ns returned [\d,]+ ns, and later [\d,]+ ns, in a step of"),
        ("DriftsOnTheCpu", r"cpu_ns returned \d+ ns, and later \d+ ns, in a step of"),
        ("CheapRuns", r"decode_run_ns returned 1 ns, while cpu_ns and step_ns have [\d,]+ ns, in a step of"),
    ],
)
def test_equal_steps_take_equally_long_in_the_run_itself(name: str, says: str, leaps: bool, tmp_path: Path) -> None:
    """And a repeated step costs a bounded number of calls: an eighth, besides the first few."""
    (tmp_path / "mine.py").write_text(UNEQUAL)
    requests = [WorkloadRequest(at, at * 40_000_000, (("", 40 + at),), 20) for at in range(60)]
    deployment = Deployment(scheduler=SchedulerConfig(**SCHEDULER))
    cost, sink = priced(f"{tmp_path}/mine.py:{name}", None, deployment).cost, TableSink()
    cluster = Cluster(deployment, cost, sink, shares_prefixes=False, leaps=leaps, steps=not leaps)
    if says and not (name == "CheapRuns" and not leaps):
        with pytest.raises(UserError, match=says) as caught:
            cluster.run(Workload(requests, shares_prefixes=False))
        assert "\n" not in str(caught.value)
        return
    steps = cluster.run(Workload(requests, shares_prefixes=False)).steps
    if name == "Mine":
        calls = sys.modules[type(cost.pure._step.__self__).__module__].calls
        assert steps > 400 and (leaps or steps <= calls < 1.2 * steps + 32)


@pytest.mark.parametrize("interval", [(0, 1), (1.1, 1.2), (0.9, float("nan")), "wide", 3])
def test_an_interval_that_is_none_is_refused(interval: Any) -> None:
    model = answering(step_ns=5)
    model.interval = interval
    with pytest.raises(UserError, match="states the interval"):
        OwnCost("mine:Mine", model)


def test_without_an_interval_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_deployments.py").write_text(
        "class Sized:\n"
        "    def __init__(self, deployment):\n"
        "        self.each = deployment.tensor_parallel_size\n"
        "    def step_ns(self, plan):\n"
        "        return self.each\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cost = priced("of_deployments:Sized", None, Deployment(tensor_parallel_size=4)).cost
    assert cost.step_ns(PLAN) == 4
    level, reason = cost.trust()
    assert level == "unknown" and "does not say how far off" in reason
    assert [end.step_ns(PLAN) for end in cost.ends()] == [4, 4]


def test_what_goes_with_it_and_what_does_not(example: str) -> None:
    with pytest.raises(UserError, match="gpu"):
        priced(example, "H100", Deployment())
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        priced(example, None, Deployment(gpu_memory_utilization=0.9))
    stages = Deployment(pipeline_parallel_size=2, scheduler=SchedulerConfig(async_scheduling=False))
    with pytest.raises(UserError, match="pipeline_parallel_size: 2: needs the time of each stage"):
        priced(example, None, stages)
    with pytest.raises(UserError, match="has no Nothing"):
        priced("affine_of_the_docs:Nothing", None, Deployment())
