"""KV from outside the engine, as a scheduler sees it: loading, keeping, failing, and that nobody waits for ever.

That it decides as vLLM does is tested by recordings (`tests/data/oracle_features/load_*`).
"""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.external import connect
from tokentwin.serving.request import Status
from tokentwin.serving.scheduler import POLICIES, find_policy
from tokentwin.serving.workload import WorkloadRequest

BLOCK = 4


class Outside:
    """Has the first `tokens` of each request's KV, by id, and remembers what it was asked to load."""

    def __init__(self, tokens=None, kept=(), synchronous=False):
        self.synchronous = synchronous
        self.tokens = tokens or {}
        self.kept = kept
        self.loads = []

    def matched(self, request, cached):
        most = request.known - self.synchronous
        return max(min(self.tokens.get(request.id, 0), most) - cached, 0)

    def load(self, request, start, tokens):
        assert request.block_count == -(-(start + tokens) // BLOCK) or self.synchronous
        assert tokens > 0
        self.loads.append((request, start, tokens))

    def admitted(self, request):
        assert request.status is Status.RUNNING

    def keeps(self, request):
        return request.id in self.kept


def scheduler(outside, policy="vllm", shares=False, order="fcfs", **config):
    sizes = {
        "num_blocks": 11,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 40,
        "block_size": BLOCK,
        "static_timeout_ms": 0.0,
    }
    made = find_policy(policy)(SchedulerConfig(policy=order, **(sizes | config)), shares_prefixes=shares)
    connect(made, outside)
    return made


def request(id, prompt, output=1):
    return WorkloadRequest(id, id, ((f"s{id}", prompt),), output)


def step(made):
    """Return the tokens of each request in the next step, by id; the step ends at once."""
    plan = made.schedule()
    rows = {row.request.id: row.tokens for row in plan.rows()}
    if plan.tokens:
        made.commit(plan)
    return rows


@pytest.mark.parametrize("shares", [False, True])
def test_a_loading_request_has_its_blocks_and_lets_others_pass(shares):
    outside = Outside({0: 12})
    made = scheduler(outside, shares=shares)
    first, second = made.add(request(0, 18)), made.add(request(1, 8))
    assert step(made) == {1: 8}
    assert first.status is Status.LOADING and [load[1:] for load in outside.loads] == [(0, 12)]
    assert second.status is Status.FINISHED
    assert made.pool.total - made.pool.free == first.block_count == 3
    assert step(made) == {}
    made.loaded(first)
    assert first.status is Status.WAITING and first.first_hit == 0
    assert step(made) == {0: 6}
    assert first.cached == 12
    assert made.pool.free == made.pool.total


def test_what_is_found_is_not_loaded():
    outside = Outside({1: 16})
    made = scheduler(outside, shares=True)
    made.add(WorkloadRequest(0, 0, (("same", 8),), 1))
    step(made)
    later = made.add(WorkloadRequest(1, 1, (("same", 17),), 1))
    step(made)
    assert outside.loads == [(later, 8, 8)]
    made.loaded(later)
    assert later.first_hit == 8 and step(made) == {1: 1}


def test_what_was_loaded_is_found_by_others_from_its_turn_on():
    made = scheduler(Outside({0: 8}), shares=True, max_num_seqs=1)
    first, again = (WorkloadRequest(id, id, (("same", 9),), 3) for id in (0, 2))
    made.add(first)
    step(made)
    made.add(request(1, 4, output=2))
    step(made)
    made.loaded(made.requests[0])
    made.add(again)
    assert not made.pool.lookup(made.requests[2]).blocks
    assert step(made) == {1: 1} and not made.pool.lookup(made.requests[2]).blocks  # no seat is free before
    assert step(made) == {0: 1} and made.pool.lookup(made.requests[2]).blocks == 2


def test_a_prompt_can_be_loaded_whole_and_its_last_token_is_computed_again():
    made = scheduler(Outside({0: 16}))
    whole = made.add(request(0, 16))
    step(made)
    assert whole.block_count == 4
    made.loaded(whole)
    assert step(made) == {0: 1}


def test_what_a_step_loads_itself_is_admitted_at_once():
    outside = Outside({0: 12}, synchronous=True)
    made = scheduler(outside, shares=True)
    first = made.add(request(0, 18))
    assert step(made) == {0: 6} and outside.loads == [(first, 0, 12)] and first.first_hit == 0
    made.add(WorkloadRequest(1, 1, (("s0", 18), ("more", 2)), 1))
    assert step(made) == {1: 4}  # 4 blocks of the first are found


@pytest.mark.parametrize("shares", [False, True])
def test_an_aborted_load_frees_its_blocks_when_it_has_ended(shares):
    made = scheduler(Outside({0: 12}), shares=shares)
    gone = made.add(request(0, 18))
    step(made)
    made.abort(0)
    assert gone.status is Status.ABORTED and not made.requests and made.pool.free == made.pool.total - 3
    made.loaded(gone)
    assert made.pool.free == made.pool.total
    made.add(request(1, 8))
    assert step(made) == {1: 8}


def test_one_that_was_loaded_can_be_aborted_before_it_runs():
    made = scheduler(Outside({0: 12}))
    gone = made.add(request(0, 18))
    step(made)
    made.loaded(gone)
    made.abort(0)
    assert made.pool.free == made.pool.total and step(made) == {}


def test_a_load_that_fails_leaves_nothing_behind():
    outside = Outside({0: 12})
    made = scheduler(outside)
    waiting = made.add(request(0, 18))
    step(made)
    made.load_failed(waiting)
    waiting.check()
    outside.tokens.clear()
    assert waiting.status is Status.WAITING
    assert step(made) == {0: 18} and waiting.cached == 0
    assert made.pool.free == made.pool.total


def test_a_load_that_failed_can_be_tried_again():
    outside = Outside({0: 12})
    made = scheduler(outside)
    made.add(request(0, 18))
    for _ in range(3):
        step(made)
        made.load_failed(outside.loads[-1][0])
    step(made)
    made.loaded(outside.loads[-1][0])
    assert len(outside.loads) == 4 and step(made) == {0: 6} and made.pool.free == made.pool.total


@pytest.mark.parametrize("shares", [False, True])
def test_blocks_that_a_step_in_flight_writes_to_are_not_free_before_it_has_ended(shares):
    """A load could be under way into them at the same time."""
    made = scheduler(Outside(), shares=shares, async_scheduling=True)
    made.add(request(0, 4, output=9))
    plans = [made.schedule(), made.schedule()]
    made.abort(0)
    assert made.pool.free == made.pool.total - 2 and made.steady_steps() == 0
    made.commit(plans[0])
    assert made.pool.free == made.pool.total - 2
    made.commit(plans[1])
    assert made.pool.free == made.pool.total


def test_a_request_of_a_step_in_flight_is_not_preempted():
    made = scheduler(Outside(), async_scheduling=True, num_blocks=5)
    made.add(request(0, 8, output=6))
    made.add(request(1, 4, output=9))
    plans, preempted = [], []
    while made.requests:
        plan = made.schedule()
        preempted += plan.preempted
        for victim in plan.preempted:
            assert all(row.request is not victim for flying in plans for row in flying.rows())
        if plan.tokens:
            plans.append(plan)
        if len(plans) > 1 or not plan.tokens:
            made.commit(plans.pop(0))
    assert preempted


def test_blocks_are_kept_until_they_are_released():
    made = scheduler(Outside(kept=(0,)))
    done, waits = made.add(request(0, 20)), made.add(request(1, 24))
    assert step(made) == {0: 20}
    assert done.status is Status.FINISHED and made.pool.free == 5
    assert step(made) == {} and waits.status is Status.WAITING
    made.release(done)
    assert step(made) == {1: 24}


def test_what_was_loaded_passes_a_head_that_does_not_fit():
    """The head would wait for blocks of one that waits behind it (vLLM's issue 45388)."""
    outside = Outside({1: 20})
    made = scheduler(outside)
    made.add(request(0, 8, output=20))
    step(made)
    loading = made.add(request(1, 24))  # 5 of the 10 blocks; request 0 will need 7
    while 0 in step(made):
        pass
    assert loading.status is Status.LOADING and not made.running and made.pool.free == 5
    assert next(iter(made.waiting)).id == 0  # it preempted itself, and comes first
    made.loaded(loading)
    assert step(made) == {1: 4}
    assert 0 in step(made)


@pytest.mark.parametrize(("blocks", "loads"), [(10, 1), (11, 2)])
def test_a_load_leaves_the_blocks_that_earlier_loads_have_still_to_take(blocks, loads):
    outside = Outside({0: 20, 1: 20})
    made = scheduler(outside, num_blocks=blocks + 1, scheduler_reserve_full_isl=False)
    made.add(request(0, 24))
    made.add(request(1, 24))
    step(made)
    assert len(outside.loads) == loads


@pytest.mark.parametrize(("prompt", "loads"), [(39, 0), (36, 1)])
def test_a_load_leaves_the_blocks_that_prompts_under_way_have_still_to_take(prompt, loads):
    outside = Outside({1: 4})
    made = scheduler(outside, long_prefill_token_threshold=8, scheduler_reserve_full_isl=False)
    made.add(request(0, prompt))  # all 10 blocks, or 9
    made.add(request(1, 6))
    step(made)
    assert len(outside.loads) == loads


def priority_deadlock(**config):
    """Run two loads, of which the first lacks blocks that the other has; vLLM waits for ever, too."""
    outside = Outside({0: 20, 1: 16})
    made = scheduler(outside, order="priority", **config)
    made.add(WorkloadRequest(0, 0, (("a", 24),), 1, priority=1))
    step(made)
    made.add(WorkloadRequest(1, 1, (("b", 32),), 1, priority=0))
    step(made)
    for loading, _, _ in outside.loads:
        made.loaded(loading)
    return [step(made) for _ in range(2)]


def test_loads_that_wait_for_one_another_for_ever_are_an_error():
    with pytest.raises(UserError, match=r"scheduler\.num_blocks: 11.*set scheduler_reserve_full_isl"):
        priority_deadlock(scheduler_reserve_full_isl=False)


def test_with_whole_prompts_reserved_loads_never_wait_for_one_another():
    assert priority_deadlock(scheduler_reserve_full_isl=True) == [{0: 4}, {}]


def test_a_policy_that_can_load_nothing_is_refused():
    class Own:
        pass

    with pytest.raises(UserError, match=r"Own.*derive it from VllmScheduler"):
        connect(Own(), Outside())


def test_decode_runs_are_leapt_over_while_others_load():
    made = scheduler(Outside({1: 8}))
    made.add(request(0, 4, output=20))
    step(made)
    loading = made.add(request(1, 12))
    step(made)
    assert loading.status is Status.LOADING and made.steady_steps() > 1
    made.loaded(loading)
    assert made.steady_steps() == 0


arrivals = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 30)), min_size=1, max_size=12)


