"""Fleets of two kinds by prompt length, and spot GPUs: what the plan finds, against trying every fleet."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.planning.plan_samples import engine, question
from tokentwin.cli import cli
from tokentwin.planning.plan.answer import plan_document
from tokentwin.planning.plan.mixed_answer import with_mixed_fleets
from tokentwin.planning.plan.mixes import Mix, SizedPool, lengths_to_try, mixes
from tokentwin.planning.plan.plan import Limits, make_plan
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.spot import Spot, spot_fleets
from tokentwin.planning.plan.trial import LIKELY, simulated_fleet, try_fleet
from tokentwin.planning.workers import Workers
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.sim.fleet import PricedPool

SLOS = ("ttft_ms p95<=150", "tpot_ms p95<=60")
CHEAP, FAST = engine(usd=1.0), engine("fast", usd=5.0)
AT = 400


def chats_and_documents(requests: int = 200, rate: float = 80.0) -> Workload:
    """Return short prompts, and every eighth with 1,500 tokens, which the slow engine cannot start in time."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1e9 / rate, requests)).astype(np.int64).tolist()
    prompts = [1500 if number % 8 == 7 else 40 + number % 50 for number in range(requests)]
    made = [
        WorkloadRequest(i, at, ((PRIVATE, p),), 12) for i, (at, p) in enumerate(zip(arrivals, prompts, strict=True))
    ]
    return Workload(made, shares_prefixes=False)


def meets(asked, mix: Mix, share: float) -> bool:
    fleet = mix.fleet(asked.router)
    kinds = zip(fleet.pools, mix.pools, strict=True)
    pools = [
        PricedPool(config, pool.engine.deployment, asked.pricing(pool.engine).at_share(share)) for config, pool in kinds
    ]
    return simulated_fleet(asked, fleet, pools, 0).met


def test_the_cheapest_mix_is_that_of_trying_every_one() -> None:
    asked = question(*SLOS, workload=chats_and_documents())
    with Workers(asked, 1) as workers:
        (sized,) = mixes(workers, [CHEAP, FAST], [AT], most=16)
    kinds = [(pool.engine.gpu, pool.max_prompt_tokens) for pool in sized.mix.pools]
    assert kinds == [("slow", AT), ("fast", None)]
    every = [Mix((SizedPool(CHEAP, a, AT), SizedPool(FAST, b))) for a, b in product(range(1, 9), range(1, 4))]
    cheaper = [mix for mix in every if mix.weight < sized.mix.weight]
    assert cheaper and not any(meets(asked, mix, 0.9) and meets(asked, mix, LIKELY) for mix in cheaper)
    assert sized.probabilities.planned is not None and sized.probabilities.planned >= 0.9
    single = next(n for n in range(1, 9) if try_fleet(asked, FAST, n).met) * FAST.usd_per_hour
    assert sized.mix.weight[0] < single
    assert not try_fleet(asked, CHEAP, 16).met


def test_one_kind_makes_no_mix() -> None:
    asked = question("tpot_ms p95<=60", workload=chats_and_documents())
    with Workers(asked, 1) as workers:
        assert mixes(workers, [CHEAP], [AT], most=16) == []


def test_traffic_is_divided_where_both_sides_have_requests() -> None:
    asked = question(*SLOS, workload=chats_and_documents())
    prompts = sorted(request.prompt_len for request in asked.workload.requests)
    for at in lengths_to_try(("search",), asked):
        assert 20 <= sum(prompt <= at for prompt in prompts) <= len(prompts) - 20
    with pytest.raises(UserError, match="leaves fewer than 20 prompts on one side; prompts have 40 to 1,500 tokens"):
        lengths_to_try(("2000",), asked)


def test_users_who_wait_get_the_cheapest_mix_that_meets_their_slos() -> None:
    """The parts are sized by the arrivals at one fleet; the mix is held to clients who wait at itself."""
    open_loop = chats_and_documents()
    waiting = Workload(
        [replace(one, arrival_ns=0) for one in open_loop.requests], concurrency=24, shares_prefixes=False
    )
    asked = question(*SLOS, workload=waiting)
    assert lengths_to_try((str(AT),), asked) == [AT]
    single = next(n for n in range(1, 17) if try_fleet(asked, FAST, n).met)
    with Workers(asked, 1) as workers:
        (sized,) = mixes(workers, [CHEAP, FAST], [AT], most=16, single=(FAST, single))
    assert [pool.engine.gpu for pool in sized.mix.pools] == ["slow", "fast"]
    assert meets(asked, sized.mix, LIKELY) and meets(asked, sized.mix, 0.9)
    assert sized.trial.figures is not None and sized.trial.figures.unfinished == 0


