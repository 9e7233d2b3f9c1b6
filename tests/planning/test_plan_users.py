"""Fleets for users who wait for answers, and users for fleets, against trying every number."""

from dataclasses import replace

import pytest

from tests.planning.plan_samples import BySpeed, engine, fewest
from tokentwin.planning.made_up import made_up
from tokentwin.planning.plan.first_answer import try_share
from tokentwin.planning.plan.most_clients import search_most
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.planning.plan.planner import other_draws
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.search import search
from tokentwin.planning.plan.trial import LIKELY, Question, try_alone, try_fleet
from tokentwin.planning.traffic import clients_of, looped, with_clients
from tokentwin.planning.workers import Workers
from tokentwin.serving.errors import UserError
from tokentwin.traces.synth import SynthSpec, parse_spec

SLO = "e2e_ms p90<=3000"


def users(count: int, think_ms: int = 2000, **changes: object) -> SynthSpec:
    think = {"kind": "exponential", "mean": think_ms}
    spec = {
        "duration_s": 40,
        "arrivals": {"kind": "users", "users": count, "think_ms": think},
        "prompt": {"kind": "exponential", "mean": 100, "max": 400},
        "output": {"kind": "exponential", "mean": 30, "max": 120},
    }
    return parse_spec(spec | changes)


def asked(spec: SynthSpec, *slos: str) -> Question:
    workload = looped(spec)
    count = len(list(workload.requests))
    return Question(workload, count, parse_objectives(slos or (SLO,)), BySpeed(), "least-requests", 0.1, loop=spec)


@pytest.mark.parametrize("count", [10, 40, 90])
def test_the_search_finds_the_fewest_replicas_for_all_users(count: int) -> None:
    question, of = asked(users(count)), engine()
    with Workers(question, jobs=1) as workers:
        (found,) = search(workers, [of], most=20)
    assert found.replicas == fewest(question, of, 20)
    assert found.replicas is not None and (found.replicas > 1) == (count > 10)


