"""Other draws of the traffic: of the same kind and at the same rate, and whether the answer holds on them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.planning.plan_samples import engine, question, traffic
from tokentwin.planning.deployments import long_enough
from tokentwin.planning.plan.answer import plan_document
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import percent
from tokentwin.planning.plan.draws import DRAWS, drawn_again, on_draw, reordered
from tokentwin.planning.plan.plan import Limits, make_plan
from tokentwin.planning.plan.sensitivity import holding
from tokentwin.planning.plan.trial import Question, try_fleet
from tokentwin.planning.workers import Workers
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest

SLOS = ("ttft_ms p95<=400", "tpot_ms p95<=60")


def span_ns(workload: Workload) -> int:
    requests = list(workload.requests)
    return requests[-1].arrival_ns - requests[0].arrival_ns


@given(seed=st.integers(0, 1000), number=st.integers(1, 50), count=st.integers(2, 90))
@examples(0.3)
def test_another_order_has_the_same_requests_and_gaps_at_the_same_rate(seed: int, number: int, count: int) -> None:
    planned = traffic(count, seed=seed)
    draw = reordered(planned)
    found = list(draw(number).requests)
    assert found == list(draw(number).requests)
    assert found == sorted(found, key=lambda request: (request.arrival_ns, request.id))
    assert {(r.id, r.prompt, r.output_len) for r in found} == {(r.id, r.prompt, r.output_len) for r in planned.requests}
    (again,) = drawn_again(planned, lambda n: draw(number))[:1]
    assert span_ns(again) == pytest.approx(span_ns(planned), rel=1e-6)


def test_bursts_stay_together() -> None:
    """A burst of 30 every 10 seconds: in any order a burst is nearly whole."""
    arrivals = [burst * 10**10 + at * 10**6 for burst in range(20) for at in range(30)]
    planned = Workload([WorkloadRequest(i, at, ((PRIVATE, 9),), 9) for i, at in enumerate(arrivals)])
    moved = [request.arrival_ns for request in reordered(planned)(1).requests]
    assert sum(after - before < 2 * 10**6 for before, after in pairwise(moved)) >= 20 * 29 - 20
    assert [r.id for r in reordered(planned)(1).requests] != list(range(600))


def test_another_draw_comes_at_the_rate_that_is_planned_for() -> None:
    planned = traffic(400, rate=60.0)
    found = drawn_again(planned, lambda number: traffic(300 + number, rate=20.0, seed=number))
    assert [len(list(each.requests)) for each in found] == [301, 302]
    for each, count in zip(found, (301, 302), strict=True):
        assert (count - 1) / span_ns(each) == pytest.approx(399 / span_ns(planned), rel=1e-6)


def test_traffic_that_waits_for_answers_is_not_drawn_again() -> None:
    requests = [replace(r, think_ns=5) if r.id else r for r in traffic(5).requests]
    assert drawn_again(Workload(requests), reordered(Workload(requests))) == []


def test_a_draw_that_is_refused_is_left_out() -> None:
    def draw(number: int) -> Workload:
        if number == 1:
            raise UserError("trace", "x", "holds 0 requests")
        return traffic(50)

    assert len(drawn_again(traffic(60), draw)) == DRAWS - 1


def test_the_answer_holds_over_all_draws_and_says_how_probably_on_each() -> None:
    """Its traffic takes few replicas, and one of three draws is twice as hard: they are bought for that, too."""
    query = question(*SLOS)
    harder = replace(query, draws=(traffic(seed=3), traffic(280, rate=120.0, seed=4)))
    plans = []
    for each in (query, harder):
        with Workers(each, 1) as workers:
            plans.append(make_plan(workers, [engine()], [], Limits(most=64)))
    alone, best = (plan.recommendation for plan in plans)
    assert alone is not None and best is not None and best.probabilities.planned is not None
    fewest, number = alone.offer.trial.replicas, best.offer.trial.replicas
    assert fewest < number and alone.probabilities.draws == ()
    each = [holding(harder, engine(), number, draw=draw) for draw in (None, 0, 1)]
    assert [best.probabilities.planned, *best.probabilities.draws] == each
    assert best.probabilities.mean == pytest.approx(sum(filter(None, each)) / 3) and best.probabilities.mean >= 0.9
    document = plan_document(plans[1], [], {})
    assert f"with the traffic drawn with other seeds, the SLOs hold in {percent(each[1] or 0)} and" in "\n".join(
        map(str, document.report())
    )
    assert document.recommendation is not None and document.recommendation.draws == best.probabilities.draws


def holds(query: Question, of: Engine) -> bool:
    """Whether one replica does on the first other draw."""
    return try_fleet(*on_draw(query, of, 0), 1).met


def test_a_longer_request_than_any_planned_for_has_room_unless_the_length_was_stated() -> None:
    planned = Workload([WorkloadRequest(i, i * 10**9, ((PRIVATE, 500),), 5) for i in range(30)])
    longer = Workload([replace(r, prompt=((PRIVATE, 1500),)) for r in planned.requests])
    query = question("ttft_ms p99<=100000", workload=planned)
    base = Deployment(model="Llama-3.1-8B", scheduler=SchedulerConfig(num_blocks=600))
    query = replace(query, draws=(longer,))
    assert holds(query, Engine("slow", 1.0, long_enough(base, planned)))
    stated = base.model_copy(update={"scheduler": base.scheduler.model_copy(update={"max_model_len": 600})})
    assert not holds(query, Engine("slow", 1.0, stated))
