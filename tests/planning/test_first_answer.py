"""The range that a plan tells first: the answer lies in it, and of many candidates few are tried."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.planning.plan_samples import engine, question, traffic
from tests.planning.test_plan_steady import alike
from tokentwin.planning.plan import curves
from tokentwin.planning.plan import first_answer as first
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.first_answer import FirstAnswer, first_answer
from tokentwin.planning.plan.plan import Limits, make_plan
from tokentwin.planning.plan.sentences import first_answer as told
from tokentwin.planning.plan.trial import Question, Trial, simulated, try_fleet
from tokentwin.planning.traffic import planned_traffic
from tokentwin.planning.workers import Workers
from tokentwin.serving.workload import Workload
from tokentwin.traces.synth import parse_spec, synthesise


def answers(query: Question, engines, limits: Limits) -> tuple[FirstAnswer | None, FirstAnswer | None]:
    """The range, and what the plan answers in the end."""
    found = first_answer(replace(query, draws=()), engines, limits, lambda: query.draws)
    with Workers(query, 1) as workers:
        best = make_plan(workers, engines, [], limits).recommendation
    if best is None:
        return found, None
    point = best.offer.point
    return found, FirstAnswer((point.gpus,) * 2, (point.usd_per_hour,) * 2, (point.engine,))


@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([10.0, 40.0, 160.0]),
    bound=st.sampled_from([60, 150, 400, 1500]),
    risk=st.sampled_from([0.05, 0.1, 0.3]),
    spares=st.integers(0, 1),
)
@examples(0.06)
def test_the_answer_lies_in_the_range(seed: int, rate: float, bound: int, risk: float, spares: int) -> None:
    """On short traffic, which is simulated whole: other draws and the worth of more certainty are in the range."""
    engines = [engine(), engine("fast", usd=2.2), engine(tp=2)]
    query = question(f"ttft_ms p95<={bound}", workload=traffic(120, rate, seed))
    draws = tuple(traffic(120, rate, seed + more) for more in (1, 2))
    found, best = answers(replace(query, risk=risk, draws=draws), engines, Limits(most=64, spares=spares))
    assert (found is None) == (best is None)
    if found and best:
        assert found.gpus[0] <= best.gpus[0] <= found.gpus[1]
        assert found.usd_per_hour[0] - 1e-9 <= best.usd_per_hour[0] <= found.usd_per_hour[1] + 1e-9
        assert best.engines[0] in found.engines


def test_bursty_traffic_too_long_to_simulate_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nine quiet tenths and one that is four times as busy, which decides a p99."""
    monkeypatch.setattr(first, "_WORK", 300)
    quiet, busy = alike(2700, 0.1).requests, alike(300, 0.025).requests
    later = [replace(r, id=2700 + r.id, arrival_ns=r.arrival_ns + 270 * 10**9) for r in busy]
    query = question("ttft_ms p99<=400", workload=Workload([*quiet, *later], shares_prefixes=False))
    found = first_answer(query, [engine()], Limits(most=64), lambda: pytest.fail("other draws are not looked at"))
    assert found is not None
    low, high = found.gpus
    assert low < high and not try_fleet(query, engine(), low).met and try_fleet(query, engine(), high).met


def test_of_many_candidates_few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight that differ in price: the two cheapest are tried; all that cost no more than they may are in the range."""
    tried: set[float] = set()

    def spied(query: Question, engine: Engine, *how: Any, **named: Any) -> Trial:
        tried.add(engine.usd_per_gpu_hour)
        return share(query, engine, *how, **named)

    share = first.try_share
    monkeypatch.setattr(first, "try_share", spied)
    monkeypatch.setattr(first, "_TRIED", 2)
    engines = [replace(engine(usd=2 - at / 20), varied=(f"at={at}",)) for at in range(8)]
    query = question("ttft_ms p95<=400", workload=traffic(120, 160.0))
    found, best = answers(query, engines, Limits(most=64))
    assert found is not None and best is not None
    assert tried == {engine.usd_per_gpu_hour for engine in engines[-2:]}
    assert found.usd_per_hour[0] - 1e-9 <= best.usd_per_hour[0] <= found.usd_per_hour[1] + 1e-9


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (FirstAnswer((8, 16), (21.52, 43.04), ("a", "b")), "8 to 16 GPUs, $21.52 to $43.04/h, of a or b"),
        (FirstAnswer((1, 1), (2.69, 2.69), ("a", "b", "c", "d")), "1 GPU, $2.69/h, of a, b or 2 others"),
        (None, "probably no fleet meets the SLOs, because every fleet that was tried breaks them"),
    ],
)
def test_it_says_what_it_is(found: FirstAnswer | None, said: str) -> None:
    assert told(found) == f"From quick estimates: {said}"


def conversations(requests: int = 300, turns: int = 3) -> Workload:
    """Sessions of a few turns, each of which thinks before the next."""
    length = {"kind": "fixed", "tokens": 40}
    spec = {
        "requests": requests, "arrivals": {"kind": "poisson", "rate": 3}, "prompt": length, "output": length,
        "sessions": {"turns": turns, "think_ms": 200},
    }  # fmt: skip
    made = synthesise(parse_spec(spec))
    return replace(made, requests=list(made.requests))


@pytest.mark.parametrize("busiest", [True, False])
def test_part_of_traffic_with_sessions_is_simulated(busiest: bool) -> None:
    """A stretch begins in the middle of conversations; a part of the fleet has whole ones."""
    query = question("ttft_ms p90<=9000", workload=conversations())
    for replicas in (1, 4):
        assert first.try_share(query, engine(), replicas, 60, busiest).figures is not None
    part, _ = first._share(query, 4, 90, busiest)
    taken = [r.session for r in part.workload.requests]
    assert len(taken) == 90 and len(set(taken)) < 60


def test_traffic_with_sessions_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "_WORK", 60)
    monkeypatch.setattr(curves, "MOST_ARRIVALS", 60)
    query = question("ttft_ms p90<=9000", workload=conversations())
    assert first_answer(query, [engine()], Limits(most=16), lambda: ()) is not None
    with Workers(query, 1) as workers:
        (curve,) = curves.engine_curves(workers, [engine()], engine(), 1)
    assert curve.points and curve.planned is not None
    busiest = planned_traffic(query.workload, 2.0, None)
    turns = [r.turn for r in busiest.requests]
    assert (
        0 < len(turns) < 300
        and simulated(
            replace(query, workload=busiest, requests=len(turns)), engine(), query.pricing(engine()), 1, to_the_end=True
        ).figures
    )
