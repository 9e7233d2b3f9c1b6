"""The simulator is compared with queueing theory, where the answer is known.

A replica with one slot is a single FCFS server. Replicas behind a router that knows their backlog are M/M/c. A batch
whose step time is proportional to its rows is processor sharing. Samples are compared with the formula by batch means
at 99.9 % confidence, seeds fixed; recursions and conservation laws hold to the nanosecond. Formulas: Kleinrock,
Queueing Systems I and II (1975, 1976); Harchol-Balter, Performance Modeling and Design (2013).
"""

from math import factorial

import numpy as np
import pytest
from scipy.stats import t as student

from tests.budget import simulated, within
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.router import find_router
from tokentwin.sim.run_log import TableSink

MS = 1_000_000
ONE_SLOT = {"max_num_seqs": 1, "max_num_batched_tokens": 100_000, "max_model_len": 100_000, "num_blocks": 10_000}
TOKEN_NS = 1_000  # time of one prompt token where service is proportional to the prompt
PER_TOKEN = TokenCost(0, TOKEN_NS, 0)


def poisson(rng, count, mean_ns, prompts=1, outputs=1, priorities=0):
    """Return Poisson arrivals with the given lengths (one number for all, or an array)."""
    arrivals = np.cumsum(rng.exponential(mean_ns, count)).astype(np.int64)
    lengths = (np.broadcast_to(x, count).tolist() for x in (arrivals, prompts, outputs, priorities))
    return [
        WorkloadRequest(i, arrival, (("", prompt),), output, priority)
        for i, (arrival, prompt, output, priority) in enumerate(zip(*lengths, strict=True))
    ]


class Run:
    """A simulated run as arrays in order of arrival, times in nanoseconds."""

    def __init__(
        self, requests, cost, *, replicas=1, router="round-robin", steps=False, policy="vllm", queue="fcfs", **scheduler
    ):
        sink = TableSink()
        self.cluster = Cluster(
            Deployment(policy=policy, scheduler=SchedulerConfig(policy=queue, **scheduler)),
            cost,
            sink,
            replicas=replicas,
            router=find_router(router),
            shares_prefixes=False,
            steps=steps,
        )
        self.integrals = {"in system": 0, "waiting": 0}
        self._integrate()
        self.simulated = self.cluster.run(Workload(requests, shares_prefixes=False))
        table = sink.requests.sort_by("request_id")
        self.steps = sink.steps
        self.table = table
        self.arrival, self.scheduled, self.finish, self.replica, self.preempted = (
            table[name].to_numpy() for name in ("arrival_ns", "scheduled_ns", "finish_ns", "replica", "preempted_ns")
        )

    @property
    def waiting_ns(self):
        return self.scheduled - self.arrival

    @property
    def sojourn_ns(self):
        return self.finish - self.arrival

    def _integrate(self):
        """Integrate, over time, the state that the replicas themselves hold; between events nothing changes."""
        clock, replicas = self.cluster._clock, self.cluster.replicas
        event = clock.step

        def step():
            elapsed = clock.peek() - clock.now_ns
            if 0 < elapsed < float("inf"):
                self.integrals["in system"] += elapsed * sum(r.outstanding_requests for r in replicas)
                self.integrals["waiting"] += elapsed * sum(len(r.scheduler.waiting) for r in replicas)
            event()

        clock.step = step


def assert_mean(values, expected, batches=20, precision=0.1):
    """`expected` is in the 99.9 % confidence interval of the mean, which is narrower than +-`precision`, in `long`."""
    means = np.array([batch.mean() for batch in np.array_split(np.asarray(values, float), batches)])
    half = student.ppf(0.9995, batches - 1) * means.std(ddof=1) / np.sqrt(batches)
    assert half < within(precision) * expected, f"+-{half / expected:.1%} is too wide to tell"
    assert abs(means.mean() - expected) < half, f"{means.mean():.0f} +- {half:.0f}, theory says {expected:.0f}"


