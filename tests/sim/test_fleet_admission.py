"""Admission: loss and abandonment as queueing theory has them, retries as stated, and all of it in the recording.

Formulas: Kleinrock, Queueing Systems I (1975), section 3.6 (M/M/1/K); Palm (1957) and Garnett, Mandelbaum and Reiman
(2002) for M/M/c+M (Erlang A); Barrer (1957) for M/M/1+D; birth-death chains solved term by term.
"""

import numpy as np
import pytest
from scipy.stats import t as student

from tests.budget import simulated, within
from tests.sim.fleet_samples import MS, ONE_SLOT, FleetRun, S, assert_everything_is_accounted_for, poisson
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.fleet import Patience, Retry
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.gateway import backoff_s, patience_s
from tokentwin.sim.router import ROUTERS
from tokentwin.traces.metrics.run_metrics import RunMetrics

TOKENS = 1000  # mean prompt tokens; a token takes 1 us, so that service is nearly exponential with mean 1 ms
PER_TOKEN = TokenCost(0, 1000, 0)


def single_steps(count, rho, seed=1, servers=1):
    """Return requests of one step each with exponential lengths: the queues of the textbooks."""
    prompts = np.random.default_rng(seed).geometric(1 / TOKENS, count)
    return poisson(count, servers * rho * S / (TOKENS * 1000), seed + 100, prompts=prompts, outputs=1)


def birth_death(births, deaths):
    """Return stationary probabilities of states 0, 1, ..., from the rates up and down between neighbours."""
    weights = np.cumprod(np.concatenate([[1.0], np.asarray(births, float) / np.asarray(deaths, float)]))
    return weights / weights.sum()


def assert_share(happened, expected, batches=20, precision=0.1):
    """Assert that `expected` is in the 99.9 % confidence interval of the share, by batch means."""
    means = np.array([batch.mean() for batch in np.array_split(np.asarray(happened, float), batches)])
    half = student.ppf(0.9995, batches - 1) * means.std(ddof=1) / np.sqrt(batches)
    assert half < within(precision) * expected, f"+-{half / expected:.1%} is too wide to tell"
    assert abs(means.mean() - expected) < half, f"{means.mean():.4f} +- {half:.4f}, theory says {expected:.4f}"


# Queue limits


@pytest.mark.statistical
@pytest.mark.parametrize("rho, limit", [(0.8, 3), (1.5, 5)])
def test_a_limited_queue_loses_as_m_m_1_k(rho, limit):
    """K = limit + the one in service; P(loss) = (1 - rho) rho^K / (1 - rho^(K+1))."""
    offered = single_steps(simulated(40_000), rho)
    run = FleetRun({"admission": {"max_queued_per_replica": limit}}, offered, PER_TOKEN, **ONE_SLOT)
    k = limit + 1
    assert_share(run.column("status") == "rejected", (1 - rho) * rho**k / (1 - rho ** (k + 1)))
    assert_everything_is_accounted_for(run, offered)
    assert {row["reason"] for row in run.rows} == {"", f"{limit} requests were queued at its replica"}


@pytest.mark.statistical
def test_a_limit_on_the_fleet_loses_as_m_m_c_k(monkeypatch):
    """Three one-slot replicas fed by what amounts to a central queue of two places."""
    monkeypatch.setitem(ROUTERS, "least-work", "tests.sim.test_fleet_admission:LeastWork")  # sees all, as ours do
    servers, limit, rho = 3, 2, 1.2
    fleet = {
        "pools": [{"replicas": servers}],
        "router": "least-work",
        "admission": {"max_queued": limit},
    }
    run = FleetRun(fleet, single_steps(simulated(40_000), rho, servers=servers), PER_TOKEN, **ONE_SLOT)
    places = servers + limit
    states = birth_death([servers * rho] * places, [min(n + 1, servers) for n in range(places)])
    assert_share(run.column("status") == "rejected", states[-1])


class LeastWork:
    """A router that chooses the replica that is free first, as a central queue would."""

    def choose(self, request, replicas):
        return min(replicas, key=_work)


def _work(replica):
    return replica._last_end_ns - replica._clock.now_ns + sum(r.prompt_len for r in replica.scheduler.waiting) * 1000 \
        if replica.outstanding_requests else 0  # fmt: skip


