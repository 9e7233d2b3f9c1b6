"""Ranks that share experts step together: a step ends when that of the busiest rank does."""

from itertools import accumulate, zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import MIXTURE, Roofline
from tests.calibration.step_model_samples import deployment as on_gpu
from tests.sim.test_pipeline_parallel import StageTimes
from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.correction import step_parts
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

COST = TokenCost(2_000_000, 10_000, 10_000, plan_ns=300_000)
SETTINGS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, num_blocks=400)


def mixture(ranks: int, overlaps: bool = False) -> Deployment:
    scheduler = SETTINGS.model_copy(update={"async_scheduling": overlaps})
    return Deployment(model="Qwen3-30B-A3B", data_parallel_size=ranks, scheduler=scheduler)


def simulated(engine: Deployment, requests: list[WorkloadRequest]) -> TableSink:
    sink = TableSink()
    Cluster(engine, COST, sink).run(Workload(requests))
    return sink


def steps_of(sink: TableSink, rank: int) -> list[dict[str, int]]:
    return [step for step in sink.steps.to_pylist() if step["replica"] == rank]


@examples(1)
@given(st.booleans(), st.lists(st.tuples(st.integers(2, 200), st.integers(1, 20)), min_size=3, max_size=12))
def test_each_step_of_an_engine_takes_as_long_as_that_of_its_busiest_rank(overlaps, sizes):
    """All requests are there at once: the k-th step of the engine is the longest k-th step that a rank has alone."""
    requests = [WorkloadRequest(at, 0, (("", prompt),), output) for at, (prompt, output) in enumerate(sizes)]
    together = simulated(mixture(3, overlaps), requests)
    alone = [steps_of(simulated(mixture(1, overlaps), requests[rank::3]), 0) for rank in range(3)]
    longest = [max(step["end_ns"] - step["start_ns"] for step in steps if step) for steps in zip_longest(*alone)]
    apart = 0 if overlaps else COST.plan_ns  # planning is hidden behind the step before
    ends = [COST.plan_ns + end + apart * step for step, end in enumerate(accumulate(longest))]
    for rank in range(3):
        mine = steps_of(together, rank)
        assert [step["end_ns"] for step in mine] == ends[: len(mine)]
        held = ("prefill_tokens", "decode_rows", "decode_context")
        assert [[step[name] for name in held] for step in mine] == [
            [step[name] for name in held] for step in alone[rank]
        ]


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_reaches_an_idle_rank_waits_for_the_step_under_way(overlaps: bool) -> None:
    first, late = WorkloadRequest(0, 0, (("", 60),), 4), WorkloadRequest(1, 1_000_000, (("", 8),), 1)
    sink = simulated(mixture(2, overlaps), [first, late])
    (busy, *_), (second, *_) = (steps_of(sink, rank) for rank in range(2))
    assert busy["start_ns"] < 1_000_000 < busy["end_ns"]
    assert second["start_ns"] == busy["end_ns"] + (0 if overlaps else COST.plan_ns)


def test_ranks_of_two_engines_and_those_of_a_dense_model_do_not_wait_for_each_other() -> None:
    requests = [WorkloadRequest(at, 0, (("", 200 if at == 0 else 8),), 3) for at in range(4)]
    sink = TableSink()
    Cluster(mixture(2), COST, sink, replicas=2).run(Workload(requests))
    first, neighbour, other, _ = (steps_of(sink, rank)[0]["end_ns"] for rank in range(4))
    assert first == neighbour > other
    dense = simulated(mixture(2).model_copy(update={"model": "Llama-3.1-8B"}), requests[:2])
    assert steps_of(dense, 0)[0]["end_ns"] > steps_of(dense, 1)[0]["end_ns"]


class TokenStages(TokenCost):
    """Stages that take a fixed time per token."""

    def __init__(self, *each_ns: int) -> None:
        super().__init__(0, sum(each_ns), 0)
        self.each_ns = each_ns

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return [ns * plan.tokens for ns in self.each_ns]

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return [plan.tokens] * (len(self.each_ns) - 1)


@examples(1)
@given(st.sampled_from([(100,), (100, 100), (70, 90, 20)]), st.lists(st.integers(33, 64), min_size=3, max_size=20))
def test_over_stages_each_takes_as_long_as_its_slowest_rank(each_ns, prompts):
    """All are there at once, and each fills a step: the k-th steps of the ranks pass the stages together."""
    plain = {"enable_chunked_prefill": False, "async_scheduling": False}
    engine = mixture(3).rescheduled(**plain).model_copy(update={"pipeline_parallel_size": len(each_ns)})
    requests = [WorkloadRequest(at, 0, (("", prompt),), 1) for at, prompt in enumerate(prompts)]
    sink = TableSink()
    Cluster(engine, TokenStages(*each_ns), sink).run(Workload(requests))
    free, ends = [0] * len(each_ns), [0] * len(each_ns)
    for slowest in (max(prompts[at : at + 3]) for at in range(0, len(prompts), 3)):
        at = max(free[0], ends[-len(each_ns)]) - slowest
        for stage, ns in enumerate(each_ns):
            free[stage] = at = max(at + slowest, free[stage]) + ns * slowest
        ends.append(at)
    for rank in range(3):
        mine = [step["end_ns"] for step in steps_of(sink, rank)]
        assert mine == ends[len(each_ns) :][: len(mine)] and len(mine) == len(prompts[rank::3])


@examples(1)
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(2, 200), st.integers(1, 20)), min_size=1, max_size=8),
    st.booleans(),
)
def test_ranks_that_do_the_same_over_stages_do_what_one_does_alone(stages, sizes, overlaps):
    """Stages are equal: a step has entered the first when another may be planned, as one engine alone takes it."""

    def steps(ranks: int) -> list[dict[str, int]]:
        sized = [size for size in sizes for _ in range(ranks)]
        requests = [WorkloadRequest(at, 0, (("", prompt),), output) for at, (prompt, output) in enumerate(sized)]
        engine, sink = mixture(ranks, overlaps).model_copy(update={"pipeline_parallel_size": stages}), TableSink()
        Cluster(engine, StageTimes([1000] * stages, transfer=70, cpu=30), sink).run(Workload(requests))
        held = ("start_ns", "end_ns", "stages_ns", "prefill_tokens", "decode_rows", "decode_context")
        return [[step[name] for name in held] for step in steps_of(sink, 0)]

    assert steps(2) == steps(1)


def test_experts_are_priced_by_the_tokens_of_all_ranks_and_the_rest_by_those_of_one() -> None:
    engine = on_gpu(data_parallel_size=8, enable_expert_parallel=True, enforce_eager=False)
    cost = OperationCost(MIXTURE, engine, Roofline())

    def prompt(tokens: int, routed: int = -1) -> StepPlan:
        amounts = {"prefill_rows": 1, "prefill_tokens": tokens, "prefill_pairs": tokens * (tokens + 1) // 2}
        return StepPlan.from_amounts(**amounts, sampled_rows=1, routed_tokens=routed)

    def shared(tokens: int) -> float:
        parts = step_parts(MIXTURE, engine, Roofline(), StepSizes(prefill_tokens=np.array([float(tokens)])))
        return float(sum(parts[name][0] for name in ("experts", "expert compute", "collectives")))

    for tokens, mean in ((2048, 256), (1024, 1024), (600, 2048)):
        found = cost.step_ns(prompt(tokens, mean)) - cost.step_ns(prompt(tokens))
        assert found == pytest.approx(shared(mean) - shared(tokens), abs=2)
