"""Appetite for risk: how probably a fleet holds, what more of it buys, and which fleet is worth most."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.planning.plan_samples import BySpeed, Steps, engine, fewest, question, traffic
from tokentwin.calibration.steps.interval import factor_at
from tokentwin.planning.plan.answer import plan_document
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import SURE, Choice, Choices
from tokentwin.planning.plan.frontier import Point
from tokentwin.planning.plan.plan import Limits, Plan, make_plan
from tokentwin.planning.plan.sensitivity import holding
from tokentwin.planning.plan.sentences import choices, near_ties, risk
from tokentwin.planning.plan.trial import Question, simulated, try_alone, try_fleet
from tokentwin.planning.plan.worth import most_worth
from tokentwin.planning.workers import Workers

QUERY = replace(question("ttft_ms p95<=400", "tpot_ms p90<=45", workload=traffic(120, 40.0)), risk=0.5)
ONE = engine()
WIDE = (0.5, 2.0)  # the interval of step times
UNSURE = replace(question("ttft_ms p90<=300", workload=traffic(200, 40.0)), pricing=BySpeed(WIDE))


def planned(query: Question, engines: Sequence[Engine] = (ONE,)) -> Plan:
    with Workers(query, 1) as workers:
        return make_plan(workers, engines, [], Limits(most=32))


def test_the_time_at_a_share_is_lognormal_between_the_ends() -> None:
    assert [factor_at((0.8, 1.5), share) for share in (0.05, 0.5, 0.95)] == [0.8, 1.0, 1.5]
    shares = [0.01, 0.2, 0.4, 0.6, 0.8, 0.99]
    assert sorted(shares, key=lambda share: factor_at((0.8, 1.5), share)) == shares


def test_a_fleet_holds_as_far_as_it_was_found_to() -> None:
    number = fewest(replace(QUERY, risk=0.3), ONE, 32)
    assert number is not None
    held = holding(QUERY, ONE, number)
    assert held is not None and 0.7 <= held < SURE
    for share, holds in ((held, True), (held + 0.02, False)):
        assert simulated(QUERY, ONE, BySpeed()(ONE).at_share(share), number).met == holds
    assert holding(QUERY, ONE, number, least=0.7) == held
    assert holding(QUERY, ONE, 32) == SURE and holding(QUERY, ONE, 1) == 0
    assert holding(replace(QUERY, pricing=BySpeed(interval=None)), ONE, number) is None


def test_more_appetite_for_risk_never_takes_more_replicas_nor_serves_less_for_a_dollar() -> None:
    found = [planned(replace(QUERY, risk=risk)).recommendation for risk in (0.01, 0.1, 0.5)]
    held = [best.probabilities.planned for best in found if best is not None and best.probabilities.planned is not None]
    per_gpu = [best.offer.point.tok_s_gpu for best in found if best is not None]
    assert len(held) == len(found) == 3
    assert all(holds >= 1 - risk for holds, risk in zip(held, (0.01, 0.1, 0.5), strict=True))
    assert per_gpu == sorted(per_gpu) and per_gpu[0] < per_gpu[-1]


def test_the_answer_is_a_choice_with_its_risk() -> None:
    """As predicted a few replicas do, and twice as slow steps take many more: the first words say so."""
    document = plan_document(planned(UNSURE), [], {})
    best = document.recommendation
    assert best is not None and best.choices is not None and document.risk == 0.1
    likely, chosen, whole = best.choices.existing
    assert likely.replicas == fewest(replace(UNSURE, risk=0.5), ONE, 32) < chosen.replicas <= whole.replicas
    assert likely.holds is not None and chosen.holds is not None
    assert 0.5 <= likely.holds < 0.9 <= chosen.holds == best.holds
    for choice in best.choices.existing:
        slow = simulated(UNSURE, ONE, BySpeed(WIDE)(ONE).at_share(0.95), choice.replicas, to_the_end=True)
        assert slow.figures is not None and choice.if_slow == pytest.approx(slow.figures.attainment)
    assert likely.if_slow < 0.9 <= whole.if_slow
    assert document.risk_told == choices(best.choices)
    assert document.answer.endswith(risk(best.holds, best.choices)) and len(document.answer) < 160
    held = {row["replicas"]: row["holds"] for row in document.table("fleets").to_pylist()}
    assert held[chosen.replicas] == best.holds


def test_the_choice_in_words() -> None:
    def choice(gpus: int, holds: float, if_slow: float) -> Choice:
        slow_and_fast = {"if_slow": if_slow, "if_fast": 1}
        return Choice(replicas=gpus, gpus=gpus, usd_per_hour=gpus, holds=holds, attainment=1, **slow_and_fast)

    few, some, many = choice(12, 0.6, 0.225), choice(16, 0.92, 0.97), choice(20, 0.96, 0.995)
    assert choices(Choices(as_predicted=few, recommended=some, whole_interval=many)) == (
        "12 GPUs would be enough if steps were as predicted, and 20 for the complete 90 % interval of step times."
    )
    found = Choices(as_predicted=few, recommended=some, whole_interval=many)
    assert (
        risk(0.92, found) == "The SLOs hold in 92 % of cases. If steps are slow, 97.0 % of the requests keep the SLOs."
    )
    hopeless = Choices(as_predicted=few, recommended=few, whole_interval=None)
    assert risk(0.92, hopeless).endswith("22.5 % of the requests keep the SLOs, and no number of GPUs holds them.")
    assert choices(hopeless) == "No fewer would be enough if steps were as predicted."
    assert risk(0.92, Choices(as_predicted=few, recommended=some, whole_interval=some)).endswith(
        "even if steps are slow."
    )
    assert "unknown" in risk(None, None) and risk(0.92, None) == "The SLOs hold in 92 % of cases."


def test_a_fleet_that_collapses_at_the_slow_end_is_not_told_as_sure() -> None:
    """With risk 0.5 the choice is the centre's, which keeps next to nothing if steps are slow."""
    document = plan_document(planned(replace(UNSURE, risk=0.5)), [], {})
    best = document.recommendation
    assert best is not None and best.choices is not None
    chosen = best.choices.recommended
    assert chosen.attainment > 0.9 > 0.5 > chosen.if_slow
    broken = f"{UNSURE.objectives.slos[0].text} ("
    assert chosen.broken_if_slow.startswith(broken) and f"If steps are slow, {broken}" in document.answer
    assert f" would break: {100 * chosen.if_slow:.1f} % of the requests keep the SLOs" in document.answer