# Users who give up


@pytest.mark.statistical
def test_impatience_in_the_queue_is_erlang_a():
    """M/M/1+M, patience exponential: deaths at n are mu + (n - 1) theta; those in service stay (one step each)."""
    rho, theta = 1.2, 0.5  # rates in units of the service rate
    patience = {"mean_s": TOKENS * 1e-6 / theta, "until": "first-token"}
    offered = single_steps(simulated(30_000), rho)
    run = FleetRun({"admission": {"patience": patience}}, offered, PER_TOKEN, **ONE_SLOT)
    gone = run.column("status") == "cancelled"
    served_too = np.array([row["scheduled_ns"] is not None for row in run.rows])
    assert (gone & served_too).any()  # a step is not stopped: the server is busy to its end
    # So the server sees M/M/1 in which only the queue abandons.
    states = birth_death([rho] * 60, [1 + n * theta for n in range(60)])
    in_queue = sum(p * theta * max(n - 1, 0) for n, p in enumerate(states)) / rho
    assert_share(gone & ~served_too, in_queue)
    assert_everything_is_accounted_for(run, offered)


@pytest.mark.statistical
def test_impatience_to_the_end_abandons_service_too():
    """M/M/1+M with deaths mu + n theta; service is a thousand decode steps on average, so it can be left half-way."""
    rho, theta, step = 1.1, 0.3, MS
    count = simulated(12_000)
    outputs = np.random.default_rng(5).geometric(1 / 200, count)
    offered = poisson(count, rho * S / (200 * step), 6, prompts=1, outputs=outputs)
    patience = {"mean_s": 200 * step / theta / S, "until": "finish"}
    run = FleetRun({"admission": {"patience": patience}}, offered, TokenCost(step, 0, 0), **ONE_SLOT)
    states = birth_death([rho] * 60, [1 + (n + 1) * theta for n in range(60)])
    assert_share(run.column("status") == "cancelled", sum(p * theta * n for n, p in enumerate(states)) / rho)
    partly = [row["output_tokens"] for row in run.rows if row["status"] == "cancelled"]
    assert max(partly) > 50 and all(row["finish_ns"] is None for row in run.rows if row["status"] == "cancelled")


@pytest.mark.statistical
def test_a_queue_timeout_is_m_m_1_with_constant_patience():
    """M/M/1+D: the virtual wait has density lambda P0 e^((lambda - mu) x) below the deadline D (Barrer 1957).

    A request times out if its wait would exceed D; P0 follows as total probability is 1.
    """
    rho, deadline = 1.3, 2.0  # in units of the mean service
    offered = single_steps(simulated(40_000), rho)
    run = FleetRun({"admission": {"queue_timeout_s": deadline * TOKENS * 1e-6}}, offered, PER_TOKEN, **ONE_SLOT)
    below = rho * (np.exp((rho - 1) * deadline) - 1) / (rho - 1)
    above = rho * np.exp((rho - 1) * deadline)  # beyond D the work only drains: e^(-mu (x - D))
    assert_share(run.column("status") == "timed_out", above / (1 + below + above))
    waits = run.column("end_ns") - run.column("arrival_ns")
    assert set(waits[run.column("status") == "timed_out"]) == {round(deadline * TOKENS * 1000)}
    assert_everything_is_accounted_for(run, offered)


# Second attempts


def test_backoff_grows_is_bounded_and_jittered():
    retry = Retry(max_attempts=9, backoff_s=0.5, factor=2, max_backoff_s=3, jitter=0)
    assert [backoff_s(retry, 7, k) for k in (1, 2, 3, 4, 8)] == [0.5, 1, 2, 3, 3]
    jittered = Retry(max_attempts=9, backoff_s=1, factor=1, jitter=0.4)
    waits = [backoff_s(jittered, id, 1) for id in range(2000)]
    assert 0.6 <= min(waits) < 0.61 and 0.99 < max(waits) <= 1 and np.mean(waits) == pytest.approx(0.8, abs=0.01)
    assert waits == [backoff_s(jittered, id, 1) for id in range(2000)]


