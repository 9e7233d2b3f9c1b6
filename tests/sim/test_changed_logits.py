"""Penalties and log-probabilities of prompts take time, and change no decision."""

from dataclasses import replace

import pytest

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

ROW_NS, TOKEN_NS = 7_000, 300
REQUESTS = [
    WorkloadRequest(
        id, id * 900_000, (("", 5 + 61 * id),), 2 + id % 9, changes_logits=id % 3 == 0, scores_prompt=id % 2 == 0
    )
    for id in range(12)
]


class Priced(TokenCost):
    """Counts what was priced; the step itself takes the same time, so that the steps stay the same."""

    def __init__(self, slower=False):
        super().__init__(1_000_000, 1_000, 0)
        self.changed = self.scored = 0
        self._slower = slower

    def step_ns(self, plan):
        self.changed += plan.changed_rows
        self.scored += plan.scored_tokens
        added = ROW_NS * plan.changed_rows + TOKEN_NS * plan.scored_tokens
        return super().step_ns(plan) + (added if self._slower else 0)


def run(requests, cost, policy="vllm", **limits):
    sink = TableSink()
    scheduler = SchedulerConfig(max_model_len=1000, max_num_batched_tokens=100, enable_prefix_caching=False, **limits)
    deployment = Deployment(policy=policy, scheduler=scheduler)
    Cluster(deployment, cost, sink, shares_prefixes=False, leaps=True).run(Workload(requests, shares_prefixes=False))
    return sink.requests.to_pylist()


@pytest.mark.parametrize("policy", ["vllm", "sarathi", "sglang"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_every_token_counts_once_and_no_decision_changes(policy, overlapped):
    priced, plain = Priced(), Priced()
    seen = run(REQUESTS, priced, policy, async_scheduling=overlapped)
    assert {row["status"] for row in seen} == {"finished"}
    assert priced.changed == sum(one.output_len for one in REQUESTS if one.changes_logits)
    assert priced.scored == sum(one.prompt_len - 1 for one in REQUESTS if one.scores_prompt)
    without = [replace(one, changes_logits=False, scores_prompt=False) for one in REQUESTS]
    assert run(without, plain, policy, async_scheduling=overlapped) == seen
    assert (plain.changed, plain.scored) == (0, 0)


def test_a_lone_request_ends_later_by_the_time_of_its_tokens():
    request = WorkloadRequest(0, 0, (("", 250),), 40, changes_logits=True, scores_prompt=True)
    plain, later = (run([request], Priced(slower))[0]["finish_ns"] for slower in (False, True))
    assert later - plain == 40 * ROW_NS + 249 * TOKEN_NS