@examples(0.5)
@given(
    drawn=arrivals,
    policy=st.sampled_from(sorted(POLICIES)),
    shares=st.booleans(),
    overlapped=st.booleans(),
    order=st.sampled_from(["fcfs", "priority"]),
    chunked=st.booleans(),
    reserves=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_nobody_waits_for_ever(drawn, policy, shares, overlapped, order, chunked, reserves, seed):
    """Loads end, fail or are aborted at random, blocks are kept at random: all others finish, and all is freed."""
    rng = Random(seed)
    kept = {id for id in range(len(drawn)) if rng.random() < 0.3}
    outside = Outside({id: loadable for id, (_, _, loadable) in enumerate(drawn)}, kept)
    sizes = {
        "max_num_batched_tokens": 7 if chunked else 64,
        "enable_chunked_prefill": chunked,
        "scheduler_reserve_full_isl": reserves or order == "priority",
        "async_scheduling": overlapped,
    }
    made = scheduler(outside, policy, shares, order, max_num_seqs=3, **sizes)
    coming = [request(id, prompt, output) for id, (prompt, output, _) in enumerate(drawn)]
    plans, kept_requests, ends, aborted = [], [], {}, set()
    for _ in range(3000):
        while coming and rng.random() < 0.4:
            made.add(coming.pop(0))
        if outside.loads and rng.random() < 0.3:
            loading, _, _ = outside.loads.pop(rng.randrange(len(outside.loads)))
            if rng.random() < 0.2:
                outside.tokens[loading.id] = 0
                made.load_failed(loading)
            else:
                made.loaded(loading)
        if made.requests and rng.random() < 0.02:
            aborted.add(made.abort(rng.choice(sorted(made.requests))).id)
        if kept_requests and rng.random() < 0.2:
            made.release(kept_requests.pop())
        plan = made.schedule()
        if plan.tokens:
            plans.append(plan)
        for live in made.requests.values():
            live.check()
        if plans and (len(plans) > overlapped or not plan.tokens):
            for done in made.commit(plans.pop(0)):
                ends[done.id] = done.outputs
                kept_requests += [done] if done.id in kept else []
        if not (coming or made.requests or outside.loads or kept_requests or plans):
            break
    assert ends == {id: output for id, (_, output, _) in enumerate(drawn) if id not in aborted}
    assert made.pool.free == made.pool.total
