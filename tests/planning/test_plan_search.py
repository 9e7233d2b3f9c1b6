"""The search against trying every fleet; what it skips; and what it says when nothing will do."""

import operator
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.planning.plan_samples import BySpeed, Steps, cheapest, engine, fewest, question, traffic
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.planning.plan import trial as trials
from tokentwin.planning.plan.answer import plan_document
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.frontier import Point, pareto, per_dollar
from tokentwin.planning.plan.plan import Limits, Plan, make_plan
from tokentwin.planning.plan.planner import Planners
from tokentwin.planning.plan.search import least_replicas, search
from tokentwin.planning.plan.sensitivity import headroom_band, knee
from tokentwin.planning.plan.sentences import answer, why_not_fewer
from tokentwin.planning.plan.trial import FAST, SLOW, Question, Trial, cost_at, simulated, try_alone, try_fleet
from tokentwin.planning.workers import Workers
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.sim.router import find_router
from tokentwin.traces.reshape import reshaped

SLOS = ("ttft_ms p99<=400", "tpot_ms p95<=45")
ENGINES = [engine(gpu, tp, usd) for gpu, usd in (("slow", 1.0), ("fast", 2.2)) for tp in (1, 2)]


def planned(query: Question, engines: list = ENGINES, limits: Limits | None = None, jobs: int = 1) -> Plan:
    with Planners(query, jobs) as workers:
        return make_plan(workers, engines, [], limits or Limits(most=64))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(question(*SLOS))


def test_no_fleet_is_simulated_twice_on_the_same_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Workload, str, int, float]] = []

    def counted(query: Question, of: Engine, cost: Steps, replicas: int, to_the_end: bool = False) -> Trial:
        trial = simulated(query, of, cost, replicas, to_the_end)
        if trial.figures is not None:
            made.append((query.workload, of.name, replicas, cost.speed))
        return trial

    simulated = trials.simulated
    monkeypatch.setattr(trials, "simulated", counted)
    planned(question(*SLOS), ENGINES)
    assert len(made) > 10
    assert len({(id(workload), *fleet) for workload, *fleet in made}) == len(made)


# The answer


def test_few_gpus_can_count_instead_of_a_low_price() -> None:
    query, engines = question(*SLOS), [engine(), engine("fast", usd=30.0)]
    cheap, few = planned(query, engines), planned(query, [replace(one, counts_gpus=True) for one in engines])
    assert cheap.recommendation is not None and few.recommendation is not None
    best = few.recommendation.offer
    assert (cheap.recommendation.offer.engine.gpu, best.engine.gpu) == ("slow", "fast")
    assert best.point.gpus <= min(fewest(query, one, 32) or 99 for one in engines) + 1
    assert best.point.gpus < cheap.recommendation.offer.point.gpus


@examples(0.06)
@given(
    rate=st.sampled_from([15.0, 40.0, 80.0]),
    seed=st.integers(0, 50),
    ttft=st.sampled_from([60, 150, 500]),
    fast_usd=st.sampled_from([1.5, 2.5, 3.5]),
    spares=st.integers(0, 2),
)
def test_it_is_what_trying_every_fleet_finds(rate: float, seed: int, ttft: int, fast_usd: float, spares: int) -> None:
    query = question(f"ttft_ms p95<={ttft}", "tpot_ms p90<=60", workload=traffic(120, rate, seed))
    query = replace(query, pricing=BySpeed(interval=None))
    engines = [engine("slow", 1), engine("slow", 2), engine("fast", 1, fast_usd)]
    best = planned(query, engines, Limits(12, spares)).recommendation
    expected = cheapest(query, engines, 12, spares)
    if expected is None:
        assert best is None
    else:
        assert best is not None
        assert best.offer.point.usd_per_hour == pytest.approx(expected[0])


def test_every_offer_is_the_fewest_replicas_of_its_engine(plan: Plan) -> None:
    assert plan.recommendation is not None
    offers = [plan.recommendation.offer, *plan.runners_up]
    assert len(offers) > 1
    assert [offer.trial.replicas for offer in offers] == [fewest(plan.question, o.engine, 64) for o in offers]
    costs = [offer.point.usd_per_hour for offer in offers]
    assert costs == sorted(costs)


