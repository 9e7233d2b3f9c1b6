"""Pipeline stages, drafts, KV tiers, prefill apart from decode, failures and impatient users, in every combination.

Each has tests of its own. Here they meet by chance, and what must hold of all of them together is checked: whenever a
replica plans, and when everybody has left.
"""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.sim.fleet_samples import MS, S, assert_everything_is_accounted_for
from tests.stand_in import StandIn
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, parse, pool_deployment
from tokentwin.serving.deployments.fleet import plain_fleet
from tokentwin.serving.kv.blocks import blocks_for
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.fleet import PricedPool
from tokentwin.sim.router import ROUTERS
from tokentwin.sim.run_log import TableSink

BLOCK = 4
KV = 100_000  # bytes of a token
BLOCK_GIB = BLOCK * KV / 1024**3
SHORT = examples(0.5)


class Staged(TokenCost):
    """`PipelinedCost`: a step is equally long on each of `stages` stages."""

    def __init__(self, stages):
        super().__init__(2 * MS, 50_000, 100, plan_ns=7_000)
        self.stages = stages

    def stages_ns(self, plan):
        return [self.step_ns(plan) // self.stages] * self.stages

    def transfers_ns(self, plan):
        return [1000] * (self.stages - 1)


class Run:
    """One simulation, watched. `rows` are its requests in the order of their ids."""

    def __init__(self, deployment, offered, *, leaps=True, concurrency=None, shares=True):
        fleet = deployment.fleet or plain_fleet(1)
        engines = [pool_deployment(deployment, pool) for pool in fleet.pools]
        pools = [
            PricedPool(pool, engine, Staged(engine.pipeline_parallel_size))
            for pool, engine in zip(fleet.pools, engines, strict=True)
        ]
        sink = TableSink()
        self.cluster = Cluster(
            deployment, Staged(1), sink, fleet=fleet, pools=pools, shares_prefixes=shares, steps=False, tokens=True
        )
        self._watch_all(leaps)
        self.done = self.cluster.run(Workload(offered, concurrency=concurrency, shares_prefixes=shares))
        self._let_transfers_end()
        assert not any(self.cluster._log._waiting_blocks.values())
        self.requests = sink.requests
        self.rows = self.requests.sort_by("request_id").to_pylist()
        self.ends = Counter(row["status"] for row in self.rows)

    def _watch_all(self, leaps):
        fleet = self.cluster._fleet
        new = fleet._new

        def watched(*born):
            life = new(*born)
            self._watch(life.replica, leaps)
            return life

        fleet._new = watched
        for replica in fleet.replicas:
            self._watch(replica, leaps)

    def _watch(self, replica, leaps):
        replica._leaps &= leaps
        scheduler = replica.scheduler
        add, schedule, seen = scheduler.add, scheduler.schedule, []

        def seeing_add(*arrived):
            seen.append(add(*arrived))
            return seen[-1]

        def checked_schedule():
            if replica._depth == 1:  # behind steps in flight a preempted request may still grow
                without = sum(
                    blocks_for(request.known, BLOCK) for request in scheduler.waiting if not request.block_count
                )
                assert self.cluster._log._waiting_blocks[replica.index] == without
            plan = schedule()
            assert_consistent(scheduler, seen)
            assert plan.tokens <= scheduler.config.max_num_batched_tokens
            return plan

        replica._policy.scheduler = StandIn(scheduler, add=seeing_add, schedule=checked_schedule)

    def _let_transfers_end(self):
        clock = self.cluster._clock
        until_ns = clock.now_ns + 60 * S
        while clock.peek() <= until_ns:
            clock.step()


def assert_consistent(scheduler, seen):
    """Assert that every request and the decode set are consistent, and blocks belong to requests in `seen`."""
    for request in scheduler.requests.values():
        request.check()
    scheduler.decodes.check()
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    pool = scheduler.pool
    if pool.counts_only:
        decodes = scheduler.decodes.members
        block_counts = [
            blocks_for(r.computed, BLOCK) if r.id in decodes and not r.ended else r.block_count for r in seen
        ]
        assert pool.total - pool.free == sum(block_counts)
    else:
        pool.check(seen)


speeds = st.sampled_from([0.02, 1.0, 1e6])
tiers = st.lists(st.tuples(st.integers(1, 60), speeds, speeds), min_size=1, max_size=2).map(
    lambda drawn: {
        "tiers": [
            {"name": str(n), "capacity_gib": (blocks + 0.5) * BLOCK_GIB, "read_gb_s": read, "write_gb_s": write}
            for n, (blocks, read, write) in enumerate(drawn)
        ],
        "kv_bytes_per_token": KV,
    }
)
swaps = st.sampled_from(["swap", "recompute"]).map(lambda preemption: {"preemption": preemption})
drafts = st.fixed_dictionaries(
    {
        "num_speculative_tokens": st.integers(1, 5),
        "acceptance_rate": st.sampled_from([0.0, 0.6, 1.0]),
        "method": st.sampled_from(["ngram", "eagle"]),
        "draft_us": st.just(5),
    }
)

orders = st.sampled_from(
    [{"policy": "fcfs"}, {"policy": "priority"}, {"policy": "priority", "priority_scheduling_preemption_threshold": 0}]
)


@st.composite
def engines(draw, tiered=True):
    """Return settings of a replica that are valid together."""
    kinds = ["plain", "overlapped", "stages", "overlapped stages", "drafts", "overlapped drafts"]
    with_tiers = [f"tiers {kind}" for kind in kinds]
    kind = draw(st.sampled_from([*kinds, *with_tiers] if tiered else kinds))
    proposals = draw(drafts) if "drafts" in kind else None
    if proposals and "tiers" in kind:
        proposals["method"] = "ngram"
        if draw(st.booleans()):
            proposals |= {"method": "draft_model", "model": "Qwen3-0.6B", "draft_us": None}
    scheduler = {
        "block_size": BLOCK,
        "num_blocks": draw(st.sampled_from([31, 50, 200])),
        "max_num_seqs": draw(st.integers(1, 7)),
        "max_num_batched_tokens": draw(st.sampled_from([16, 70])),
        "max_model_len": 120,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 9])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        **draw(orders),
        "scheduler_recv_interval": draw(st.sampled_from([1, 9])),
        "enable_prefix_caching": "tiers" in kind or draw(st.booleans()),
        "async_scheduling": "overlapped" in kind,
        "speculative": proposals,
    }
    return {
        "policy": draw(st.sampled_from([*sorted(POLICIES), *POLICIES.values()])),  # by its class: as a user's own
        "pipeline_parallel_size": draw(st.integers(2, 3)) if "stages" in kind else 1,
        "kv_tiers": draw(tiers) | draw(swaps) if "tiers" in kind else None,
        "scheduler": scheduler,
    }