def test_patience_has_its_distribution():
    drawn = np.array([patience_s(Patience(mean_s=3), id) for id in range(4000)])
    assert drawn.mean() == pytest.approx(3, rel=0.05) and np.median(drawn) == pytest.approx(3 * np.log(2), rel=0.06)
    assert {patience_s(Patience(mean_s=3, distribution="constant"), id) for id in range(5)} == {3}


def test_a_refused_request_comes_back_when_it_said_it_would():
    """One slot, one place in the queue: requests 2 and 3 are refused, and come back after 100, then 200 ms."""
    offered = [WorkloadRequest(i, i, (("", 8),), 25) for i in range(4)]  # 250 ms each
    retry = {"max_attempts": 3, "backoff_s": 0.1, "jitter": 0}
    admission = {"max_queued_per_replica": 1, "retry": retry}
    run = FleetRun({"admission": admission}, offered, TokenCost(10 * MS, 0, 0), **ONE_SLOT)
    assert [row["attempts"] for row in run.rows] == [1, 1, 3, 3]
    assert [row["status"] for row in run.rows] == ["finished", "finished", "finished", "rejected"]
    assert run.rows[2]["queued_ns"] == 300 * MS + 2 and run.rows[2]["arrival_ns"] == 2
    assert run.rows[3]["end_ns"] == 300 * MS + 3 and run.rows[3]["replica"] is None


def test_a_timed_out_request_comes_back_too():
    offered = [WorkloadRequest(0, 0, (("", 8),), 30), WorkloadRequest(1, 1, (("", 8),), 5)]
    admission = {"queue_timeout_s": 0.2, "retry": {"max_attempts": 2, "backoff_s": 0.05, "jitter": 0}}
    run = FleetRun({"admission": admission}, offered, TokenCost(10 * MS, 0, 0), **ONE_SLOT)
    assert run.rows[1]["attempts"] == 2 and run.rows[1]["queued_ns"] == 250 * MS + 1
    assert run.rows[1]["scheduled_ns"] == 300 * MS and run.rows[1]["finish_ns"] == 350 * MS


@pytest.mark.statistical
def test_retries_never_lower_the_share_served_and_raise_attempts():
    offered = single_steps(simulated(5000), 1.4)
    served, attempts = [], []
    for most in (1, 2, 4, 8):
        admission = {"max_queued_per_replica": 2, "retry": {"max_attempts": most, "backoff_s": 0.02}}
        run = FleetRun({"admission": admission}, offered, PER_TOKEN, **ONE_SLOT)
        served.append(run.ends["finished"])
        attempts.append(run.column("attempts").sum())
    assert served == sorted(served) and attempts == sorted(attempts) and served[0] < served[-1]


# The recording


def test_who_was_turned_away_is_in_the_denominator_of_attainment():
    offered = single_steps(2000, 1.5)
    run = FleetRun({"admission": {"max_queued_per_replica": 2}}, offered, PER_TOKEN, **ONE_SLOT)
    metrics = RunMetrics(run.requests, slo={"ttft_ms": 1e6})
    assert metrics.scalars()["slo_attainment"] == run.ends["finished"] / 2000 < 0.8


def test_a_request_that_can_never_fit_is_not_tried_again():
    offered = [WorkloadRequest(0, 0, (("", 5000),), 1)]
    run = FleetRun({"admission": {"retry": {"max_attempts": 5}}}, offered)
    assert run.rows[0]["attempts"] == 1 and run.rows[0]["status"] == "rejected" and run.rows[0]["end_ns"] == 0


@pytest.mark.parametrize("leaps", [True, False], ids=["leaping", "stepping"])
@pytest.mark.parametrize("patience_ms, tokens", [(49.999999, 4), (50, 5), (50.000001, 5)])
def test_a_token_that_is_there_when_the_user_leaves_counts(leaps, patience_ms, tokens):
    """At one timestamp steps end before users give up."""
    patience = {"mean_s": patience_ms / 1000, "distribution": "constant", "until": "finish"}
    offered = [WorkloadRequest(i, 0, (("", 4),), 30) for i in range(2)]
    run = FleetRun({"admission": {"patience": patience}}, offered, TokenCost(10 * MS, 0, 0), leaps=leaps)
    assert [(row["status"], row["output_tokens"]) for row in run.rows] == [("cancelled", tokens)] * 2