def test_engines_that_cost_more_than_the_kept_are_given_up_and_no_other() -> None:
    query = question(*SLOS)
    engines = [engine("slow", usd=usd) for usd in (1.0, 1.01, 1.4, 5.0)]
    with Workers(query, 1) as workers:
        one, all_of_them = (search(workers, engines, 64, keep=keep) for keep in (1, 4))
    n = fewest(query, engine("slow"), 64)
    assert n is not None and n > 2
    assert [entry.replicas for entry in all_of_them] == [n, n, n, None]
    assert one[2].pruned and not one[0].pruned
    assert [entry.pruned for entry in all_of_them] == [False, False, False, True]  # no answer is so much dearer
    assert one[0].replicas == n
    assert all(entry.least <= n for entry in one)
    assert sum(len(entry.trials) for entry in one) < sum(len(entry.trials) for entry in all_of_them)


def test_spares_are_paid_for_and_carry_nothing() -> None:
    query = question(*SLOS)
    without, with_two = (planned(query, [engine()], Limits(64, spares)).recommendation for spares in (0, 2))
    assert without is not None and with_two is not None
    assert with_two.offer.trial == without.offer.trial
    assert with_two.offer.point.gpus == without.offer.point.gpus + 2
    assert with_two.offer.point.usd_per_hour == without.offer.point.usd_per_hour + 2
    assert "2 spares" in answer(planned(query, [engine()], Limits(64, 2)), None, None)


def test_a_stricter_bound_never_costs_less() -> None:
    costs = []
    for ttft in (2000, 400, 150, 110):
        best = planned(question(f"ttft_ms p99<={ttft}"), [engine()]).recommendation
        assert best is not None
        costs.append(best.offer.point.usd_per_hour)
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


# What stands behind it


def test_one_fewer_breaks_an_objective_and_says_by_how_much(plan: Plan) -> None:
    best = plan.recommendation
    assert best is not None and best.robustness is not None
    fewer, beside = best.robustness.fewer, best.robustness.fewer_point
    assert fewer is not None and beside is not None and not fewer.met
    figures = fewer.decisive.figures
    assert figures is not None and beside.replicas == fewer.replicas == best.offer.trial.replicas - 1
    why = why_not_fewer(plan, best.robustness)
    broken = [value for value, bound in zip(figures.observed, (400, 45), strict=True) if value > bound]
    assert "would break" in why and f"{broken[0]:,.4g} ms" in why and why.endswith(f"attainment {beside.attained}")
    for replicas, (card, _) in best.robustness.choices.items():
        assert replicas != fewer.replicas or card == beside