def erlang_c(servers, load):
    """Return the probability that an arrival waits in M/M/c; `load` is lambda / mu."""
    rho = load / servers
    top = load**servers / factorial(servers) / (1 - rho)
    return top / (sum(load**k / factorial(k) for k in range(servers)) + top)


class LeastWork:
    """A central queue as a router: a request joins the replica that will be free first (Kiefer and Wolfowitz 1955)."""

    def __init__(self):
        self.free_at = {}

    def choose(self, request, replicas):
        replica = min(replicas, key=lambda r: self.free_at.get(r.index, 0))
        begins = max(self.free_at.get(replica.index, 0), request.arrival_ns)
        self.free_at[replica.index] = begins + request.prompt_len * TOKEN_NS
        return replica


class AtRandom:
    """A router that chooses at random, with its own random numbers."""

    def __init__(self):
        self._rng = np.random.default_rng(99)

    def choose(self, request, replicas):
        return replicas[self._rng.integers(len(replicas))]


# One server: exact recursion, then the formulas


@pytest.mark.statistical
@pytest.mark.parametrize("rho", [0.5, 0.7])
def test_m_d_1_waits_as_pollaczek_and_khinchine_say(rho):
    service, count = 10 * MS, simulated(30_000)
    run = Run(poisson(np.random.default_rng(1), count, service / rho), TokenCost(service, 0, 0), **ONE_SLOT)
    assert_mean(run.waiting_ns, rho * service / (2 * (1 - rho)), precision=0.15)
    assert run.simulated.steps == count


def test_every_wait_follows_lindleys_recursion():
    rng = np.random.default_rng(2)
    prompts = rng.geometric(1 / 1000, 5_000)
    run = Run(poisson(rng, 5_000, 1_250 * TOKEN_NS, prompts), PER_TOKEN, **ONE_SLOT)
    free_at = 0
    for arrival, prompt, scheduled, finish in zip(run.arrival, prompts, run.scheduled, run.finish, strict=True):
        assert scheduled == max(free_at, arrival)
        free_at = scheduled + prompt * TOKEN_NS
        assert finish == free_at


@pytest.mark.statistical
@pytest.mark.parametrize("in_decode", [False, True], ids=["service in prefill", "service in decode"])
def test_m_g_1_waits_as_pollaczek_and_khinchine_say(in_decode):
    """Two-point service, 90 % short and 10 % seven times longer, as prompt tokens or as decode steps."""
    rng = np.random.default_rng(3)
    count = simulated(30_000)
    tokens = np.where(rng.random(count) < 0.9, 5, 35)
    mean, square = 0.9 * 5 + 0.1 * 35, 0.9 * 5**2 + 0.1 * 35**2
    rho = 0.5
    sizes = {"outputs": tokens} if in_decode else {"prompts": tokens}
    run = Run(poisson(rng, count, mean * TOKEN_NS / rho, **sizes), PER_TOKEN, **ONE_SLOT)
    rate = rho / mean
    assert_mean(run.waiting_ns, rate * square / (2 * (1 - rho)) * TOKEN_NS, precision=0.15)


@pytest.mark.statistical
def test_priorities_without_preemption_wait_as_cobham_says():
    """M/G/1 with two classes: W_k = R / ((1 - sigma_(k-1)) (1 - sigma_k)), R the mean residual work."""
    rng = np.random.default_rng(4)
    count = simulated(40_000)
    prompts = rng.geometric(1 / 100, count)
    urgent = rng.random(count) < 0.4
    rho, mean, square = 0.7, 100, (2 - 1 / 100) * 100**2
    requests = poisson(rng, count, mean * TOKEN_NS / rho, prompts, priorities=np.where(urgent, 0, 1))
    run = Run(requests, PER_TOKEN, **ONE_SLOT, queue="priority")
    residual = rho / mean * square / 2 * TOKEN_NS
    assert_mean(run.waiting_ns[urgent], residual / (1 - 0.4 * rho), precision=0.15)
    assert_mean(run.waiting_ns[~urgent], residual / ((1 - 0.4 * rho) * (1 - rho)), precision=0.2)


