"""Appetite for risk: how probably a fleet holds, what more of it buys, and which fleet is worth most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from calibration.steps.interval import factor_at
from planning.plan.answer import plan_document
from planning.plan.candidates import Engine
from planning.plan.plan import Limits, Plan, make_plan
from planning.plan.sensitivity import SURE, holding
from planning.plan.sentences import answer
from planning.plan.trial import Question, simulated, try_fleet
from planning.plan.worth import most_worth
from planning.workers import Workers
from tests.planning.plan_samples import BySpeed, Steps, engine, fewest, question, traffic

QUERY = replace(question("ttft_ms p95<=400", "tpot_ms p90<=45", workload=traffic(120, 40.0)), risk=0.5)
ONE = engine()


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
    for share, holds in ((held, True), (held + 0.01, False)):
        assert simulated(QUERY, ONE, BySpeed()(ONE).at(share), number).met == holds
    assert holding(QUERY, ONE, number, least=0.7) == held
    assert holding(QUERY, ONE, 32) == SURE and holding(QUERY, ONE, 1) == 0
    assert holding(replace(QUERY, pricing=BySpeed(interval=None)), ONE, number) is None


def test_more_appetite_for_risk_never_takes_more_replicas_nor_serves_less_for_a_dollar() -> None:
    found = [planned(replace(QUERY, risk=risk)).recommendation for risk in (0.01, 0.1, 0.5)]
    held = [best.holds for best in found if best is not None and best.holds is not None]
    per_gpu = [best.offer.point.tok_s_gpu for best in found if best is not None]
    assert len(held) == len(found) == 3
    assert all(holds >= 1 - risk for holds, risk in zip(held, (0.01, 0.1, 0.5), strict=True))
    assert per_gpu == sorted(per_gpu) and per_gpu[0] < per_gpu[-1]


def test_the_answer_says_how_probably_it_holds_and_what_others_would_take() -> None:
    found = planned(replace(QUERY, risk=0.1))
    best = found.recommendation
    assert best is not None and best.holds is not None and best.others.bolder is not None
    assert best.others.bolder.replicas < best.offer.trial.replicas and best.others.bolder.holds < best.holds
    told = answer(found)
    assert f"the SLOs hold with {100 * best.holds:.0f} %" in told
    assert f"bolder: {best.others.bolder.replicas} replica" in told
    if best.others.safer is not None:
        assert best.others.safer.replicas > best.offer.trial.replicas and best.others.safer.holds >= SURE
    document = plan_document(None, found, [], {})
    assert document.risk == 0.1 and document.recommendation is not None
    assert document.recommendation.holds == best.holds
    held = {row["replicas"]: row["holds"] for row in document.table("fleets").to_pylist()}
    assert held[best.offer.trial.replicas] == best.holds


def test_what_breaks_only_where_steps_are_slow_is_said_to() -> None:
    """Just as many replicas as hold at the centre, asked to hold a little more probably than they do."""
    number = fewest(QUERY, ONE, 32)
    assert number is not None
    held = holding(QUERY, ONE, number)
    assert held is not None and held < SURE
    careful = try_fleet(replace(QUERY, risk=0.99 - held), ONE, number, to_the_end=True)
    assert not careful.met and careful.late is not None and careful.figures is not None
    assert careful.figures.observed < careful.decisive.figures.observed  # type: ignore[union-attr]


def test_without_a_known_band_the_cheapest_is_taken_and_no_probability_is_told() -> None:
    found = planned(replace(QUERY, risk=0.1, pricing=BySpeed(interval=None)))
    best = found.recommendation
    assert best is not None and best.holds is None and best.others.bolder is best.others.safer is None
    assert best.offer.trial.replicas == fewest(QUERY, ONE, 32)
    assert "probability" not in answer(found)


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
def test_a_little_more_for_much_more_probability_is_worth_it(
    holds: dict[tuple[str, int], float], expected: tuple[str, int]
) -> None:
    """Prices are 20 to 22 for the slow GPU, and 20.5 for the fast one, of which one more is out of reach."""
    offers = [(engine("slow"), 20), (engine("fast", usd=2.05), 10)]
    workers: Any = Known(replace(QUERY, risk=0.1), holds)
    best = most_worth(workers, offers, 64, 0)
    assert (best.engine.gpu, best.replicas, best.holds) == (*expected, holds[expected])


def test_steps_at_a_share_are_those_of_the_band() -> None:
    assert Steps(1.0).at(0.95).speed == pytest.approx(1 / 1.2)
