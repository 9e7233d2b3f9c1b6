"""Prefill and decode in pools of their own: closed forms, backpressure, and that nobody is lost whatever fails."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.sim.fleet_samples import MS, FleetRun, S, assert_everything_is_accounted_for, poisson
from tests.sim.test_fleet_properties import admissions, times
from tokentwin.cli import cli
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.live_cluster import LiveCluster
from tokentwin.sim.router import ROUTERS
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.recording import Recording

KV = 100_000  # bytes of a token
INSTANT = {"nic_gb_s": 1e9, "latency_us": 0, "kv_bytes_per_token": KV}


def apart(prefills=1, decodes=1, links=None, **more):
    """Return a fleet of prefill and decode replicas; `prefill` and `decode` in `more` change the two pools."""
    pools = [
        {"name": "p", "role": "prefill", "replicas": prefills} | more.pop("prefill", {}),
        {"name": "d", "role": "decode", "replicas": decodes} | more.pop("decode", {}),
    ]
    return {"pools": pools, "links": {"kv_bytes_per_token": KV} | (links or {})} | more


def reserving(*counts, **more):
    """Return a fleet as of `apart` whose decode replicas reserve KV blocks before the prefill."""
    return _reserves(apart(*counts, **more))


def _reserves(fleet):
    for pool in fleet["pools"]:
        if pool["role"] == "decode":
            deployment = pool.get("deployment", {})
            scheduler = deployment.get("scheduler", {}) | {"enable_prefix_caching": False}
            pool["deployment"] = deployment | {"scheduler": scheduler}
    return fleet | {"decode_reserves": "before-prefill"}


def request(id, arrival_ns, prompt, output, **more):
    prompt = (("", prompt),) if isinstance(prompt, int) else prompt
    return WorkloadRequest(id, arrival_ns, prompt, output, **more)


def test_one_request_takes_prefill_transfer_and_decode_steps():
    cost = TokenCost(6 * MS, 18_000, 0)
    run = FleetRun(apart(links={"nic_gb_s": 1, "latency_us": 30}), [request(0, 5, 100, 4)], cost, tokens=True)
    (row,) = run.rows
    prefill, transfer, step = 6 * MS + 100 * 18_000, 30_000 + 100 * KV, 6 * MS + 18_000
    assert (row["prefill_replica"], row["replica"]) == (0, 1)
    assert row["first_token_ns"] == 5 + prefill and row["transfer_ns"] == transfer
    assert row["token_times_ns"] == [5 + prefill, *(5 + prefill + transfer + n * step for n in (1, 2, 3))]
    assert (row["finish_ns"], row["output_tokens"]) == (row["token_times_ns"][-1], 4)


def test_a_static_batch_pulls_only_what_fits_to_its_end_beside_what_was_pulled():
    """Each of the two fits alone; the second, pulled while the first waits for its KV, would leave neither room."""
    static = {"policy": "static", "scheduler": {"block_size": 4, "num_blocks": 31, "max_model_len": 120}}
    offered = [request(0, 0, 10, 106), request(1, 1, 60, 48)]
    run = FleetRun(apart(decode={"deployment": static}, links={"nic_gb_s": 0.05}), offered)
    assert [row["output_tokens"] for row in run.rows] == [106, 48]
    assert run.rows[1]["scheduled_ns"] < run.rows[0]["finish_ns"] < run.rows[1]["finish_ns"]
    assert_everything_is_accounted_for(run, offered)


def test_stock_vllm_samples_the_first_token_again_where_it_decodes():
    cost = TokenCost(6 * MS, 18_000, 0)
    fleet = apart(links={"nic_gb_s": 1, "latency_us": 30}, first_token_from="decode")
    run = FleetRun(fleet, [request(0, 5, 100, 3), request(1, S, 100, 1)], cost, tokens=True)
    pulled, step = 6 * MS + 100 * 18_000 + 30_000 + 100 * KV, 6 * MS + 18_000
    assert run.rows[0]["token_times_ns"] == [5 + pulled + n * step for n in (1, 2, 3)]
    assert run.rows[0]["first_token_ns"] == run.rows[0]["token_times_ns"][0]
    assert run.rows[1]["token_times_ns"] == [S + pulled + step] and run.rows[1]["replica"] == 1


def test_a_first_token_comes_with_the_kv_where_blocks_are_reserved_before_the_prefill():
    cost = TokenCost(6 * MS, 18_000, 0)
    offered = [request(0, 5, 100, 4), request(1, S, 100, 1)]
    run = FleetRun(reserving(links={"nic_gb_s": 1, "latency_us": 30}), offered, cost, tokens=True)
    sent, step = 6 * MS + 100 * 18_000 + 30_000 + 100 * KV, 6 * MS + 18_000
    assert run.rows[0]["token_times_ns"] == [5 + sent + n * step for n in range(4)]
    assert (run.rows[0]["prefill_replica"], run.rows[0]["replica"]) == (0, 1)
    assert run.rows[0]["transfer_ns"] == 30_000 + 100 * KV
    assert (run.rows[1]["replica"], run.rows[1]["finish_ns"]) == (0, S + 6 * MS + 100 * 18_000)


def test_an_api_server_gives_the_first_token_when_the_kv_has_come():
    cost, sink = TokenCost(6 * MS, 18_000, 0), TableSink()
    fleet = FleetConfig(**reserving(links={"nic_gb_s": 1, "latency_us": 30}))
    front_door = FrontDoor(request_ns=MS, chunk_ns=100_000)
    Cluster(Deployment(), cost, sink, fleet=fleet, tokens=True, front_door=front_door).run(
        Workload([request(0, 5, 100, 4)])
    )
    (row,) = sink.requests.to_pylist()
    came = 5 + MS + 6 * MS + 100 * 18_000 + 30_000 + 100 * KV
    assert (row["first_token_ns"], row["first_text_ns"]) == (came, came + 100_000)


def two_for_one_seat(**more):
    """Return a run of two requests that have their KV soon, on a decode replica that runs one of them at a time."""
    fleet = reserving(links=INSTANT, decode={"deployment": {"scheduler": {"max_num_seqs": 1}}}, **more.pop("fleet", {}))
    offered = [request(0, 0, 100, 60), request(1, 1, 100, 5, **more)]
    return FleetRun(fleet, offered, TokenCost(6 * MS, 0, 0), tokens=True)


def test_who_waits_for_a_seat_beside_its_kv_has_no_token_yet():
    """The second request's KV is there after 12 ms, and its seat after the 60 tokens of the first, at 360 ms."""
    alone = two_for_one_seat().rows[1]
    assert alone["first_token_ns"] > 300 * MS and alone["transfer_ns"] is not None
    stopped = two_for_one_seat(stop_ns=200 * MS).rows[1]
    assert (stopped["status"], stopped["output_tokens"], stopped["first_token_ns"]) == ("cancelled", 0, None)
    patience = {"mean_s": 0.1, "distribution": "constant", "until": "first-token"}
    impatient = two_for_one_seat(fleet={"admission": {"patience": patience}}).rows[1]
    assert (impatient["status"], impatient["output_tokens"]) == ("cancelled", 0)
    queued = two_for_one_seat(fleet={"admission": {"queue_timeout_s": 0.1}}).rows[1]
    assert queued["status"] == "finished" and queued["scheduled_ns"] < 20 * MS


