"""Settings of vLLM that few set. Recordings judge what is decided with them; here is what each is for."""

import pytest

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Status
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

ROOMY = {"block_size": 4, "num_blocks": 200, "max_model_len": 100, "max_num_batched_tokens": 40}


def scheduler(requests, **settings):
    made = VllmScheduler(SchedulerConfig(**ROOMY | settings))
    for id, (prompt, output) in enumerate(requests):
        made.add(WorkloadRequest(id, id, ((f"u{id}", prompt),), output))
    return made


def steps(made, count):
    """Return the tokens of each request in the next steps."""
    rows = []
    for _ in range(count):
        plan = made.schedule()
        rows.append({row.request.id: row.tokens for row in plan.rows()})
        made.commit(plan)
    return rows


def test_seats_that_no_request_may_take_stay_empty():
    made = scheduler([(5, 9)] * 4, max_num_seqs=4, max_num_active_seqs=2)
    assert steps(made, 2) == [{0: 5, 1: 5}, {0: 1, 1: 1}]


def test_a_step_has_fewer_tokens_than_there_are_buffers_for():
    made = scheduler([(30, 9)], max_num_scheduled_tokens=12)
    assert steps(made, 4) == [{0: 12}, {0: 12}, {0: 6}, {0: 1}]


def test_what_a_draft_model_needs_is_taken_from_buffers_and_not_from_scheduled_tokens():
    drafting = {"method": "draft_model", "model": "any", "num_speculative_tokens": 2, "acceptance_rate": 1.0}
    settings = {"max_num_scheduled_tokens": 12, "speculative": drafting}
    first = steps(scheduler([(6, 9)] * 3, max_num_batched_tokens=14, **settings), 1)
    assert first == [{0: 6, 1: 6}]  # with their slots, 14
    assert steps(scheduler([(6, 9)] * 3, max_num_batched_tokens=13, **settings), 1) == [{0: 6, 1: 5}]


def test_an_adaptive_threshold_is_at_least_an_even_share():
    settings = {"long_prefill_token_threshold": 4}
    assert steps(scheduler([(30, 9)] * 3, **settings), 1) == [{0: 4, 1: 4, 2: 4}]
    settings["long_prefill_token_threshold_adaptive"] = True
    assert steps(scheduler([(30, 9)] * 3, **settings), 1) == [{0: 13, 1: 13, 2: 13}]


def test_between_intervals_decodes_are_alone():
    made = scheduler([(5, 30)], prefill_schedule_interval=3)
    steps(made, 1)
    made.add(WorkloadRequest(1, 1, (("long", 50),), 9))
    assert steps(made, 6) == [{0: 1}, {0: 1}, {0: 1, 1: 39}, {0: 1}, {0: 1}, {0: 1, 1: 11}]


def test_nothing_is_held_back_while_requests_are_left_waiting():
    made = scheduler([(5, 30), (50, 9), (20, 9)], prefill_schedule_interval=3, max_num_seqs=2)
    first, *others = steps(made, 3)
    assert first == {0: 5, 1: 35}
    assert others == [{0: 1, 1: 15}, {0: 1, 1: 1}]


def test_an_answer_is_rejected_or_cut_where_the_longest_sequence_ends():
    made = scheduler([(90, 20), (100, 1)], cut_at_max_model_len=True)
    assert made.requests[0].max_len == 100 and 1 not in made.requests
    while made.requests:
        steps(made, 1)
    assert scheduler([(90, 20)]).requests == {}


@pytest.mark.parametrize("policy", ["vllm", "tokentwin.serving.policies.vllm:VllmScheduler"])
def test_the_contract_knows_where_an_answer_is_cut(policy):
    sink, settings = TableSink(), SchedulerConfig(**ROOMY, cut_at_max_model_len=True)
    requests = [WorkloadRequest(id, id, (("", 90),), 20 + id, grammar_compile_ns=id) for id in range(3)]
    Cluster(Deployment(policy=policy, scheduler=settings), TokenCost(9, 9, 9), sink).run(Workload(requests))
    assert sink.requests["output_tokens"].to_pylist() == [10] * 3


def test_answers_are_not_cut_where_others_take_them_over():
    pools = [{"name": role, "role": role, "replicas": 1} for role in ("prefill", "decode")]
    settings = SchedulerConfig(**ROOMY, cut_at_max_model_len=True)
    with pytest.raises(UserError, match=r"cut_at_max_model_len: .* cannot be combined with pools for prefill"):
        Cluster(Deployment(scheduler=settings), TokenCost(9, 9, 9), TableSink(), fleet=FleetConfig(pools=pools))


def test_what_skips_the_cache_computes_its_prompt_and_leaves_it_to_others():
    made = scheduler([])
    for id, skips in enumerate((False, True, False)):
        made.add(WorkloadRequest(id, id, (("same", 20),), 1, skip_reading_prefix_cache=skips))
        assert steps(made, 1) == [{id: 20 if id < 2 else 4}]
    assert all(request.status is Status.FINISHED for request in made.requests.values())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_num_seqs": 4, "max_num_active_seqs": 5}, "max_num_active_seqs must be at most max_num_seqs 4"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100, "max_num_scheduled_tokens": 99},
            "max_num_scheduled_tokens must be at least max_model_len",
        ),
        ({"prefill_schedule_interval": 0}, "scheduler.prefill_schedule_interval"),
    ],
)
def test_settings_that_contradict_others_are_named(settings, says):
    with pytest.raises(UserError, match=says):
        parse(SchedulerConfig, ROOMY | settings, where="scheduler")
