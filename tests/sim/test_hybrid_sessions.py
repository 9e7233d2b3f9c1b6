"""Sessions of agents on a model with constant states: each turn finds what the turn before it left."""

from typing import Any

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.kv_layout import with_known_states
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

TURNS, OWN, ANSWER = 6, 900, 300  # tokens that a turn adds to the prompt: the user's, and the answer before


def hits(**changes: Any) -> list[int]:
    """Return the prefix hits, in tokens, of the turns of three sessions with one system prompt, one turn a second."""
    deployment = with_known_states(
        Deployment(model="Qwen3.5-35B-A3B").rescheduled(num_blocks=2000, max_model_len=16384, **changes)
    )
    requests = []
    for session in range(3):
        prompt: list[tuple[str, int]] = [("system", 2500)]
        for turn in range(TURNS):
            id = session * TURNS + turn
            prompt.append((f"user {id}", OWN))
            requests.append(WorkloadRequest(id, id * 1_000_000_000, tuple(prompt), ANSWER))
            prompt.append((f"out:{id}", ANSWER))
    sink, cost = TableSink(), TokenCost(base_ns=1000, per_token_ns=70, per_pair_ps=0)
    cluster = Cluster(deployment, cost, sink, shares_prefixes=True)
    cluster.run(Workload(requests, shares_prefixes=True))
    rows = sorted(sink.requests.to_pylist(), key=lambda row: row["request_id"])
    return [row["prefix_hit_tokens"] for row in rows]


def test_a_turn_starts_from_the_state_at_the_end_of_the_prompt_before() -> None:
    """By hand: the last full block of the prompt before, of 1,056 tokens, that is not the whole prompt."""
    block = 1056
    found = hits()
    ends = [(2500 + OWN + turn * (OWN + ANSWER) - 1) // block * block for turn in range(TURNS)]
    assert found[1:TURNS] == ends[:-1]
    # The second session finds the system prompt for full attention only, and leaves a state there for the third.
    assert found[TURNS : 2 * TURNS] == [0, *ends[:-1]]
    assert found[2 * TURNS :] == [2500 // block * block, *ends[:-1]]


def test_without_the_cache_nothing_is_found() -> None:
    assert not any(hits(enable_prefix_caching=False))