def test_requests_that_are_prefilled_do_not_queue_at_their_decode_replica():
    """Six requests reserve at once and are prefilled one by one; at most one waits for its prefill or its decode."""
    limit = {"max_queued_per_replica": 1}
    offered = [request(id, id, 100, 3) for id in range(6)]
    fleet = reserving(links=INSTANT, admission=limit, prefill={"deployment": {"scheduler": {"max_num_seqs": 1}}})
    run = FleetRun(fleet, offered, TokenCost(6 * MS, 0, 0))
    assert [row["status"] for row in run.rows].count("finished") >= 5


def test_a_prompt_that_must_not_be_loaded_is_refused_where_blocks_are_reserved_first():
    with pytest.raises(UserError, match="asks for log-probabilities of its prompt; use after-prefill"):
        FleetRun(reserving(), [request(0, 0, 100, 3, skip_reading_prefix_cache=True)])


def test_a_grammar_is_compiled_once_where_blocks_are_reserved_first():
    offered = [request(0, 0, 100, 3, structured=True, grammar_compile_ns=50 * MS)]
    (row,) = FleetRun(reserving(links=INSTANT), offered, TokenCost(6 * MS, 0, 0)).rows
    assert row["first_token_ns"] == pytest.approx(56 * MS, abs=MS)


def test_a_fleet_that_reserves_blocks_first_is_not_served_live():
    with pytest.raises(UserError, match=r"fleet.decode_reserves.*cannot be served live"):
        LiveCluster(Deployment(), TokenCost(6 * MS, 0, 0), TableSink(), fleet=FleetConfig(**reserving()))