@st.composite
def pools(draw):
    """Return pools of all roles, or one that serves everything."""
    serve = {"name": "s", "replicas": draw(st.integers(1, 2)), "deployment": draw(engines())}
    if draw(st.booleans()):
        return [serve]
    apart = [
        {"name": name, "role": role, "replicas": draw(st.integers(1, 2)), "deployment": draw(engines(tiered=False))}
        for name, role in (("p", "prefill"), ("d", "decode"))
    ]
    return [*apart, serve] if draw(st.booleans()) else apart


times = st.sampled_from([0.0, 0.02, 0.05, 0.11])
a_while = st.sampled_from([0.01, 0.05])


@st.composite
def fleets(draw):
    made = draw(pools())
    roles = {pool["name"]: pool.get("role", "serve") for pool in made}
    names = st.sampled_from(sorted(roles))
    fleet = {"pools": made, "router": draw(st.sampled_from(sorted(ROUTERS)))}
    if "d" in roles:
        links = {"nic_gb_s": draw(st.sampled_from([0.05, 1.0, 1e6])), "kv_bytes_per_token": KV}
        fleet["links"] = links
        if "s" not in roles and draw(st.booleans()):
            fleet["decode_reserves"] = "before-prefill"
            made[1]["deployment"]["scheduler"]["enable_prefix_caching"] = False
        else:
            fleet["first_token_from"] = draw(st.sampled_from(["prefill", "decode"]))
    if draw(st.booleans()):
        crash = st.fixed_dictionaries({"at_s": times, "pool": names, "recovery_s": a_while})
        slow = st.fixed_dictionaries({"at_s": times, "for_s": a_while, "factor": st.just(3.7), "pool": names})
        lost = st.fixed_dictionaries({"at_s": times, "for_s": a_while, "pool": st.sampled_from("pd")})
        fleet["failures"] = {
            "crashes": draw(st.lists(crash, max_size=2)),
            "slowdowns": draw(st.lists(slow, max_size=1)),
            "link_losses": draw(st.lists(lost, max_size=2)) if "d" in roles else [],
        }
    if draw(st.booleans()):
        fleet["admission"] = draw(
            st.fixed_dictionaries(
                {"retry": st.just({"max_attempts": 3, "backoff_s": 0.005})},
                optional={
                    "queue_timeout_s": st.sampled_from([0.004, 0.03]),
                    "max_queued_per_replica": st.integers(1, 4),
                    "patience": st.fixed_dictionaries(
                        {"mean_s": st.just(0.03), "until": st.sampled_from(["first-token", "finish"])}
                    ),
                },
            )
        )
    scaler = st.fixed_dictionaries(
        {
            "metric": st.sampled_from(["queue", "kv"]),
            "target": st.just(0.2),
            "max_replicas": st.just(3),
            "interval_s": st.sampled_from([0.01, 0.015]),
            "cold_start_s": st.sampled_from([0, 0.02]),
            "cooldown_s": st.just(0.02),
            "pool": names,
        }
    )
    scalers = draw(st.lists(scaler, max_size=2, unique_by=lambda scaler: scaler["pool"]))
    fleet["autoscaler"] = scalers or None
    return parse(Deployment, {"fleet": fleet}, where="drawn")