def test_most_users_are_the_last_number_within_the_slos() -> None:
    question, of = asked(users(10)), engine()
    most = search_most(question, of, 1, LIKELY, 0, 10)
    assert most.run is not None and most.run.met and 10 < most.clients < 100
    for number in (1, most.clients // 2, most.clients - 1, most.clients, most.clients + 1, most.clients + 2):
        trial = try_fleet(replace(question.for_clients(number), risk=0.5), of, 1)
        assert trial.met == (number <= most.clients), number
    assert search_most(question, of, 1, LIKELY, 0, 200).clients == most.clients
    assert search_most(question, of, 2, LIKELY, 0, 30).clients > most.clients


def test_users_who_think_longer_need_less_and_slower_answers_send_less() -> None:
    short, long = (try_fleet(asked(users(60, think_ms)), engine(), 4, to_the_end=True) for think_ms in (500, 8000))
    rates = [trial.figures.steady.requests_per_s for trial in (short, long) if trial.figures]
    assert rates[0] > 2 * rates[1]
    few, many = (try_fleet(asked(users(60)), engine(), n, to_the_end=True) for n in (1, 8))
    rates = [trial.figures.steady.requests_per_s for trial in (few, many) if trial.figures]
    assert rates[0] < 0.8 * rates[1]


def test_more_traffic_is_more_users_who_include_the_fewer() -> None:
    question = asked(users(20))
    more = question.at_scale(1.5)
    assert more.loop is not None and clients_of(more.loop) == 30 and more.draws == ()
    sent = {r.session: (r.arrival_ns, r.prompt_len) for r in more.workload.requests if r.turn == 0}
    assert all(sent[r.session] == (r.arrival_ns, r.prompt_len) for r in question.workload.requests if r.turn == 0)
    assert question.at_scale(1.0) is question


def test_alone_is_without_waiting_and_without_think_times() -> None:
    trial = try_alone(asked(users(30)), engine())
    assert trial.met and trial.figures is not None and trial.figures.unfinished == 0
    assert not try_alone(asked(users(30), "e2e_ms p90<=100"), engine()).met


def test_a_closed_loop_is_planned_without_its_first_rounds() -> None:
    spec = users(1, duration_s=None, requests=1200, arrivals={"kind": "closed", "concurrency": 60})
    workload = looped(spec)
    assert (workload.concurrency, workload.warm_up_requests) == (60, 180)
    assert looped(with_clients(spec, 5)).concurrency == 5
    assert len(list(looped(with_clients(spec, 5)).requests)) == 100
    question, of = asked(spec), engine()
    with Workers(question, jobs=1) as workers:
        (found,) = search(workers, [of], most=20)
    assert found.replicas == fewest(question, of, 20)
    assert found.replicas is not None and found.replicas > 1


def test_a_first_look_at_a_part_of_the_fleet_takes_a_part_of_the_users() -> None:
    question = asked(users(60))
    trial = try_share(question, engine(), 4, enough=question.requests // 3)
    whole = try_fleet(question, engine(), 4)
    assert trial.replicas == 4 and trial.met == whole.met


def test_other_draws_have_as_many_users() -> None:
    request = PlanRequest(traffic=users(12), slos=(SLO,), gpus=("H100",))
    planned = request.workload(at_named_rate=True)
    draws = other_draws(request, planned)
    assert len(draws) == 2 and all(draw.until_ns == planned.until_ns for draw in draws)
    assert {len({r.session for r in draw.requests}) for draw in draws} == {12}
    with pytest.raises(UserError, match=r"rate-scale: 2\.0: needs a rate, but these clients wait"):
        PlanRequest(traffic=users(3), slos=(SLO,), rate_scale=2.0).workload(at_named_rate=True)


def test_made_up_traffic_has_its_means() -> None:
    for arrivals in ({"rate": 4}, {"users": 50, "think_s": 5}, {"concurrency": 16}):
        spec = made_up({"prompt": 1500, "output": 300, **arrivals})
        requests = list(looped(spec).requests) if "rate" not in arrivals else []
        if requests:
            assert sum(r.prompt_len for r in requests) / len(requests) == pytest.approx(1475, rel=0.1)
            assert sum(r.output_len for r in requests) / len(requests) == pytest.approx(298, rel=0.1)
        assert spec == made_up({"prompt": 1500, "output": 300, **arrivals})


def test_users_who_still_wait_for_their_first_answer_do_not_hide_a_slow_fleet() -> None:
    """Nobody sends a request after the warm-up, because the answers to the first ones take longer than the traffic."""
    spec = users(400, output={"kind": "fixed", "tokens": 900}, duration_s=20)
    trial = try_fleet(asked(spec, "ttft_ms p90<=2000"), engine(), 1, to_the_end=True)
    assert not trial.met and trial.figures is not None and trial.figures.attainment < 0.9


def test_mid_session_starts_are_not_held_against_a_fleet_that_forgets_nothing() -> None:
    sessions = {"turns": 8, "think_ms": 500}
    spec = users(6, sessions=sessions, prompt=200, output=10)
    question = asked(spec, "ttft_ms p90<=80")  # prompts of up to 1,700 tokens take 190 ms without a prefix cache
    cached = replace(engine(), deployment=engine().deployment.rescheduled(enable_prefix_caching=True))
    assert try_alone(question, cached).met


def test_a_limit_counts_for_the_stated_clients_and_grows_with_them() -> None:
    spec = users(40)
    limited = replace(asked(spec), workload=looped(spec, limit=400), requests=400, limit=400)
    assert [limited.for_clients(number).requests for number in (20, 40, 80)] == [200, 400, 800]
    assert limited.at_scale(1.5).for_clients(20).requests == 200


@pytest.mark.parametrize("arrivals", [{"users": 50}, {"concurrency": 64}])
def test_a_limit_within_the_warm_up_is_refused_with_the_number_that_is_enough(arrivals: dict[str, int]) -> None:
    loop = made_up({"prompt": 500, "output": 100, **arrivals})
    with pytest.raises(UserError, match=r"^limit: 150: ends in the warm-up, .* give at least [\d,]+$") as error:
        looped(loop, limit=150)
    enough = int(str(error.value).split()[-1].replace(",", ""))
    assert len(list(looped(loop, limit=enough).requests)) == enough
    with pytest.raises(UserError, match=f"limit: {enough - 1}: "):
        looped(loop, limit=enough - 1)