def test_what_misses_by_less_than_step_times_are_uncertain_is_borderline() -> None:
    """A bound a little below what one request alone takes, and one far below: 20 % is what step times are unsure of."""
    figures = try_alone(QUERY, ONE).figures
    assert figures is not None
    alone_ms = figures.observed[1]
    for within, borderline in ((0.95, True), (0.7, False)):
        query = replace(question(f"tpot_ms p90<={alone_ms * within:.6g}", workload=QUERY.workload), risk=0.1)
        found = planned(query)
        (failure,) = found.failures
        assert failure.borderline == borderline
        told = [str(line) for line in plan_document(found, [], {}).report()]
        assert ("Within the uncertainty of step times is" in told[0]) == borderline
        both = planned(replace(query, risk=0.1), [ONE, engine("fast", usd=9.0)])
        lines = [str(line) for line in plan_document(both, [], {}).report()]
        assert any(line.startswith("borderline: TP1 slow: tpot_ms p90") for line in lines) == borderline
        assert any(line.startswith("not feasible: TP1 slow: tpot_ms p90") for line in lines) != borderline


def test_what_costs_little_more_stands_beside_the_answer() -> None:
    best = Point(
        engine="TP4 H100", replicas=3, gpus=12, usd_per_hour=30, tok_s_user=50, tok_s_gpu=9,
        usd_per_mtok_out=1, usd_per_mtok_total=1, attainment=1, met=True,
    )  # fmt: skip
    near, dear = (
        best.model_copy(update={"engine": "TP1 B200", "replicas": 1, "gpus": 6, "usd_per_hour": usd, "tok_s_user": 75})
        for usd in (33.3, 38)
    )
    told = "1 x TP1 B200: +11 % cost, half the GPUs, 75 instead of 50 tok/s per user"
    assert list(near_ties(best, [near, dear], 0)) == [told]


