"""An answered plan at other prices, with other spares or another risk: the answer of a complete plan, at once."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.planning.plan_samples import BySpeed, engine, question, traffic
from tokentwin.planning.plan.answer import plan_document
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.plan.plan import Limits, make_plan
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.trial import Question
from tokentwin.planning.plan.what_if import WhatIf, what_if
from tokentwin.planning.workers import Workers

QUERY = question("ttft_ms p90<=300", workload=traffic(100, 40.0))
USUAL = {"slow": 1.0, "fast": 3.0}
TRAFFIC = {"requests": 2, "arrivals": {"kind": "poisson", "rate": 1}, "prompt": {"kind": "fixed", "tokens": 1}}


def asked(prices: Mapping[str, float] = USUAL, spares: int = 0, risk: float = 0.1, **more: object) -> PlanRequest:
    spec = {**TRAFFIC, "output": {"kind": "fixed", "tokens": 1}}
    inputs = {"traffic": spec, "slos": ["ttft_ms p90<=300"], "prices": dict(prices), "spares": spares, "risk": risk}
    return PlanRequest.model_validate({**inputs, **more})


def complete(request: PlanRequest, names: tuple[str, ...] = ("slow", "fast"), query: Question = QUERY) -> PlanDocument:
    engines = [engine(name, usd=request.prices[name]) for name in names]
    with Workers(query, 1) as workers:
        return plan_document(make_plan(workers, engines, [], Limits(64, request.spares)), engines, {})


@pytest.fixture(scope="module")
def answer() -> PlanDocument:
    return complete(asked())


def answered(answer: PlanDocument, now: PlanRequest) -> WhatIf:
    said = what_if(answer, asked(), now)
    assert said is not None
    return said


@pytest.mark.parametrize(
    ("now", "doubtful"),
    [
        (asked(), False),
        (asked({"slow": 1.3, "fast": 1.0}), False),
        (asked({"slow": 5.0, "fast": 3.0}), False),
        (asked(spares=2), False),
    ],
    ids=["as it was", "the fast one is cheaper", "the slow one is dearer", "spares"],
)
def test_it_is_what_a_complete_plan_says_or_it_is_in_doubt(
    answer: PlanDocument, now: PlanRequest, doubtful: bool
) -> None:
    said, best = answered(answer, now), complete(now).recommendation
    assert best is not None and bool(said.doubt) == doubtful
    if not said.doubt:
        assert (said.fleet.engine, said.fleet.replicas) == (best.engine, best.replicas)
        assert said.fleet.usd_per_hour == pytest.approx(best.usd_per_hour) and said.fleet.gpus == best.gpus
        assert said.holds == best.holds


def test_a_small_change_of_price_leaves_no_doubt_and_other_inputs_leave_no_answer(answer: PlanDocument) -> None:
    best = answer.recommendation
    assert best is not None
    said = answered(answer, asked({"slow": 1.01, "fast": 3.03}))
    assert not said.doubt and said.fleet.usd_per_hour == pytest.approx(1.01 * best.usd_per_hour)
    assert what_if(answer, asked(), asked(slos=["ttft_ms p90<=200"])) is None


def test_a_price_of_nothing_is_a_price(answer: PlanDocument) -> None:
    assert answered(answer, asked({"slow": 0.0, "fast": 3.0})).fleet.usd_per_hour == 0.0
    assert what_if(answer, asked({"slow": 0.0, "fast": 3.0}), asked()) is None


def test_another_risk_is_what_a_complete_plan_says_or_it_is_in_doubt() -> None:
    unsure = replace(question("ttft_ms p90<=300", workload=traffic(200, 40.0)), pricing=BySpeed((0.5, 2.0)))
    usual = complete(asked(), ("slow",), unsure)
    doubts = []
    for risk in (0.25, 0.5):
        said = what_if(usual, asked(), asked(risk=risk))
        best = complete(asked(risk=risk), ("slow",), replace(unsure, risk=risk)).recommendation
        assert best is not None
        if said is not None:
            assert said.holds is not None and said.holds >= 1 - risk
            doubts.append(bool(said.doubt))
            assert said.doubt or said.fleet.replicas == best.replicas
            assert said.doubt or said.holds == pytest.approx(
                best.holds, abs=0.03
            )  # a plan simulates more draws near its risk
    assert not all(doubts)