def spot(per_hour: float, usd: float = 0.4) -> Spot:
    return Spot({"slow": usd}, per_hour, notice_s=1.0, restart_s=3.0)


def sized_with(per_hour: float, usd: float = 0.4):
    asked = question("ttft_ms p90<=500")
    fewest = next(n for n in range(1, 9) if try_fleet(asked, CHEAP, n).met)
    with Workers(asked, 1) as workers:
        (found,) = spot_fleets(workers, [(CHEAP, fewest), (FAST, 1)], spot(per_hour, usd), 16, 0)
    return found, fewest


def test_spot_gpus_that_are_never_interrupted_are_only_cheaper() -> None:
    found, fewest = sized_with(0.0)
    assert (found.on_demand, found.spot, found.interruptions) == (0, fewest, 0.0)
    assert found.usd_per_hour == pytest.approx(0.4 * fewest) and found.holds >= 0.9 and not found.without_spot


def test_more_interruptions_hold_less_often_and_cost_more() -> None:
    usd, before = 0.0, 1.0
    for per_hour in (60.0, 600.0):
        found, fewest = sized_with(per_hour)
        assert found.usd_per_hour >= usd or found.holds < 0.9
        usd = found.usd_per_hour
        none_come = math.exp(-found.interruptions)
        assert none_come * 0.85 <= found.holds + 1e-9 <= 1.0
        before = min(before, found.if_interrupted)
    assert before < 1.0 or fewest > 1
    assert found.on_demand > 0 or found.holds < 0.9  # one interruption a replica and six seconds


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments), "--jobs", "1"], standalone_mode=False)


def test_the_answer_compares_them_with_the_best_single_kind() -> None:
    asked = question(*SLOS, workload=chats_and_documents())
    request = PlanRequest(
        traffic="made-up.csv",
        gpus=("slow", "fast"),
        slos=SLOS,
        mix=(str(AT),),
        spot={"fast": 1.0},
        interruptions_per_hour=1.0,
        restart_s=5.0,
    )
    with Workers(asked, 1) as workers:
        plan = make_plan(workers, [CHEAP, FAST], [], Limits(most=16))
        bare = plan_document(plan, [CHEAP, FAST], {})
        answer = with_mixed_fleets(bare, workers, plan, [CHEAP, FAST], request)
    best = answer.recommendation
    assert best is not None and best == bare.recommendation
    assert [mix.pools[-1].spot for mix in answer.mixes] == [True, False]  # spot GPUs cost a fifth here
    for mix in answer.mixes:
        assert mix.usd_per_hour == pytest.approx(sum(pool.usd_per_hour for pool in mix.pools))
        assert mix.usd_per_hour < best.usd_per_hour
        assert mix.change == pytest.approx(mix.usd_per_hour / best.usd_per_hour - 1)
        assert parse(Deployment, mix.deployment, where="mix").fleet is not None
    spot, kinds = answer.mixes
    assert spot.interruptions == pytest.approx(spot.pools[-1].replicas / 3600 * (5 + 200 / 80), rel=0.2)
    assert answer.answer.startswith(f"{spot.name} = ") and bare.answer in answer.answer
    assert (
        kinds.name
        == f"{kinds.pools[0].replicas} x TP1 slow up to 400 prompt tokens + {kinds.pools[1].replicas} x TP1 fast"
    )
    assert answer.table("mixes").column("fleet").to_pylist() == [spot.name, kinds.name]
    assert len(answer.shown_mixes().rows) == 3


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--mix", "-5"), "mix"),
        (("--mix", "all"), "mix"),
        (("--spot", "H100"), "spot"),
        (("--spot", "H100=1"), "interruptions-per-hour"),
        (("--interruptions-per-hour", "1"), "interruptions-per-hour"),
        (("--spot", "L4=1", "--interruptions-per-hour", "1"), "spot"),
        (("--spot", "H100=1", "--interruptions-per-hour", "1", "--split", "1:1"), "spot"),
        (("--spot", "H100=1", "--interruptions-per-hour", "1", "--replicas", "2"), "spot"),
    ],
)
def test_a_mistake_is_one_line(options: tuple[str, ...], names: str) -> None:
    result = plan("--prompt", 100, "--output", 10, "--rate", 2, "--gpu", "H100", "--slo", "ttft_ms p95<=600", *options)
    assert isinstance(result.exception, UserError) and result.exception.field == names