# Several servers


@pytest.mark.statistical
def test_m_m_c_waits_as_erlang_says():
    """Four one-slot replicas fed by a central queue; service exponential but for a thousandth."""
    rng = np.random.default_rng(5)
    count, servers, mean, rho = simulated(40_000), 4, 1000 * TOKEN_NS, 0.7
    requests = poisson(rng, count, mean / (servers * rho), rng.geometric(1 / 1000, count))
    run = Run(requests, PER_TOKEN, replicas=servers, router=f"{__name__}:LeastWork", **ONE_SLOT)
    waits = erlang_c(servers, servers * rho)
    assert_mean(run.waiting_ns > 0, waits)
    assert_mean(run.waiting_ns, waits * mean / (servers * (1 - rho)), precision=0.25)


@pytest.mark.statistical
def test_a_batch_of_c_slots_is_m_m_c_too():
    """One replica, c slots, a step time that does not depend on the batch; an arrival waits for a step at most."""
    rng = np.random.default_rng(6)
    count, slots, step, tokens, rho = simulated(20_000), 3, MS, 200, 0.7
    requests = poisson(rng, count, tokens * step / (slots * rho), outputs=rng.geometric(1 / tokens, count))
    run = Run(requests, TokenCost(step, 0, 0), **(ONE_SLOT | {"max_num_seqs": slots}))
    wait = erlang_c(slots, slots * rho) * tokens * step / (slots * (1 - rho))
    assert_mean(run.sojourn_ns - step / 2, tokens * step + wait)


@pytest.mark.statistical
def test_a_random_split_of_poisson_is_m_m_1_at_every_replica():
    rng = np.random.default_rng(7)
    count, replicas, mean, rho = simulated(45_000), 3, 1000 * TOKEN_NS, 0.5
    requests = poisson(rng, count, mean / (replicas * rho), rng.geometric(1 / 1000, count))
    run = Run(requests, PER_TOKEN, replicas=replicas, router=f"{__name__}:AtRandom", **ONE_SLOT)
    for index in range(replicas):
        assert_mean(run.sojourn_ns[run.replica == index], mean / (1 - rho), precision=0.2)


# Processor sharing


@pytest.mark.statistical
@pytest.mark.parametrize("shape", ["constant", "geometric", "two-point"])
def test_a_batch_whose_steps_cost_by_the_row_is_processor_sharing(shape):
    """M/G/1-PS: the mean sojourn E[S] / (1 - rho) does not depend on the shape of G.

    Sharing is by whole steps, which an arrival waits for: half of one, (1 / (1 - rho) + 1) rows, is allowed for.
    """
    rng = np.random.default_rng(8)
    count, rho, mean = simulated(25_000), 0.6, 200
    outputs = {
        "constant": np.full(count, mean),
        "geometric": rng.geometric(1 / mean, count),
        "two-point": np.where(rng.random(count) < 0.8, 50, 800),
    }[shape]
    requests = poisson(rng, count, mean * TOKEN_NS / rho, outputs=outputs)
    run = Run(requests, PER_TOKEN, **(ONE_SLOT | {"max_num_seqs": 500}))
    step = (1 / (1 - rho) + 1) * TOKEN_NS
    assert_mean(run.sojourn_ns - step / 2, mean * TOKEN_NS / (1 - rho), precision=0.15)
    if shape == "two-point":  # and a request's sojourn is proportional to its size
        assert_mean(run.sojourn_ns[outputs == 50] - step / 2, 50 * TOKEN_NS / (1 - rho), precision=0.15)


# Conservation laws, exact over any finite run

SERVING = {"max_num_seqs": 24, "max_num_batched_tokens": 256, "max_model_len": 1024}