def test_what_breaks_only_where_steps_are_slow_is_said_to() -> None:
    """Just as many replicas as hold at the centre, asked to hold a little more probably than they do."""
    number = fewest(QUERY, ONE, 32)
    assert number is not None
    held = holding(QUERY, ONE, number)
    assert held is not None and held < SURE
    careful = try_fleet(replace(QUERY, risk=0.98 - held), ONE, number, to_the_end=True)
    assert not careful.met and careful.late is not None and careful.figures is not None
    assert careful.figures.observed < careful.decisive.figures.observed  # type: ignore[union-attr]


def test_without_a_known_band_the_cheapest_is_taken_and_no_probability_is_told() -> None:
    found = planned(replace(QUERY, risk=0.1, pricing=BySpeed(interval=None)))
    best = found.recommendation
    document = plan_document(found, [], {})
    assert best is not None and best.probabilities.mean is None and document.risk_told is None
    assert best.offer.trial.replicas == fewest(QUERY, ONE, 32)
    assert "% of cases" not in document.answer


@dataclass
class Known:
    """Stands in for workers: the probabilities of fleets are a table."""

    common: Question
    holds: dict[tuple[str, int], float]

    def run(self, tasks: Sequence[Callable[..., Any]]) -> list[float]:
        return [self.holds[task.keywords["engine"].gpu, task.keywords["replicas"]] for task in tasks]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        ({("slow", 20): 0.99}, ("slow", 20)),  # whatever costs more cannot be worth more
        ({("slow", 20): 0.90, ("slow", 21): 0.98, ("slow", 22): 0.99, ("fast", 10): 0.91}, ("slow", 21)),
        ({("slow", 20): 0.90, ("slow", 21): 0.90, ("slow", 22): 0.92, ("fast", 10): 0.99}, ("fast", 10)),
        ({("slow", 20): 0.90, ("slow", 21): 0.91, ("slow", 22): 0.92, ("fast", 10): 0.91}, ("slow", 20)),
    ],
)
def test_a_little_more_for_much_more_probability_is_worth_it(holds, expected):
    """Prices are 20 to 22 for the slow GPU, and 20.5 for the fast one, of which one more is out of reach."""
    offers = [(engine("slow"), 20), (engine("fast", usd=2.05), 10)]
    workers: Any = Known(replace(QUERY, risk=0.1), holds)
    ((best, _), *_) = most_worth(workers, offers, 64, 0)
    assert (best.engine.gpu, best.replicas, best.holds) == (*expected, holds[expected])


def test_steps_at_a_share_are_those_of_the_band() -> None:
    assert Steps(1.0).at_share(0.95).speed == pytest.approx(1 / 1.2)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_over_two_engines_is_never_dearer_and_riskier_than_over_one(seed: int) -> None:
    """Replicas that other draws of the traffic ask for may make another engine the better one, even a pruned one."""
    draws = tuple(traffic(100, 40.0, seed=seed + n) for n in (20, 40))
    query = replace(question("ttft_ms p90<=300", workload=traffic(100, 40.0, seed=seed)), pricing=BySpeed(WIDE))
    query = replace(query, draws=draws)
    one, other = engine(), engine("fast", usd=2.3 + seed / 2)
    together, *alone = (planned(query, engines).recommendation for engines in ([one, other], [one], [other]))
    assert together is not None
    for best in alone:
        if best is not None and best.probabilities.mean is not None and together.probabilities.mean is not None:
            dearer = together.offer.point.usd_per_hour > best.offer.point.usd_per_hour
            assert not (dearer and together.probabilities.mean <= best.probabilities.mean)
    document = plan_document(planned(query, [one, other]), [], {})
    assert all(offer.holds is not None for offer in document.runners_up)
