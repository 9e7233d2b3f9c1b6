"""Candidates whose prompts and tokens are made by different engines, so many of one to so many of the other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.planning.plan_samples import engine, fewest, question, traffic
from tokentwin.cli import cli
from tokentwin.planning.plan.answer import plan_document
from tokentwin.planning.plan.candidates import Engine, Split
from tokentwin.planning.plan.plan import Limits, make_plan
from tokentwin.planning.plan.search import least_replicas
from tokentwin.planning.plan.trial import try_fleet
from tokentwin.planning.workers import Workers
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.fleet import FleetConfig, LinksConfig
from tokentwin.serving.errors import UserError

SLOS = ("ttft_ms p99<=600", "tpot_ms p95<=60")


class Linked(Engine):
    """A made-up model has no KV to move but what it is told."""

    def fleet(self, replicas: int, router: str) -> FleetConfig:
        return super().fleet(replicas, router).model_copy(update={"links": LinksConfig(kv_bytes_per_token=1000)})


def split(prefill: int, decode: int) -> Engine:
    of = engine()
    return Linked(of.gpu, of.usd_per_gpu_hour, of.deployment, split=Split(prefill, decode))


def test_a_split_replica_is_all_of_its_engines() -> None:
    of = split(1, 2)
    assert (of.name, of.gpus, of.usd_per_hour) == ("TP1 slow 1P2D", 3, 3.0)
    fleet = of.fleet(4, "least-requests")
    assert [(p.role, p.replicas) for p in fleet.pools] == [("prefill", 4), ("decode", 8)]
    assert engine().fleet(4, "random").pools[0].replicas == 4 and engine().fleet(4, "random").router.name == "random"


def test_a_search_is_none_and_every_small_ratio_once() -> None:
    found = Split.listed(("1:2", "search", "none"))
    assert found[0] == Split(1, 2) and len(found) == len(set(found)) == 10
    ratios = {split.prefill / split.decode for split in found if split}
    assert ratios == {p / d for p in range(1, 5) for d in range(1, 5) if p + d <= 5}
    with pytest.raises(UserError, match="must be none, search, or PREFILL:DECODE"):
        Split.listed(("all",))


def test_a_split_fleet_is_found_by_trying_every_one() -> None:
    query, engines = question(*SLOS), [engine(), split(1, 1), split(1, 3)]
    with Workers(query, 1) as workers:
        found = make_plan(workers, engines, [], Limits(most=32))
    best = found.recommendation
    assert best is not None
    offers = {offer.engine.name: offer.trial.replicas for offer in (best.offer, *found.runners_up)}
    needed = {of.name: fewest(query, of, 32) for of in engines}
    assert offers.items() <= needed.items() and len(offers) + len(found.dearer) == 3
    costs = {of.name: needed[of.name] * of.usd_per_hour for of in engines if needed[of.name] is not None}
    assert best.offer.point.usd_per_hour == pytest.approx(min(costs.values()))


def test_decodes_are_not_held_up_by_prompts_once_they_are_apart() -> None:
    query = question(*SLOS, workload=traffic(300, 30.0, tokens=1500))
    together, apart = (try_fleet(query, of, 4, to_the_end=True).figures for of in (engine(), split(1, 1)))
    assert together is not None and apart is not None
    assert apart.observed[1] < together.observed[1]


@pytest.mark.parametrize("of", [split(1, 1), split(1, 3), split(3, 1)], ids=lambda of: of.name)
@pytest.mark.parametrize("slos", [("ttft_ms p99<=500",), ("e2e_ms p90<=2500",)])
def test_throughput_alone_never_asks_for_more_than_it_takes(of: Engine, slos: tuple[str, ...]) -> None:
    query = question(*slos, workload=traffic(300, 60.0))
    needed = fewest(query, of, 40)
    assert needed is not None and least_replicas(query, of, query.pricing(of)) <= needed


def test_the_recommended_deployment_brings_its_fleet_and_no_command() -> None:
    query = question(*SLOS)
    with Workers(query, 1) as workers:
        found = make_plan(workers, [split(1, 1)], [], Limits(most=32))
    best = plan_document(found, [], {}).as_json()["recommendation"]
    deployment = parse(Deployment, best["deployment"], where="recommendation")
    assert deployment.fleet is not None and best["vllm_serve"] is None
    assert [pool.replicas for pool in deployment.fleet.pools] == [best["replicas"]] * 2
    assert replace(split(1, 1), split=None).name == "TP1 slow"


def plan(folder: Path, *arguments: str) -> Result:
    file = folder / "t.yaml"
    spec = {"requests": 60, "arrivals": {"kind": "poisson", "rate": 10}, "prompt": 500, "output": 40}
    file.write_text(yaml.safe_dump(spec))
    words = ["plan", str(file), "--gpu", "H100", "--slo", "ttft_ms p99<=1000", "--jobs", "1", *arguments]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


def test_candidates_may_be_split_or_not(tmp_path: Path) -> None:
    found = json.loads(plan(tmp_path, "--split", "none,1:1", "--split", "1:2", "--format", "json").stdout)
    named = [found["recommendation"]["engine"], *(p["engine"] for p in found["runners_up"])]
    assert named == ["TP1 H100", "TP1 H100 1P1D", "TP1 H100 1P2D"]


@pytest.mark.parametrize("text", ["1", "0:1", "1:x", "1:2:3", "65:1"])
def test_what_is_no_split_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="must be none, search, or PREFILL:DECODE"):
        plan(tmp_path, "--split", text)
