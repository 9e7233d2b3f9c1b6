"""What a fleet does in steady operation: not a matter of how long the simulated traffic is, nor of how it ends."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.planning.plan_samples import engine, question, traffic
from tokentwin.planning.plan.answer import plan_document
from tokentwin.planning.plan.first_answer import try_share
from tokentwin.planning.plan.frontier import point
from tokentwin.planning.plan.plan import Limits, make_plan
from tokentwin.planning.plan.sensitivity import KEEPING_UP, knee
from tokentwin.planning.plan.sentences import why_not_fewer
from tokentwin.planning.plan.trial import Question, try_fleet
from tokentwin.planning.workers import Workers
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest

LOOSE = "tpot_ms p99<=1000"


def steady(query: Question, replicas: int):
    figures = try_fleet(query, engine(), replicas, to_the_end=True).figures
    assert figures is not None
    return figures.steady


def twice(workload: Workload) -> Workload:
    """The same requests once more, after a gap like any other."""
    requests = list(workload.requests)
    later = requests[-1].arrival_ns + requests[-1].arrival_ns // (len(requests) - 1)
    again = [replace(r, id=r.id + len(requests), arrival_ns=r.arrival_ns + later) for r in requests]
    return Workload([*requests, *again], shares_prefixes=False)


def alike(requests: int, gap_s: float, prompt: int = 1, output: int = 100) -> Workload:
    """Requests of one length, evenly spaced."""
    gap_ns = round(gap_s * 1e9)
    listed = [WorkloadRequest(i, i * gap_ns, ((PRIVATE, prompt),), output) for i in range(requests)]
    return Workload(listed, shares_prefixes=False)


@given(seed=st.integers(0, 100), replicas=st.integers(4, 12))
@examples(0.03)
def test_twice_the_traffic_costs_as_much_for_a_token(seed: int, replicas: int) -> None:
    """From half the replicas that it takes to more than enough; of 13 s, saturated fleets answer a sample only."""
    once = traffic(800, 60.0, seed)
    trials = [
        try_fleet(question(LOOSE, workload=workload), engine(), replicas, to_the_end=True)
        for workload in (once, twice(once))
    ]
    sure = all(trial.figures is not None and trial.figures.steady.piling_up_per_s == 0 for trial in trials)
    short, long = (point(engine(), trial) for trial in trials)
    assert long.usd_per_mtok_out == pytest.approx(short.usd_per_mtok_out, rel=0.01 if sure else 0.1)
    assert long.tok_s_gpu == pytest.approx(short.tok_s_gpu, rel=0.01 if sure else 0.1)


def test_a_fleet_that_keeps_up_serves_what_is_offered_however_long_its_answers_take() -> None:
    for output in (10, 100, 1000):
        found = steady(question(LOOSE, workload=alike(200, 0.5, output=output)), replicas=20)
        assert found.keeps_up and found.piling_up_per_s < 1e-3
        assert found.output_throughput == pytest.approx(2 * output, rel=1e-3)
        assert found.input_throughput == pytest.approx(2, rel=1e-3)


def test_a_fleet_that_does_not_serves_what_its_engine_can() -> None:
    """Eight requests at a time, 20.8 ms a step and 1 us a token of context: 8 tokens every 21 ms or so."""
    found = steady(question(LOOSE, workload=alike(1200, 0.1)), replicas=1)
    assert not found.keeps_up
    assert found.output_throughput == pytest.approx(8 / 0.0213, rel=0.03)
    assert found.piling_up_per_s == pytest.approx(10 - found.output_throughput / 100, rel=0.05)


def test_half_as_many_requests_pile_up_as_half_the_fleet_leaves() -> None:
    query = question(LOOSE, workload=alike(1200, 0.1))
    piling_up = [steady(query, replicas).piling_up_per_s for replicas in (1, 2, 3)]
    assert piling_up[0] > piling_up[1] > 0.1 > 1e-3 > piling_up[2]


# What follows for a plan


def test_a_fleet_that_does_not_keep_up_is_no_answer_though_every_bound_holds() -> None:
    query = question(LOOSE, workload=alike(600, 0.1))
    with Workers(query, 1) as workers:
        found = make_plan(workers, [engine()], [], Limits(most=16))
    best = found.recommendation
    assert best is not None and best.offer.trial.replicas == 3 and best.robustness is not None
    fewer = best.robustness.fewer
    assert fewer is not None and fewer.figures is not None
    assert fewer.figures.observed[0] <= 1000 and not fewer.met
    assert f"would break {KEEPING_UP} (" in why_not_fewer(found, best.robustness)
    assert best.robustness.knee.breaks == KEEPING_UP
    document = plan_document(found, [], {})
    assert document.recommendation is not None and document.recommendation.piling_up_per_s < 1e-3


def test_what_keeps_up_at_its_rate_has_headroom_until_it_does_not() -> None:
    found = knee(question(LOOSE, workload=alike(600, 0.1)), engine(), 3)
    assert found.breaks == KEEPING_UP and 5 <= found.headroom_percent <= 40


@pytest.mark.parametrize(("requests", "short"), [(30, True), (300, False)])
def test_traffic_that_ends_before_the_fleet_is_full_is_said_to(requests: int, short: bool) -> None:
    query = question(LOOSE, workload=alike(requests, 0.1))
    with Workers(query, 1) as workers:
        found = plan_document(make_plan(workers, [engine()], [], Limits(most=16)), [], {}).as_json()
    assert (found["too_short"] is not None) == short
    if short:
        assert found["too_short"].startswith("the traffic is too short to fill the fleet: it lasts 2.9 s")


# A part for the whole


@pytest.mark.parametrize("replicas", [12, 48])
def test_a_part_of_a_fleet_tells_of_the_whole(replicas: int) -> None:
    """At half the load that all can bear and at twice, where there is nothing to be unsure of."""
    for load, met in ((0.5, True), (2.0, False)):
        query = question("ttft_ms p99<=400", workload=alike(6000, 0.27 / replicas / load))
        assert try_share(query, engine(), replicas, 1000).met == try_fleet(query, engine(), replicas).met == met


def test_a_part_is_never_more_than_the_whole() -> None:
    query = question("ttft_ms p99<=400", workload=traffic(300, 20.0))
    for replicas in (1, 3, 7):
        whole = try_fleet(query, engine(), replicas)
        assert try_share(query, engine(), replicas, 500, busiest=False) == whole