def test_a_full_decode_pool_keeps_prompts_from_being_prefilled_where_blocks_are_reserved_first():
    """As above ten requests fill the decode replica for 100 steps, but later prompts are not prefilled meanwhile."""
    cost = TokenCost(6 * MS, 0, 0)
    offered = [request(n, 0, 32, 101) for n in range(10)] + [request(n, 70 * MS, 32, 2) for n in range(10, 15)]
    decode = {"deployment": {"scheduler": {"max_num_seqs": 10, "num_blocks": 91}}}
    fleet = reserving(links=INSTANT, decode=decode)
    run = FleetRun(fleet, offered, cost, max_num_batched_tokens=320, steps=True)
    early_end = max(row["finish_ns"] for row in run.rows[:10])
    assert all(row["scheduled_ns"] >= early_end for row in run.rows[10:])
    assert_everything_is_accounted_for(run, offered)


@pytest.mark.parametrize(
    ("fleet", "remedy"),
    [
        (apart() | {"decode_reserves": "before-prefill"}, "enable_prefix_caching.*must be false"),
        (reserving(first_token_from="decode"), "leave one out"),
        ({"pools": [{}], "decode_reserves": "before-prefill"}, "needs pools of role prefill and decode"),
    ],
)
def test_blocks_are_reserved_first_only_where_that_makes_sense(fleet, remedy):
    with pytest.raises((UserError, ValueError), match=remedy):
        FleetRun(fleet, [request(0, 0, 10, 2)])


def test_who_waits_for_a_first_token_from_the_decode_replica_may_give_up_before_it():
    admission = {"patience": {"mean_s": 0.010, "distribution": "constant"}, "queue_timeout_s": 0.008}
    offered, links = [request(0, 0, 100, 3)], {"nic_gb_s": 1, "latency_us": 0}
    for source, end in (("prefill", "finished"), ("decode", "cancelled")):
        fleet = apart(links=links, admission=admission, first_token_from=source)
        run = FleetRun(fleet, offered, TokenCost(6 * MS, 0, 0))
        assert_everything_is_accounted_for(run, offered)
        assert run.rows[0]["status"] == end


def test_a_single_token_needs_no_decode_replica():
    (row,) = FleetRun(apart(), [request(0, 0, 100, 1)]).rows
    assert (row["status"], row["replica"], row["prefill_replica"], row["transfer_ns"]) == ("finished", 0, None, None)


def test_prompts_leave_decode_steps_alone():
    """Over links without limits nobody's next token waits for another's prompt, as it does where both are served."""
    offered = poisson(200, 20.0, prompts=400, outputs=40)
    run = FleetRun(apart(links=INSTANT), offered, steps=True)
    steps = run.steps.to_pylist()
    assert not any(step["prefill_rows"] for step in steps if step["replica"] == 1)
    assert not any(step["decode_context"] for step in steps if step["replica"] == 0)
    rows = max(step["decode_rows"] for step in steps)
    longest = max(step["end_ns"] - step["start_ns"] for step in steps if step["replica"] == 1)
    assert longest <= 6 * MS + rows * (18_000 + 440 * 450)
    together = FleetRun({"pools": [{"replicas": 2}]}, offered, steps=True).steps.to_pylist()
    assert max(step["end_ns"] - step["start_ns"] for step in together if step["decode_rows"]) > 2 * longest


@pytest.mark.parametrize("decodes, slots", [(1, 2), (2, 4), (8, 64)])
def test_throughput_is_that_of_the_slower_pool(decodes, slots):
    """Requests of 100 and 11 tokens: a prefill step makes one, a decode replica `slots` in ten steps."""
    cost, count = TokenCost(6 * MS, 0, 0), 400
    fleet = apart(1, decodes, links=INSTANT, decode={"deployment": {"scheduler": {"max_num_seqs": slots}}})
    offered = [request(n, 0, 100, 11) for n in range(count)]
    run = FleetRun(fleet, offered, cost, max_num_batched_tokens=100, enable_chunked_prefill=True)
    rate = min(1 / 6, decodes * slots / 60)  # requests a millisecond
    assert run.done.finished == count
    assert run.done.duration_ns / MS == pytest.approx(count / rate, rel=0.2)
    assert run.done.duration_ns / MS >= count / rate * 0.99


