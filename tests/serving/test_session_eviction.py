"""Blocks of sessions that return are evicted last; without sessions, nothing changes."""

from dataclasses import replace

from tests.sim.fleet_samples import FleetRun, poisson
from tokentwin.traces.synth import parse_spec, synthesise

AGENTS = {
    "requests": 300,
    "seed": 3,
    "arrivals": {"kind": "poisson", "rate": 0.5},
    "prompt": 120,
    "output": 20,
    "system_prompts": {"count": 2, "tokens": 64},
    "sessions": {"turns": 5, "think_ms": 4000},
}
SMALL = {"num_blocks": 300, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024}


def mixed_traffic():
    """Return sessions of agents, and single requests between their turns that push blocks out."""
    sessions = list(synthesise(parse_spec(AGENTS)).requests)
    last_ns = sessions[-1].arrival_ns
    singles = poisson(900, 900 / (last_ns / 1e9), prompts=300, outputs=10)
    merged = sorted([*sessions, *singles], key=lambda request: request.arrival_ns)
    ids = {request.id: number for number, request in enumerate(merged) if request.session}

    def renamed(request):
        return tuple((f"out:{ids[int(n[4:])]}" if n.startswith("out:") else n, tokens) for n, tokens in request.prompt)

    return [replace(request, id=number, prompt=renamed(request)) for number, request in enumerate(merged)]


def hits(offered, eviction, **more):
    run = FleetRun({}, offered, shares_prefixes=True, kv_eviction=eviction, **(SMALL | more))
    assert {row["status"] for row in run.rows} == {"finished"}
    for replica in run.cluster.replicas:
        replica.scheduler.pool.check([])
    return [row["prefix_hit_tokens"] or 0 for row in run.rows]


def test_returning_sessions_find_more_of_their_blocks():
    offered = mixed_traffic()
    lru, session = hits(offered, "lru"), hits(offered, "session")
    assert sum(session) > 1.2 * sum(lru)
    assert sum(session) <= sum(r.prompt_len for r in offered)
