"""What workers share and leave behind: tables of a cost model, and nothing after Ctrl-C."""

import operator
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.planning.plan_samples import question, traffic
from tokentwin.calibration.steps.observed import ObservedOperations, ObservedPipeline
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.planner import _Pace
from tokentwin.planning.plan.pricing import KernelPricing
from tokentwin.planning.plan.trial import _Watch, try_fleet
from tokentwin.planning.progress import TimeLeft
from tokentwin.planning.workers import Overdue, WorkerDied, Workers, mark
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan

ROOT = Path(__file__).parents[2]
SCHEDULER = SchedulerConfig(max_num_seqs=200, max_num_batched_tokens=1024, max_model_len=131072, num_blocks=4000)
LLAMA = Deployment(model="Llama-3.1-8B", device="cuda", scheduler=SCHEDULER)


def step(rows: int, context: int, prompt: int) -> StepPlan:
    plan = StepPlan(0, DecodeSet(1), 0)
    plan.add_decodes(rows, context, context * context // max(rows, 1))
    if prompt:
        plan.prefill_rows, plan.prefill_tokens, plan.prefill_pairs = 1, prompt, prompt * (prompt + 1) // 2
    return plan


def test_prices_of_a_gpu_with_few_tables_go_to_other_processes() -> None:
    """RTX 4090 has few shapes of its own, and the rest from GPUs like it."""
    pricing = KernelPricing()
    engine = Engine("RTX-4090", 1.0, LLAMA)
    plan = step(3, 900, 500)
    ns = pricing(engine).step_ns(plan)
    assert pickle.loads(pickle.dumps(pricing))(engine).step_ns(plan) == ns


@pytest.mark.parametrize("stages", [1, 2])
def test_a_cost_model_asked_before_prices_as_a_new_one_and_stands_for_its_own_steps(stages: int) -> None:
    engine = Engine("H100", 2.0, LLAMA.model_copy(update={"pipeline_parallel_size": stages}))
    steps = [step(rows, 300 * rows, prompt) for rows, prompt in ((3, 0), (70, 500), (0, 900), (199, 20))]
    steps.append(step(199, 199 * 120_000, 0))  # further than kernels were measured
    pricing = KernelPricing()
    first = pricing(engine)
    said = [first.step_ns(plan) for plan in steps]
    again = pricing(engine)
    assert again.trust() == ("unknown", "no step was priced")
    again.step_ns(steps[0])
    alone = KernelPricing()(engine)
    alone.step_ns(steps[0])
    assert again.trust() == alone.trust() != first.trust()
    assert isinstance(again, ObservedOperations) and isinstance(alone, ObservedOperations)
    assert again.interval == alone.interval
    assert [again.step_ns(plan) for plan in steps] == [KernelPricing()(engine).step_ns(plan) for plan in steps] == said
    if stages > 1:
        assert isinstance(again, ObservedPipeline) and isinstance(first, ObservedPipeline)
        assert [again.stages_ns(plan) for plan in steps] == [first.stages_ns(plan) for plan in steps]


def test_a_trial_that_was_stopped_says_what_broke() -> None:
    query = question("ttft_ms p99<=400", "tpot_ms p95<=45", workload=traffic(9000, 60.0, tokens=40))
    of = Engine("slow", 1.0, Deployment(scheduler=SCHEDULER.model_copy(update={"max_num_seqs": 8})))
    stopped = try_fleet(query, of, 1)
    assert stopped.figures is None and stopped.broken in query.objectives.slos
    only = replace(query, objectives=replace(query.objectives, slos=(stopped.broken,)))
    assert not try_fleet(only, of, 1, to_the_end=True).met


def test_a_trial_of_few_requests_stops_early_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    look = _Watch.add_requests

    def counted(watch: _Watch, columns: dict[str, list[object]]) -> None:
        seen.append(len(columns["status"]))
        look(watch, columns)

    monkeypatch.setattr(_Watch, "add_requests", counted)
    query = question("ttft_ms p99<=400", workload=traffic(900, 60.0))
    of = Engine("slow", 1.0, Deployment(scheduler=SCHEDULER.model_copy(update={"max_num_seqs": 8})))
    assert try_fleet(query, of, 1).figures is None
    assert 9 < sum(seen) < 300  # nine of 900 may be late


def test_a_task_that_takes_too_long_is_ended_and_no_other() -> None:
    with Workers(60, jobs=1) as workers:
        found = dict(workers.as_completed([operator.neg, time.sleep, operator.neg], limit_s=4))
    assert (found[0], found[2]) == (-60, -60) and isinstance(found[1], Overdue)


def test_a_worker_that_dies_costs_its_task_and_no_other() -> None:
    """Tasks of the standard library: a worker that imports no more than that starts quickly."""
    with Workers(3, jobs=2) as workers:
        found = dict(workers.as_completed([operator.neg, os._exit, operator.neg]))
        assert (found[0], found[2]) == (-3, -3) and isinstance(found[1], WorkerDied)
        with pytest.raises(UserError, match="a worker process died"):
            workers.run([operator.neg, os._exit])
        with pytest.raises(TypeError, match="has no len"):
            workers.run([len, operator.neg])
        assert workers.run([operator.neg] * 3) == [-3] * 3
    assert Workers(3, jobs=1).run([operator.neg]) == [-3]


def test_what_is_wrong_reads_the_same_from_another_process() -> None:
    error = UserError("field", 3, "is refused")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and (again.field, again.value, again.remedy) == ("field", 3, "is refused")


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"""
from pathlib import Path
from tests.planning.tiny_job import sleep
from tokentwin.planning.workers import Workers
with Workers(Path({str(begun)!r}), jobs=2) as workers:
    workers.run([sleep, sleep])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    until(begun.exists)
    parent.kill()
    parent.wait()
    until(lambda: not group(parent.pid))


def group(leader: int) -> list[int]:
    """The processes of a group that are alive."""
    alive = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, of, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            if int(of) == leader and state not in "ZX":
                alive.append(int(path.name))
    return alive


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


@pytest.mark.parametrize("end", [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)])
def test_ctrl_c_ends_a_plan_and_its_workers_with_one_line(tmp_path: Path, end: Callable[[int], None]) -> None:
    """As a terminal sends it, to all of them; and as a container sends SIGTERM, to the first."""
    file, begun = tmp_path / "t.yaml", tmp_path / "begun"
    file.write_text("{requests: 5, arrivals: {kind: poisson, rate: 1}, prompt: 9, output: 9}")
    code = f"""
import sys
from pathlib import Path
import tokentwin.planning.plan.plan as plan
from tests.planning.tiny_job import sleep
from tokentwin.cli import main
from tokentwin.planning.workers import Workers

def asleep(*_):
    with Workers(Path({str(begun)!r}), 2) as both:
        both.run([sleep, sleep])

plan.make_plan = asleep
sys.argv = ["tokentwin", "plan", {str(file)!r}, "--slo", "e2e_ms p50<=1", "--gpu", "H100", "--jobs", "2"]
main()
"""
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.05)
    end(process.pid)
    _, said = process.communicate()  # which waits for everybody who could write to stderr
    begun, first_answer, end = (line for line in said.splitlines() if line)
    assert begun == "tokentwin: searching one candidate on 5 requests"
    assert first_answer.startswith("tokentwin: From quick estimates: probably no fleet meets the SLOs")
    assert end == "tokentwin: interrupted"
    assert process.returncode == 130


def half_by_half(common: int, amount: float) -> float:
    for _ in range(2):
        mark(amount / 2)
    return common * amount


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_tasks_mark_is_heard_before_their_answers(jobs: int) -> None:
    heard: list[float] = []
    with Workers(3, jobs, heard.append) as workers:
        found = workers.run([partial(half_by_half, amount=amount) for amount in (4.0, 2.0, 6.0)])
    assert found == [12.0, 6.0, 18.0] and sorted(heard) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    mark(1.0)  # outside of a task it is nobody's
    assert len(heard) == 6


def test_progress_never_falls_and_is_near_the_truth() -> None:
    """On a fake clock, with fewer simulations than were expected: a second each after two seconds of a first answer."""
    now, told = 0.0, []
    pace = _Pace(lambda stage, share: told.append((now, share)), lambda: now)
    now = 2.0
    for expected, done in ((40.0, 10), (35.0, 10), (18.0, 10)):
        pace.expect("searching", expected)
        for _ in range(10 * done):
            now += 0.1
            pace.did(0.1)
    shares = [share for _, share in told]
    assert shares == sorted(shares) and len(told) > 200
    late = [abs(share - at / now) for at, share in told if at > 0.7 * now]
    assert late and max(late) < 0.2
    left = TimeLeft(0.0)
    known = [seconds for at, share in told if (seconds := left(share, at)) is not None]
    assert known and known == sorted(known, reverse=True)