def serving_requests(seed, count=600, rate_per_s=60):
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(4.5, 1, count), 1, 600).astype(int)
    outputs = np.clip(rng.exponential(40, count), 1, 300).astype(int)
    return poisson(rng, count, 1e9 / rate_per_s, prompts, outputs)


@pytest.mark.parametrize("policy", ["vllm", "static", "prefill-first"])
@pytest.mark.parametrize("blocks", [2000, 70], ids=["roomy", "tight"])
@pytest.mark.parametrize("steps", [True, False], ids=["stepping", "leaping"])
def test_littles_law_is_an_identity(policy, blocks, steps):
    """L = lambda W: requests held, integrated over time, are their times in the system, to the nanosecond.

    The same for the queue, in which preempted requests wait again.
    """
    cost = TokenCost(5 * MS, 10_000, 300)
    run = Run(serving_requests(9), cost, replicas=2, steps=steps, policy=policy, num_blocks=blocks, **SERVING)
    assert run.integrals["in system"] == run.sojourn_ns.sum()
    assert run.integrals["waiting"] == run.waiting_ns.sum() + run.preempted.sum()
    assert (run.preempted.sum() > 0) == (blocks == 70 and policy != "static")


@pytest.mark.parametrize("policy", ["vllm", "prefill-first"])
@pytest.mark.parametrize("blocks", [2000, 70], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_no_replica_idles_while_it_has_a_request(policy, blocks, overlapped):
    """Between the end of a step and the start of the next nobody was there; and steps never overlap."""
    cost = TokenCost(5 * MS, 10_000, 300)
    requests = serving_requests(10, rate_per_s=12)
    run = Run(
        requests, cost, replicas=2, steps=True, policy=policy, num_blocks=blocks,
        async_scheduling=overlapped, **SERVING,
    )  # fmt: skip
    idled = 0
    for replica in (0, 1):
        mine = run.replica == replica
        arrival, finish = run.arrival[mine], run.finish[mine]
        of_replica = run.steps["replica"].to_numpy() == replica
        start, end = (run.steps[name].to_numpy()[of_replica] for name in ("start_ns", "end_ns"))
        assert (start[1:] >= end[:-1]).all()
        for idle_from, idle_to in zip(end[:-1], start[1:], strict=True):
            if idle_to > idle_from:
                idled += 1
                assert not ((arrival < idle_to) & (finish > idle_from)).any()
    assert idled > 10


def test_busy_time_is_the_sum_of_the_prices_of_the_steps():
    cost = TokenCost(5 * MS, 10_000, 300)
    run = Run(serving_requests(11), cost, steps=True, num_blocks=70, **SERVING)
    column = {name: run.steps[name].to_numpy() for name in run.steps.column_names if name.endswith(("ns", "s", "t"))}
    tokens = column["prefill_tokens"] + column["decode_rows"]
    pairs = column["prefill_pairs"] + column["decode_context"] + column["decode_rows"]
    priced = cost.base_ns + cost.per_token_ns * tokens + cost.per_pair_ps * pairs // 1000
    assert (column["end_ns"] - column["start_ns"] == priced).all()
    computed = sum(r.prompt_len + r.output_len - 1 for r in serving_requests(11))  # the last token never is
    lost = run.table["recomputed_tokens"].to_numpy().sum()
    assert lost > 0
    assert tokens.sum() == computed + lost


def test_work_does_not_depend_on_the_order_of_service():
    """Prices by the token only: whatever the policy, one server is busy for the same time and ends at the same."""
    requests = serving_requests(12, rate_per_s=300)
    work = sum(r.prompt_len + r.output_len - 1 for r in requests) * TOKEN_NS
    ends = set()
    for policy in ("vllm", "prefill-first"):
        run = Run(requests, PER_TOKEN, steps=True, policy=policy, num_blocks=5000, **SERVING)
        busy = run.steps["end_ns"].to_numpy() - run.steps["start_ns"].to_numpy()
        assert busy.sum() == work
        ends.add(run.simulated.duration_ns)
    assert len(ends) == 1