def requests(seed, count, shares):
    """Return bursts of requests, of which some have a beginning in common and some are turns of a conversation."""
    draw, at_ns, turns, offered = Random(seed), 0, Counter(), []
    most_ns = draw.choice([0, 3 * MS, 20 * MS])
    for id in range(count):
        at_ns += draw.randint(0, most_ns)
        prompt = (("", draw.randint(1, 50)),)
        if shares and draw.random() < 0.7:
            prompt = ((draw.choice("ab"), draw.randint(1, 28)), *prompt[: draw.randint(0, 1)])
        session = draw.choice(["", "", "u", "v"])
        think_ns = draw.choice([0, 5 * MS]) if session else None
        offered.append(
            WorkloadRequest(
                id,
                at_ns,
                prompt,
                draw.choice([1, 2, draw.randint(1, 40)]),
                priority=draw.randint(0, 2),
                tenant=draw.choice("xy"),
                session=session,
                turn=turns[session] if session else 0,
                think_ns=think_ns,
            )
        )
        turns[session] += 1
    return offered


def assert_answered(row, request):
    """Assert that all tokens of a request came, one after another, or that its row says why not."""
    times_ns = row["token_times_ns"]
    if row["status"] != "finished":
        assert row["reason"] and times_ns is None
        return
    assert row["output_tokens"] == len(times_ns) == request.output_len
    assert times_ns == sorted(times_ns)
    assert request.arrival_ns <= row["arrival_ns"] <= row["queued_ns"] <= row["scheduled_ns"] < times_ns[0]
    assert (times_ns[0], times_ns[-1]) == (row["first_token_ns"], row["finish_ns"])
    loaded = sum(tokens for _, tokens in row["tier_hit_tokens"] or ())
    assert row["prefix_hit_tokens"] + loaded < row["prompt_tokens"]


@given(
    deployment=fleets(),
    seed=st.integers(0, 10_000),
    count=st.integers(1, 30),
    concurrency=st.sampled_from([None, None, 5]),
    shares=st.booleans(),
)
@SHORT
def test_whatever_meets_everybody_is_answered_and_leaps_are_exact(deployment, seed, count, concurrency, shares):
    offered = requests(seed, count, shares)
    run, again, stepped = (
        Run(deployment, offered, leaps=leaps, concurrency=concurrency, shares=shares) for leaps in (True, True, False)
    )
    assert_everything_is_accounted_for(run, offered)
    for row, request in zip(run.rows, offered, strict=True):
        assert_answered(row, request)
    assert run.requests.equals(again.requests) and run.done == again.done
    assert run.requests.equals(stepped.requests) and run.done == stepped.done
    if not (deployment.fleet.failures.crashes or deployment.fleet.admission.retry.max_attempts > 1):
        too_long = sum("are not split" in row["reason"] for row in run.rows)  # which `trtllm` says of long prompts
        assert run.ends["finished"] == len(offered) - too_long
