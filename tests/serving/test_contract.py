"""Every plan is held against the deployment's limits, and whatever a policy does wrong is one line."""

from pathlib import Path
from typing import Any

import pytest

from tests.sim.test_pipeline_parallel import StageTimes
from tokentwin.serving.contract import Contract
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES, find_policy
from tokentwin.serving.user_code.plugins import find, located
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

FAILING = Path(__file__).with_name("failing_policies.py")
COST = TokenCost(6_000_000, 20_000, 400)
LIMITS = SchedulerConfig(
    max_num_batched_tokens=512, max_num_seqs=3, num_blocks=42, max_model_len=640, scheduler_reserve_full_isl=False
)
BURSTS = [WorkloadRequest(id, id // 4 * 99_000_000, (("", 200),), 40) for id in range(12)]
WORKLOAD = Workload(BURSTS, shares_prefixes=False)
STREAM = Workload([WorkloadRequest(id, id * 11_000_000, (("", 150),), 40) for id in range(12)], shares_prefixes=False)
BROKEN = {
    "ManyTokens": r"step \d+, request \d+: plans \d+ tokens; the deployment's max_num_batched_tokens is 512",
    "ManySequences": r"step \d+, request 3: runs 4 requests; the deployment's max_num_seqs is 3",
    "ManyBlocks": r"step \d+, request \d+: holds \d+ KV blocks; there are 41, by the deployment's num_blocks 42",
    "OtherBlocks": r"step 0(, request 0)?: (computes tokens|has KV blocks of 64 tokens)",
    "NanScore": r"step 0, request 0: raised ValueError: score\(\) is nan for request 0; it must be a number",
    "TextScore": r"step 0, request 0: raised ValueError: score\(\) is 'soon'",
    "Raises": r"step 0, request 0: raised KeyError: 'weights' \(failing_policies.py, line \d+\)",
    "Exits": r"step 0: raised SystemExit: 0 \(failing_policies.py",
    "ExitsAtCommit": r"step 0: raised SystemExit: 0",
    "PlansNothing": r"step 0, request 0: plans nothing while 4 requests wait and no step runs",
    "NoPlan": r"step 0: raised (AttributeError: 'NoneType' |TypeError: tokentwin.serving.step_plan.StepPlan)",
    "Doubles": r"step 0, request 0: is planned twice in one step",
    "Negative": r"step 0, request 0: plans -200 tokens after 0, 0 of them drafts",
    "Elsewhere": r"step 0, request 0: plans 200 tokens after 1, which are not the next of Request\(0",
    "TakesNoBlocks": r"step 0, request 0: computes tokens up to 200 and holds 0 KV blocks of 16",
    "DecodesWithoutBlocks": r"step \d+: decodes over \d+ tokens and holds \d+ KV blocks of 16",
    "PromisesNone": r"step 0: steady_steps\(\) is None; it must be a whole number",
    "PromisesTooMuch": r"step \d+: promises \d+ steady steps; one ends in \d+",
    "PromisesAlone": r"step \d+, request \d+: is not the decode set alone, as steady_steps\(\) had promised",
    "RaisesUnspeakably": r"step 0: raised Unspeakable: \(its message cannot be read\) \(failing_policies.py, line",
    "ReturnsUnspeakably": r"step 0: steady_steps\(\) is a Unspeakable that cannot be shown",
    "SteersTheTerminal": r"step 0: raised ValueError: \\x1b\[2J\\x07 \\u202e \(failing_policies.py",
    "EndsNobody": r"step \d+, request 0: commit\(\) returned Request\(0, running.*which has not ended",
}


def run(policy: str, steps: bool = False, requests: Workload = WORKLOAD, **limits: Any) -> None:
    deployment = Deployment(policy=policy, scheduler=LIMITS.model_copy(update=limits))
    Cluster(deployment, COST, TableSink(), steps=steps, shares_prefixes=False).run(requests)


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_contract_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=BROKEN[name]) as caught:
        offered = STREAM if name == "PromisesAlone" else WORKLOAD
        run(f"{FAILING}:{name}", requests=offered, num_blocks=42 if name == "ManyBlocks" else 200)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("policy: ") and f"failing_policies.py:{name}'" in str(caught.value)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_a_policy_of_ones_own_that_keeps_to_it_decides_as_built_in(steps: bool, overlapped: bool) -> None:
    run("tokentwin.serving.policies.vllm:VllmScheduler", steps, async_scheduling=overlapped)


def test_a_policy_of_ones_own_waits_for_tokens_in_earlier_pipeline_stages() -> None:
    scheduler = LIMITS.model_copy(update={"num_blocks": 200, "async_scheduling": True})
    staged = {"pipeline_parallel_size": 3, "scheduler": scheduler}
    for policy in ("tokentwin.serving.policies.vllm:VllmScheduler", f"{FAILING}:OneStage"):
        cluster = Cluster(Deployment(policy=policy, **staged), StageTimes([1000] * 3), TableSink())
        if "OneStage" not in policy:
            assert cluster.run(WORKLOAD).finished == len(BURSTS)
            continue
        with pytest.raises(UserError, match=r"step \d+, request \d+: decodes again in fewer than 3 plans"):
            cluster.run(WORKLOAD)


@pytest.mark.parametrize("policy", POLICIES)
def test_built_in_policies_are_held_to_the_limits_too(policy: str) -> None:
    """A slip in one of ours would be seen."""
    limits = LIMITS.model_copy(update={"num_blocks": 200})
    more = limits.model_copy(update={"max_num_batched_tokens": 1000, "sarathi_token_budget": 1000})
    scheduler = find_policy(policy)(more, shares_prefixes=False)
    contract = Contract(policy, scheduler, limits)
    for request in BURSTS[:4]:
        contract.add(request)
    with pytest.raises(UserError, match="the deployment's max_num_batched_tokens is 512"):
        for _ in range(9):
            contract.commit(contract.schedule())


# Where a policy of one's own is found


def test_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("SIGN = -1\n")
    (tmp_path / "lifo.py").write_text(
        "from beside_it import SIGN\n"
        "from tokentwin.serving.policies.ranked import RankedScheduler\n\n\n"
        "class Lifo(RankedScheduler):\n"
        "    def score(self, request):\n"
        "        return SIGN * request.arrived.arrival_ns\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("lifo.py:Lifo", "./lifo.py:Lifo", "lifo:Lifo"):
        deployment = Deployment(policy=name)
        assert Path(deployment.policy.rpartition(":")[0]).is_absolute()
        monkeypatch.chdir("/")
        assert find("policy", deployment.policy, POLICIES, ("schedule",)).__name__ == "Lifo"
        monkeypatch.chdir(tmp_path)
    assert located("vllm") == "vllm" and located("tokentwin.serving.policies.fair:FairScheduler").startswith(
        "tokentwin.serving."
    )


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (None, "mine.py:Own", "the file .*mine.py does not exist"),
        ("x = 1\n", "mine.py:Own", "mine.py has no Own"),
        ("1 / 0\n", "mine.py:Own", r"cannot be imported: ZeroDivisionError: division by zero \(mine.py, line 1\)"),
        ("raise SystemExit\n", "mine.py:Own", r"cannot be imported: SystemExit \(mine.py, line 1\)"),
        ("def f(:\n", "mine.py:Own", "cannot be imported: SyntaxError"),
        ("import no_such_module_anywhere\n", "mine.py:Own", "the module 'no_such_module_anywhere' cannot be imported"),
        ("from planning.plan import planner\n", "mine.py:Own", "cannot be imported; import tokentwin.planning"),
        ("class Own:\n    pass\n", "mine.py:Own", "must be a class with add, schedule"),
        ("Own = 3\n", "mine.py:Own", "must be a class with add, schedule"),
        (None, "mine.py:", "must be vllm, static"),
        (None, "mine", "must be vllm, static.*path/to/file.py:Class"),
        (None, "\0.py:Own", "the file .* does not exist"),
    ],
)
def test_a_file_that_holds_no_policy_is_one_line(content, name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        run(name)
    assert "\n" not in str(caught.value)


def test_identities_of_blocks_are_checked_like_counts() -> None:
    deployment = Deployment(policy=f"{FAILING}:ManyBlocks", scheduler=LIMITS)
    cluster = Cluster(deployment, COST, TableSink(), steps=False)
    assert not cluster.replicas[0].scheduler.pool.counts_only
    with pytest.raises(UserError, match=r"holds \d+ KV blocks; there are 41"):
        cluster.run(WORKLOAD)