def test_headroom_ends_where_an_objective_breaks(plan: Plan) -> None:
    best = plan.recommendation
    assert best is not None and best.robustness is not None and best.robustness.knee.breaks in SLOS
    last = best.robustness.knee.headroom_percent
    for percent, holds in ((last, True), (last * 8 // 7 + 3, False)):
        faster = reshaped(plan.question.workload, rate_scale=1 + percent / 100)
        query = replace(plan.question, workload=faster)
        assert try_fleet(query, best.offer.engine, best.offer.trial.replicas).met == holds


def test_the_band_of_headroom_goes_from_slow_steps_to_fast_ones() -> None:
    query, replicas = question(*SLOS), 5

    def keeps(percent: int, share: float) -> bool:
        faster = replace(query, workload=reshaped(query.workload, rate_scale=1 + percent / 100))
        return simulated(faster, engine(), cost_at(query, engine(), replicas, share), replicas).met

    band = headroom_band(query, engine(), replicas, [0.99] * 3)
    assert band is not None and band[1] is not None
    least, most = band
    assert 0 < least < most
    assert keeps(least, SLOW) and not keeps(least + max(least // 4, 2), SLOW)
    assert keeps(most, FAST) and not keeps(most + max(most // 4, 2), FAST)
    assert headroom_band(query, engine(), replicas, [0.99, 0.9, 0.99], 20) == (0, None)
    assert headroom_band(query, engine(), replicas, [None, 1.0, 1.0]) is None


def test_headroom_without_an_end_says_so() -> None:
    found = knee(question("ttft_ms p50<=1e6", workload=traffic(30, 5.0)), engine(), 1, most_percent=40)
    assert (found.headroom_percent, found.breaks) == (40, None)


def test_the_plausible_range_is_the_answer_at_the_ends_of_the_interval() -> None:
    plan = planned(question(*SLOS), [engine()])
    best = plan.recommendation
    assert best is not None and best.robustness is not None
    fast, slow = best.robustness.fast, best.robustness.slow
    for end, speed in ((fast, 1 / 0.8), (slow, 1 / 1.2)):
        query = replace(plan.question, pricing=Scaled(speed), risk=0.5)
        assert end == fewest(query, best.offer.engine, 64)
    assert slow is not None and fast <= best.offer.trial.replicas <= slow and fast < slow


class Scaled(BySpeed):
    def __init__(self, speed: float) -> None:
        object.__setattr__(self, "speed", speed)

    def __call__(self, of: object) -> Steps:
        return Steps(super().__call__(of).speed * self.speed)  # type: ignore[attr-defined,arg-type]


# What is skipped


@pytest.mark.parametrize(
    "slos", [("ttft_ms p99<=300",), ("e2e_ms p90<=1500",), ("ttft_ms<=300", "tpot_ms<=60", "attainment>=0.9")]
)
@pytest.mark.parametrize("rate", [10.0, 60.0])
def test_throughput_alone_never_asks_for_more_than_it_takes(slos: tuple[str, ...], rate: float) -> None:
    query = question(*slos, workload=traffic(400, rate))
    for of in (engine("slow"), engine("fast")):
        least, needed = least_replicas(query, of, query.pricing(of)), fewest(query, of, 64)
        assert needed is not None and 1 <= least <= needed


def test_throughput_alone_rules_out_most_small_fleets_of_a_busy_one() -> None:
    query = question("e2e_ms p99<=3000", workload=traffic(1500, 100.0))
    needed = fewest(query, engine(), 128)
    assert needed is not None and least_replicas(query, engine(), query.pricing(engine())) > needed / 4


def test_a_trial_stops_early_only_when_it_would_fail_anyway() -> None:
    many = traffic(1800, 60.0, tokens=40)
    query = question("ttft_ms p99<=400", workload=many)
    verdicts = []
    for replicas in (1, 2, 3, 4, 6):
        quick, whole = (try_fleet(query, engine(), replicas, to_the_end) for to_the_end in (False, True))
        assert quick.met == whole.met
        assert quick.figures in (None, whole.figures)
        verdicts.append((quick.met, quick.figures is None))
    assert (False, True) in verdicts and (True, False) in verdicts


def test_alone_is_the_best_that_replicas_can_do() -> None:
    query = question(*SLOS)
    alone = try_alone(query, engine()).figures
    assert alone is not None
    for replicas in (2, 5, 40):
        figures = try_fleet(query, engine(), replicas, to_the_end=True).figures
        assert figures is not None
        assert all(a <= b for a, b in zip(alone.observed, figures.observed, strict=True))


# Nothing will do


@pytest.mark.parametrize(
    ("slos", "binding"),
    [
        (("ttft_ms p99<=400", "tpot_ms p95<=10"), "tpot_ms p95<=10"),
        (("ttft_ms p99<=25", "tpot_ms p95<=45"), "ttft_ms p99<=25"),
        (("ttft_ms<=400", "tpot_ms<=10", "attainment>=0.99"), "attainment>=0.99"),
    ],
)
def test_infeasible_names_the_binding_objective_of_the_closest_engine(slos: tuple[str, ...], binding: str) -> None:
    found = planned(question(*slos), [engine("snail"), engine("slow")])
    assert found.recommendation is None
    assert [failure.engine for failure in found.failures] == ["TP1 slow", "TP1 snail"]
    assert found.failures[0].reason.startswith(binding)
    assert answer(found, None, None).startswith(
        f"Infeasible: no fleet meets the SLOs. The closest is TP1 slow: {binding}"
    )
    assert not plan_document(found, [], {}).feasible


def test_requests_that_fit_nowhere_are_said_to() -> None:
    too_long = [WorkloadRequest(i, i * 10**9, ((PRIVATE, 3000),), 5) for i in range(10)]
    found = planned(question("ttft_ms p50<=1000", workload=Workload(too_long, shares_prefixes=False)), [engine()])
    assert "10 requests do not fit into any replica" in found.failures[0].reason


def test_too_few_replicas_are_told_from_none() -> None:
    found = planned(question(*SLOS, workload=traffic(300, 120.0)), [engine()], Limits(most=2))
    assert found.recommendation is None
    assert "2 replicas are not enough" in found.failures[0].reason


# The same everywhere


def test_the_number_of_workers_changes_nothing(plan: Plan) -> None:
    assert plan_document(planned(question(*SLOS), jobs=2), [], {}) == plan_document(plan, [], {})


def test_workers_answer_in_the_order_of_their_tasks() -> None:
    """The first takes longest; tasks of the standard library, whose workers start quickly."""
    with Workers(0.3, 2) as workers:
        assert workers.run([time.sleep, operator.neg, operator.pos]) == [None, -0.3, 0.3]


# The frontier


def point(**figures: float) -> Point:
    """A fleet that meets its SLOs."""
    others = dict.fromkeys(("tok_s_user", "tok_s_gpu", "usd_per_mtok_out", "usd_per_mtok_total"), 1.0)
    return Point(engine="e", replicas=1, gpus=1, usd_per_hour=1.0, attainment=1.0, met=True, **(others | figures))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30))
def test_the_frontier_is_what_no_other_point_beats(values: list[tuple[int, int]]) -> None:
    points = [point(tok_s_user=user, tok_s_gpu=gpu) for user, gpu in values]
    kept = {(p.tok_s_user, p.tok_s_gpu) for p in pareto(points)}
    assert kept == {
        (user, gpu)
        for user, gpu in values
        if not any((u >= user and g >= gpu) and (u, g) != (user, gpu) for u, g in values)
    }
    assert len(pareto(points)) == len(kept)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30))
def test_the_frontier_by_price_is_what_no_other_point_beats_for_less(values: list[tuple[int, int]]) -> None:
    points = [point(tok_s_user=user, usd_per_mtok_out=usd) for user, usd in values]
    assert {(p.tok_s_user, p.usd_per_mtok_out) for p in pareto(points, per_dollar)} == {
        (user, usd)
        for user, usd in values
        if not any((u >= user and d <= usd) and (u, d) != (user, usd) for u, d in values)
    }


def test_frontier_and_prices_follow_from_the_run(plan: Plan) -> None:
    best = plan.recommendation
    assert best is not None and best.offer.trial.figures is not None
    point, figures = best.offer.point, best.offer.trial.figures
    assert point.tok_s_gpu == pytest.approx(figures.steady.output_throughput / point.gpus, rel=1e-11)
    assert point.usd_per_mtok_out == pytest.approx(point.usd_per_hour / figures.steady.output_throughput / 3600 * 1e6)
    assert plan.frontier and all(p.met for p in (*plan.frontier, *plan.by_price))
    assert not all(p.met for p in plan.points)


def test_figures_are_those_of_the_run_metrics() -> None:
    query = question(*SLOS)
    figures = try_fleet(query, engine(), 9, to_the_end=True).figures
    run = run_metrics(query.workload, engine().deployment, Steps(1.0), 9, lambda: find_router("least-requests"))
    assert figures is not None
    assert figures.observed == (run.distribution("ttft_ms").p99, run.distribution("tpot_ms").p95)
    assert figures.e2e_p99_s == run.distribution("e2e_ms").p99 / 1e3
    assert figures.steady.output_throughput > run.scalars()["output_throughput"]  # which counts the drain
    assert figures.tok_s_user == run.distribution("tok_s_user").p50


# In words


def test_attainment_names_the_bounds_that_cost_it() -> None:
    found = planned(question("ttft_ms<=400", "tpot_ms<=10", "attainment>=0.99"), [engine()])
    assert "% break tpot_ms<=10" in found.failures[0].reason
    assert "ttft_ms" not in found.failures[0].reason.removeprefix("attainment>=0.99")


def test_about_as_many_simulations_are_left_as_the_plan_says() -> None:
    told: list[tuple[float, float]] = []  # simulations done, and simulations left
    done = 0.0

    def marked(requests: float) -> None:
        nonlocal done
        done += requests / query.requests

    query = replace(question(*SLOS), draws=tuple(traffic(seed=seed) for seed in (20, 40)))
    with Planners(query, 1, marked) as workers:
        make_plan(workers, [engine()], [], Limits(most=16), lambda left: told.append((done, left)))
    assert len(told) > 3
    for before, left in told:
        assert left / 2 <= done - before <= 1.5 * left