def test_a_slow_link_fills_the_prefill_pool_and_sets_its_pace():
    """Backpressure: prompts of 96 tokens take 9.6 ms on a link of 1 GB/s, and prefills of 6 ms wait for that."""
    cost, count = TokenCost(6 * MS, 0, 0), 200
    offered = [request(n, 0, 96, 2) for n in range(count)]
    fleet = apart(links={"nic_gb_s": 1, "latency_us": 0})
    run = FleetRun(fleet, offered, cost, max_num_batched_tokens=96, num_blocks=61, max_model_len=128, steps=True)
    prefill = [step for step in run.steps.to_pylist() if step["replica"] == 0]
    full = prefill[len(prefill) // 2 :]
    assert min(step["used_blocks"] for step in full) >= 60 - 6
    starts = np.diff([step["start_ns"] for step in full])
    assert starts.mean() == pytest.approx(9.6 * MS, rel=0.01)


def test_a_full_decode_pool_leaves_kv_where_it_was_computed():
    """Ten requests fill the decode replica for 100 steps; those that come then hold blocks of the prefill replica."""
    cost = TokenCost(6 * MS, 0, 0)
    offered = [request(n, 0, 32, 101) for n in range(10)] + [request(n, 70 * MS, 32, 2) for n in range(10, 15)]
    decode = {"deployment": {"scheduler": {"max_num_seqs": 10, "num_blocks": 100}}}
    run = FleetRun(apart(links=INSTANT, decode=decode), offered, cost, max_num_batched_tokens=320, steps=True)
    late = run.rows[10:]
    early_end = max(row["finish_ns"] for row in run.rows[:10])
    assert all(row["first_token_ns"] < 100 * MS for row in late)
    assert all(row["finish_ns"] > early_end - 6 * MS for row in late)


def test_what_the_decode_replica_has_is_not_sent_again():
    """The second turn brings the 160 tokens of the first back; with blocks of 16, 176 of them are there already."""
    first = request(0, 0, (("a", 160),), 17)
    second = request(1, 10 * S, (("a", 160), ("out:0", 17), ("b", 63)), 5)
    links = {"nic_gb_s": 1, "latency_us": 0}
    run = FleetRun(apart(links=links), [first, second], shares_prefixes=True)
    assert [row["transfer_ns"] for row in run.rows] == [160 * KV, (240 - 176) * KV]
    assert [row["prefix_hit_tokens"] for row in run.rows] == [0, 160]  # on the prefill replica


def test_kv_that_is_there_altogether_is_let_go_at_once():
    """The same prompt again, a whole number of blocks: nothing is sent, and nothing stays behind."""
    offered = [request(n, n * S, (("a", 160),), 5) for n in range(3)]
    run = FleetRun(apart(), offered, shares_prefixes=True)
    assert [row["transfer_ns"] is None for row in run.rows] == [False, True, True]
    assert_everything_is_accounted_for(run, offered)


def test_a_lost_link_is_waited_for_and_what_was_on_it_starts_over():
    cost = TokenCost(6 * MS, 0, 0)
    links = {"nic_gb_s": 1, "latency_us": 0}
    loss = {"link_losses": [{"at_s": 0.010, "for_s": 1.0, "pool": "d"}]}
    (row,) = FleetRun(apart(links=links, failures=loss), [request(0, 0, 100, 3)], cost).rows
    assert row["transfer_ns"] == 1010 * MS - 6 * MS + 100 * KV
    assert row["finish_ns"] == 1020 * MS + 12 * MS and row["attempts"] == 1


@pytest.mark.parametrize("fleet", [apart, reserving])
@pytest.mark.parametrize("pool, at_s", [("p", 0.003), ("p", 0.010), ("d", 0.010), ("d", 0.020)])
def test_a_crash_in_prefill_transfer_or_decode_starts_the_request_again(fleet, pool, at_s):
    """Prefill to 6 ms, transfer to 16 ms, decode from there: then 6 + 10 + 12 ms more."""
    cost = TokenCost(6 * MS, 0, 0)
    crash = {"crashes": [{"at_s": at_s, "pool": pool, "recovery_s": 0}]}
    offered = [request(0, 0, 100, 3)]
    run = FleetRun(fleet(links={"nic_gb_s": 1, "latency_us": 0}, failures=crash), offered, cost)
    (row,) = run.rows
    assert_everything_is_accounted_for(run, offered)
    assert row["attempts"] == 2 and row["finish_ns"] == round(at_s * S) + 28 * MS


def test_the_prefill_replica_is_needed_no_more_once_its_kv_is_gone():
    cost = TokenCost(6 * MS, 0, 0)
    crash = {"crashes": [{"at_s": 0.020, "pool": "p", "recovery_s": None}]}
    run = FleetRun(apart(links={"nic_gb_s": 1, "latency_us": 0}, failures=crash), [request(0, 0, 100, 3)], cost)
    assert run.rows[0]["attempts"] == 1 and run.rows[0]["finish_ns"] == 28 * MS


def test_without_a_decode_replica_requests_are_rejected_and_nothing_stays_behind():
    crash = {"crashes": [{"at_s": 0, "pool": "d", "recovery_s": None}]}
    offered = [request(n, 1000 + n, 100, 3) for n in range(5)]
    run = FleetRun(apart(failures=crash), offered)
    assert_everything_is_accounted_for(run, offered)
    assert {row["reason"] for row in run.rows} == {"no decode replica is left"}


def test_requests_wait_on_prefill_replicas_for_a_decode_replica_that_is_on_its_way():
    crash = {"crashes": [{"at_s": 0, "pool": "d", "recovery_s": 2}]}
    offered = [request(n, 1000 + n, 100, 3) for n in range(5)]
    run = FleetRun(apart(failures=crash), offered)
    assert_everything_is_accounted_for(run, offered)
    assert all(row["status"] == "finished" and row["finish_ns"] > 2 * S > row["first_token_ns"] for row in run.rows)


def test_a_user_who_gives_up_stops_the_transfer():
    admission = {"patience": {"mean_s": 0.010, "distribution": "constant", "until": "finish"}}
    cost, links = TokenCost(6 * MS, 0, 0), {"nic_gb_s": 1, "latency_us": 0}
    offered = [request(0, 0, 100, 3)]
    for fleet, tokens in ((apart, 1), (reserving, 0)):
        run = FleetRun(fleet(links=links, admission=admission), offered, cost)
        assert_everything_is_accounted_for(run, offered)
        assert run.rows[0]["status"] == "cancelled" and run.rows[0]["output_tokens"] == tokens
        assert run.done.duration_ns == 10 * MS


def test_classes_may_be_served_whole_beside_the_rest():
    fleet = apart()
    fleet["pools"].append({"name": "s", "slo_classes": ["chat"]})
    offered = [request(0, 0, 100, 3, slo_class="chat"), request(1, 0, 100, 3)]
    run = FleetRun(fleet, offered)
    assert [(row["prefill_replica"], row["replica"]) for row in run.rows] == [(None, 2), (0, 1)]


def test_a_decode_pool_of_a_class_takes_over_its_requests():
    fleet = apart()
    fleet["pools"].append({"name": "e", "role": "decode", "slo_classes": ["chat"]})
    offered = [request(n, 0, 100, 3, slo_class="chat" if n % 2 else "") for n in range(6)]
    assert [row["replica"] for row in FleetRun(fleet, offered).rows] == [1, 2] * 3


def test_the_pools_must_keep_kv_alike():
    with pytest.raises(UserError, match=r"^fleet.pools.d.deployment.kv_cache_dtype.*must be bfloat16, as in pool 'p'"):
        FleetRun(apart(decode={"deployment": {"kv_cache_dtype": "fp8"}}), [request(0, 0, 10, 2)])
    fleet = apart()
    del fleet["links"]
    with pytest.raises(UserError, match="kv_bytes_per_token"):
        FleetRun(fleet, [request(0, 0, 10, 2)])


accidents = st.fixed_dictionaries(
    {},
    optional={
        "crashes": st.lists(
            st.fixed_dictionaries(
                {"at_s": times, "pool": st.sampled_from("pde"), "recovery_s": st.sampled_from([None, 0, 0.4])}
            ),
            max_size=3,
        ),
        "link_losses": st.lists(
            st.fixed_dictionaries(
                {"at_s": times, "for_s": st.sampled_from([0.1, 0.7]), "pool": st.sampled_from("pde")}
            ),
            max_size=3,
        ),
        "mtbf_s": st.sampled_from([3.0, 10.0]),
        "recovery_s": st.sampled_from([0.0, 0.5]),
    },
)
overrides = st.one_of(
    st.just({"scheduler": {"num_blocks": 80, "block_size": 8, "max_model_len": 600}}),
    st.sampled_from([{"policy": name} for name in POLICIES]),
)


@st.composite
def fleets(draw):
    links = {"nic_gb_s": draw(st.sampled_from([0.5, 1.0, 100.0])), "latency_us": draw(st.sampled_from([0, 500]))}
    if draw(st.booleans()):
        links["fabric_gb_s"] = 0.7
    fleet = apart(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        links,
        prefill={"deployment": draw(overrides)},
        decode={"deployment": draw(overrides)},
        router=draw(st.sampled_from(sorted(ROUTERS))),
        admission=draw(admissions),
        failures=draw(accidents),
    )
    fleet["pools"].append({"name": "e", "role": "decode", "replicas": draw(st.integers(0, 1)), "speed": 0.7})
    if draw(st.booleans()):
        fleet = _reserves(fleet)
    else:
        fleet["first_token_from"] = draw(st.sampled_from(["prefill", "decode"]))
    if draw(st.booleans()):
        fleet["decode_router"] = draw(st.sampled_from(sorted(ROUTERS)))
    if draw(st.booleans()):
        fleet["autoscaler"] = {
            "metric": draw(st.sampled_from(["queue", "kv"])),
            "target": 0.2,
            "max_replicas": 4,
            "interval_s": 0.1,
            "cold_start_s": draw(st.sampled_from([0, 0.3])),
            "cooldown_s": 0.2,
            "pool": draw(st.sampled_from("pd")),
        }
    return fleet


@given(
    fleet=fleets(),
    seed=st.integers(0, 1000),
    rate=st.sampled_from([10.0, 60.0]),
    blocks=st.sampled_from([70, 2000]),
    concurrency=st.sampled_from([None, 6]),
)
@examples(0.2)
def test_nobody_is_lost_and_leaps_are_exact(fleet, seed, rate, blocks, concurrency):
    offered = poisson(60, rate, seed)
    config = {"num_blocks": blocks, "max_num_seqs": 12, "concurrency": concurrency}
    leapt, stepped = (FleetRun(fleet, offered, leaps=leaps, **config) for leaps in (True, False))
    for run in (leapt, stepped):
        assert_everything_is_accounted_for(run, offered)
    assert leapt.done == stepped.done
    assert leapt.lives == stepped.lives
    assert leapt.requests.equals(stepped.requests)


@given(fleet=fleets(), seed=st.integers(0, 1000), overlapped=st.booleans())
@examples(0.1)
def test_nobody_is_lost_where_prefixes_are_shared(fleet, seed, overlapped):
    rng = np.random.default_rng(seed)
    offered = [
        request(n, n * 20 * MS, ((f"s{rng.integers(4)}", int(rng.integers(1, 200))), ("", 1 + n % 40)), 1 + n % 50)
        for n in range(60)
    ]
    run = FleetRun(fleet, offered, num_blocks=120, async_scheduling=overlapped, shares_prefixes=True)
    assert_everything_is_accounted_for(run, offered)
    for replica in run.cluster.replicas:
        replica.scheduler.pool.check([])
    again = FleetRun(fleet, offered, num_blocks=120, async_scheduling=overlapped, shares_prefixes=True)
    assert run.requests.equals(again.requests)


def test_simulate_takes_such_a_fleet_and_shows_the_transfers(tmp_path):
    offered = [request(n, n * 100 * MS, 1000, 20) for n in range(20)]
    write_parquet(Workload(offered), tmp_path / "trace.parquet")
    (tmp_path / "apart.yaml").write_text(
        "{model: Llama-3.1-8B, device: cuda, gpu_memory_utilization: 0.9, fleet: {pools: "
        "[{name: p, role: prefill}, {name: d, role: decode, deployment: {tensor_parallel_size: 2}}]}}"
    )
    trace, deployment, out = (str(tmp_path / name) for name in ("trace.parquet", "apart.yaml", "run"))
    done = CliRunner().invoke(
        cli, ["simulate", trace, "-d", deployment, "--gpu", "H100", "-o", out, "--format", "json"]
    )
    assert done.exit_code == 0, done.output
    transfer = json.loads(done.stdout)["distributions"]["transfer_ms"]
    assert (transfer["count"], transfer["p50"]) == (20, pytest.approx(0.02 + 1000 * 131_072 / 50e6, abs=1e-5))
    assert [(life["pool"], life["gpus"]) for life in Recording.load(out).run["replica_lives"]] == [("p", 1), ("d", 2)]
