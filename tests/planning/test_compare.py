"""Comparison: intervals that mean what they say, the right winner, and the command around them."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import t

from tests.budget import simulated
from tests.planning.sweep_samples import calibrated
from tests.sim.fleet_samples import COST, ROOMY, poisson
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.cli import cli
from tokentwin.dashboard.bundled import DEMO, PAIR
from tokentwin.planning.compare import comparison
from tokentwin.planning.compare.comparer import compare_recordings
from tokentwin.planning.compare.comparison import _row, ranking, verdict, winner
from tokentwin.planning.compare.document import (
    Compared,
    RanDeployment,
    Row,
    Side,
    furthest_off,
    ranking_verdict,
    simulated_errors,
)
from tokentwin.planning.compare.paired_runs import PairedRuns
from tokentwin.planning.compare.request import CompareRecordingsRequest, CompareRequest
from tokentwin.planning.compare.unit_bootstrap import Difference, Jain, Percentile, Ratio, differences
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.request import Timing
from tokentwin.serving.answers.figures import shown_number
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.schema import arrow_schema
from tokentwin.traces.tables import percentiles

MS, S = 1_000_000, 1_000_000_000


def scenario(
    seed: int = 0, count: int = 400, rate: float = 25, cost=COST, policy: str = "vllm", **scheduler
) -> PricedScenario:
    workload = Workload(poisson(count, rate, seed), shares_prefixes=False)
    return PricedScenario(workload, Deployment(policy=policy, scheduler=SchedulerConfig(**(ROOMY | scheduler))), cost)


def compare(pairs: PairedRuns, threshold: float = 0.05) -> Compared:
    side = Side(deployment=RanDeployment(policy="vllm", scheduler={}))
    return comparison.compare(pairs, side, side, threshold)


def table(e2e_ms, arrival_ns=None, tenants=None, statuses=None) -> pa.Table:
    """Requests of known latency: the first of two tokens comes after half of it."""
    count = len(e2e_ms)
    arrival = np.arange(count) * S if arrival_ns is None else np.asarray(arrival_ns)
    whole = np.round(np.asarray(e2e_ms, dtype=float) * MS).astype(np.int64)
    statuses = statuses or ["finished"] * count
    finish = [int(a + w) if s == "finished" else None for a, w, s in zip(arrival, whole, statuses, strict=True)]
    columns = {
        "request_id": np.arange(count),
        "tenant": tenants or [""] * count,
        "status": statuses,
        "prompt_tokens": np.full(count, 10),
        "output_tokens": np.full(count, 2),
        "arrival_ns": arrival,
        "first_token_ns": arrival + whole // 2,
        "finish_ns": finish,
    }
    schema = arrow_schema("requests")
    made = [pa.array(columns.get(field.name, [None] * count), field.type) for field in schema]
    return pa.Table.from_arrays(made, schema=schema)


def autocorrelated(rng: np.random.Generator, count: int, rho: float) -> np.ndarray:
    """A stationary AR(1) of variance 1."""
    from scipy.signal import lfilter  # a second that every worker would spend

    noise = rng.standard_normal(count)
    noise[1:] *= np.sqrt(1 - rho * rho)
    return lfilter([1.0], [1.0, -rho], noise)


# Statistics

UNITS = 6
weights = st.lists(st.integers(0, 3), min_size=UNITS, max_size=UNITS).filter(any)
samples = arrays(np.float64, st.integers(UNITS, 60), elements=st.floats(0, 1e6))


@given(samples, weights, st.sampled_from([50, 90, 99]))
def test_a_weighted_statistic_is_that_of_repeated_units(values, counts, rank) -> None:
    unit = np.arange(len(values)) % UNITS
    repeated = np.repeat(values, np.array(counts)[unit])
    row = np.array([counts])
    assert Percentile(values, unit, UNITS, rank)(row)[0] == percentiles(repeated, (rank,))[0]
    assert Ratio.mean(values, unit, UNITS)(row)[0] == pytest.approx(repeated.mean())


def test_jain_is_1_for_equals_and_1_over_n_for_one() -> None:
    both = np.ones((1, 2), dtype=int)
    assert Jain(np.array([[1.0, 2.0], [2.0, 1.0]]))(both)[0] == pytest.approx(1)
    assert Jain(np.array([[4.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))(both)[0] == pytest.approx(1 / 3)
    assert np.isnan(Jain(np.zeros((2, 3)))(both)[0])


def test_the_interval_of_one_mean_is_that_of_the_paired_t_test() -> None:
    rng = np.random.default_rng(4)
    units, each = 8, 50
    unit = np.repeat(np.arange(units), each)
    a = rng.exponential(10, units * each)
    b = a + rng.normal(1, 2, units * each) + np.repeat(rng.normal(0, 1, units), each)
    (found,) = differences([(Ratio.mean(a, unit, units), Ratio.mean(b, unit, units))], units)
    by_unit = (b - a).reshape(units, each).mean(axis=1)
    half = t.ppf(0.975, units - 1) * by_unit.std(ddof=1) / np.sqrt(units)
    assert found.difference == pytest.approx(by_unit.mean())
    assert found.high - found.difference == pytest.approx(half, rel=0.1)


def test_a_latency_never_falls_by_more_than_all_of_it() -> None:
    """Six blocks of which one is a hundred times as slow on one side."""
    rng = np.random.default_rng(1)
    unit = np.repeat(np.arange(6), 30)
    a = rng.exponential(1, 180) * np.where(unit == 2, 100, 1)
    b = rng.exponential(1, 180)
    for rank in (50, 90):
        pair = (Percentile(a, unit, 6, rank), Percentile(b, unit, 6, rank))
        by_difference, by_ratio = (differences([pair], 6, ratios=ratios)[0] for ratios in ([], [True]))
        assert (by_ratio.a, by_ratio.b) == (by_difference.a, by_difference.b)
        assert -by_ratio.a < by_ratio.low <= by_ratio.difference <= by_ratio.high
    assert by_difference.low < -by_difference.a


def test_an_interval_of_ratios_turns_round_with_its_sides() -> None:
    rng = np.random.default_rng(2)
    unit = np.arange(200) % 8
    a, b = rng.exponential(10, 200), rng.exponential(15, 200)
    a, b = (Ratio.mean(values, unit, 8) for values in (a, b))
    forth, back = (differences([pair], 8, ratios=[True])[0] for pair in ((a, b), (b, a)))
    assert 1 + forth.low / forth.a == pytest.approx(1 / (1 + back.high / back.a))
    assert 1 + forth.high / forth.a == pytest.approx(1 / (1 + back.low / back.a))


def standard_error(runs: int, share: float = 0.05) -> float:
    return (share * (1 - share) / runs) ** 0.5


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("count", "rho", "pairs"), [pytest.param(400, 0.0, 600, marks=pytest.mark.deep), (1000, 0.9, 160)]
)
def test_where_nothing_differs_a_difference_is_claimed_about_one_time_in_twenty(count, rho, pairs):
    """Latencies and their noise are dependent in time, as queues make them; a dozen numbers are looked at."""
    rng = np.random.default_rng(1)
    claims, runs = 0, simulated(pairs)
    for _ in range(runs):
        latency = 100 * np.exp(autocorrelated(rng, count, rho))
        sides = [table(latency * np.exp(0.3 * autocorrelated(rng, count, rho))) for _ in "ab"]
        claims += bool(compare(PairedRuns([sides[0]], [sides[1]])).difference)
    assert claims / runs <= 0.05 + 3 * standard_error(runs)
    assert claims or runs < 100, "never is too rare"


def test_requests_are_not_taken_for_independent() -> None:
    """The same null, resampled request by request, would claim a difference most of the time."""
    rng = np.random.default_rng(2)
    claims = {20: 0, 1000: 0}
    for _ in range(40):
        a, b = (autocorrelated(rng, 1000, 0.95) for _ in "ab")
        for units in claims:
            unit = np.arange(1000) * units // 1000
            (found,) = differences([(Ratio.mean(a, unit, units), Ratio.mean(b, unit, units))], units)
            claims[units] += found.claimed
    assert claims[20] / 40 < 0.2 < 0.5 < claims[1000] / 40


@pytest.mark.statistical
def test_policies_that_differ_by_seed_noise_are_not_called_different() -> None:
    """Shortest job first with predicted lengths, the errors of prediction drawn by one seed and by another."""
    claims, runs = 0, simulated(80)
    for k in range(runs):
        sides = [scenario(k, 300, 40, policy="sjf", sjf_error=1.0, sjf_seed=2 * k + i).requests() for i in (0, 1)]
        claims += bool(compare(PairedRuns([sides[0]], [sides[1]])).difference)
    assert claims / runs <= 0.05 + 3 * standard_error(runs)


# Comparisons


@pytest.mark.parametrize("seeds", [1, 6])
def test_slower_steps_are_found_and_by_how_much(seeds: int) -> None:
    slow = TokenCost(round(6.6 * MS), 19_800, 495)
    a, b = ([scenario(k, 400 // (1 + seeds // 6), 5, cost).requests() for k in range(seeds)] for cost in (COST, slow))
    found = compare(PairedRuns(a, b, {"ttft_ms": 1e4}))
    rows = {(row.metric, row.stat): row for row in found.rows}
    tpot = rows["tpot_ms", "mean"]
    assert tpot.better == "A" and tpot.percent == pytest.approx(10, abs=2) and tpot.low < tpot.b - tpot.a < tpot.high
    assert rows["slo_attainment", "value"].a == 1 and not rows["slo_attainment", "value"].better
    assert found.verdict.startswith("B is worse: ") and found.winner == "A"
    assert (found.units.of, found.units.count) == (("blocks", 20) if seeds == 1 else ("runs", 6))
    assert (rows["output_throughput", "value"].low is None) == (seeds == 1)
    back = compare(PairedRuns(b, a))
    assert {
        (r.metric, r.stat, {"A": "B"}[r.better]) for r in found.rows if r.better and r.metric != "slo_attainment"
    } <= {(r.metric, r.stat, r.better) for r in back.rows if r.better}


def test_the_same_run_does_not_differ_from_itself() -> None:
    run = scenario().requests()
    found = compare(PairedRuns([run], [run]))
    assert not found.difference and found.verdict == "no difference can be claimed: both sides do the same"
    assert all(tally.gain == tally.lose == 0 for tally in found.tallies)


def test_winners_and_losers_by_tenant() -> None:
    a = np.full(60, 100.0)
    b = a.copy()
    b[:20], b[20:24] = 90, 140  # x: all win; y: four lose
    tenants = ["x"] * 20 + ["y"] * 40
    found = compare(PairedRuns([table(a, tenants=tenants)], [table(b, tenants=tenants)]), threshold=0.05)
    counts = {(y.by, y.group): (y.gain, y.lose, y.same) for y in found.tallies if y.metric == "e2e_ms"}
    assert counts == {("all", "all"): (20, 4, 36), ("tenant", "x"): (20, 0, 0), ("tenant", "y"): (0, 4, 36)}
    means = {y.group: (y.mean_a, y.mean_b) for y in found.tallies if y.metric == "e2e_ms"}
    assert means["x"] == pytest.approx((100, 90)) and means["y"] == pytest.approx((100, 104))
    tails = {y.group: (y.tail, y.tail_a, y.tail_b) for y in found.tallies if y.metric == "e2e_ms"}
    assert tails["all"] == ("p50", 100, 100) and tails["y"] == ("p50", 100, 100)


def test_a_request_that_no_longer_finishes_loses() -> None:
    ends = ["finished"] * 30 + ["timed_out"] * 10
    found = compare(PairedRuns([table([100.0] * 40)], [table([100.0] * 40, statuses=ends)]))
    assert [(y.gain, y.lose) for y in found.tallies] == [(0, 10)] * 2
    share = next(row for row in found.rows if row.metric == "finished")
    assert (share.a, share.b) == (1, 0.75)


def with_tenants(seed: int) -> Workload:
    """Half as many again as eight places can serve; every third request is of the small tenant."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(S / 60, 400)).astype(int).tolist()
    names = np.where(rng.random(400) < 0.3, "small", "large").tolist()
    requests = [
        WorkloadRequest(i, at, (("", 60),), 40, tenant=name)
        for i, (at, name) in enumerate(zip(arrivals, names, strict=True))
    ]
    return Workload(requests, shares_prefixes=False)


def test_a_fair_queue_is_fairer_and_its_small_tenant_wins() -> None:
    scheduler = SchedulerConfig(**(ROOMY | {"max_num_seqs": 8}))
    a, b = (
        [PricedScenario(with_tenants(k), Deployment(policy=p, scheduler=scheduler), COST).requests() for k in range(6)]
        for p in ("vllm", "fair")
    )
    found = compare(PairedRuns(a, b))
    jain = next(row for row in found.rows if row.metric == "jain_fairness")
    assert jain.better == "B" and jain.a < 0.95 < jain.b
    assert "; tenant large loses most: " in found.verdict and found.verdict.endswith(
        "requests have a longer TTFT with B"
    )
    small = next(y for y in found.tallies if (y.metric, y.group) == ("ttft_ms", "small"))
    assert small.gain > 0.8 * (small.gain + small.lose + small.same) and small.mean_b < 0.5 * small.mean_a


def test_repeats_of_one_workload_are_no_independent_runs() -> None:
    rng = np.random.default_rng(3)
    a, b = ([table(100 + rng.normal(0, 5, 200)) for _ in range(6)] for _ in "ab")
    pairs = PairedRuns(a, b)
    assert (pairs.unit_is, pairs.units, pairs.runs) == ("blocks", 20, 6)
    assert np.array_equal(pairs.unit[:200], pairs.unit[200:400])


def test_a_share_changes_by_points_and_everything_else_by_percent() -> None:
    attained = _row("slo_attainment", "value", Difference(0.293, 0.517, 0.2, 0.25))
    finished = _row("finished", "share", Difference(0.5, 0.6, 0.05, 0.15))
    slower = _row("ttft_ms", "p50", Difference(200.0, 100.0, -120.0, -80.0))
    assert verdict([attained]) == "B is better: SLO attainment +22.4 points (from 29 % to 52 %)"
    assert "finish +10.0 points" in verdict([finished]) and "TTFT p50 -50.0 %" in verdict([slower])
    open_still = attained.model_copy(update={"better": "", "low": -0.1, "high": 0.5})
    assert verdict([open_still]).endswith(
        "SLO attainment +22.4 points (from 29 % to 52 %), lies between -10.0 and +50.0 points"
    )
    assert attained.percent == pytest.approx(22.4)


def test_a_side_is_better_by_its_attainment_or_if_it_loses_nothing() -> None:
    """Planted: most figures are lost, a few won; how many there are of each must not matter."""

    def rows(metric: str, stats: Sequence[str], change: float, known: bool = True) -> list[Row]:
        ends = (change - 5, change + 5) if known else (-90.0, 90.0)
        return [_row(metric, stat, Difference(100.0, 100.0 + change, *ends)) for stat in stats]

    each = ("mean", "p50", "p90", "p99")
    lost = [*rows("ttft_ms", each, 873.0), *rows("e2e_ms", each, 40.0), *rows("queue_ms", each[:3], 300.0)]
    won, unclear = rows("tpot_ms", each[:2], -29.5), rows("tpot_ms", each[2:], -1.0, known=False)
    assert winner([*won, *unclear, *lost]) == "A", "E2E decides"
    assert winner([*won, *rows("ttft_ms", each, 873.0)]) == "", "E2E claims nothing, and something is lost"
    assert winner([*won, *lost, *rows("e2e_ms", ("p95",), -40.0)]) == "", "E2E is better and worse"
    attained = _row("slo_attainment", "value", Difference(0.293, 0.517, 0.2, 0.25))
    assert winner([*won, *lost, attained]) == "B", "the attainment says whether the SLOs are met"
    losses = "TTFT p99 +873.0 %, queue time p90 +300.0 %, E2E p99 +40.0 %"
    assert verdict([*won, *unclear, *lost]) == f"B is worse: {losses}, but better in TPOT p50 -29.5 %"
    told = verdict([*won, *lost, attained])
    gained = "SLO attainment +22.4 points (from 29 % to 52 %), TPOT p50 -29.5 %"
    assert told == f"B is better: {gained}, but worse in {losses}"
    assert verdict([*won, *rows("ttft_ms", each, 873.0)]) == (
        "neither side is better overall: B is better in TPOT p50 -29.5 %, and worse in TTFT p99 +873.0 %"
    )


@pytest.mark.parametrize(("points", "side"), [(0.9, "A"), (0.3, "A"), (0.005, "")])
def test_a_policy_that_drops_requests_does_not_win_by_those_that_are_left(points: float, side: str) -> None:
    """Planted: B halves every latency of what it finishes."""
    rows = [
        _row(m, s, Difference(100.0, 50.0, -55.0, -45.0)) for m in ("ttft_ms", "e2e_ms") for s in ("p50", "p90", "p99")
    ]
    rows.append(_row("finished", "share", Difference(1.0, 1.0 - points, -points * 1.1, -points * 0.9)))
    assert winner(rows) == side
    assert verdict(rows).endswith("; latencies cover only requests that finish")


def test_blocks_that_go_together_count_for_fewer() -> None:
    same, rng = np.full(400, 100.0), np.random.default_rng(0)
    apart, together = [], []
    waves = 10 * np.repeat([1, -1, -1, 1, 1, -1, -1, 1, 1, -1], 40)  # each as long as two of 20 blocks
    mixed = 10 * np.repeat([1, -1] * 10, 20)  # as much, from block to block
    for _ in range(20):
        noise = rng.normal(1, 1, 400)
        for found, change in ((apart, mixed), (together, waves)):
            row = compare(PairedRuns([table(same)], [table(same + change + noise)])).rows[0]
            found.append(row.high - row.low)
    assert min(together) > 1.2 * max(apart)


def test_blocks_that_go_together_more_than_can_be_allowed_for_are_told() -> None:
    same = np.full(400, 100.0)
    assert compare(PairedRuns([table(same)], [table(same + np.linspace(0, 100, 400))])).units.carry_over
    assert not compare(
        PairedRuns([table(same)], [table(np.random.default_rng(0).normal(100, 10, 400))])
    ).units.carry_over


def test_too_few_requests_are_said_to_be_too_few() -> None:
    found = compare(PairedRuns([table([100.0] * 30)], [table([50.0] * 30)]))
    assert found.verdict == "no difference can be claimed: there are too few requests"


def test_only_the_same_requests_are_compared() -> None:
    with pytest.raises(UserError, match="arrival_ns"):
        PairedRuns([table([1.0] * 20)], [table([1.0] * 20, np.arange(20) * 2 * S)])
    PairedRuns([table([1.0] * 20)], [table([1.0] * 20, np.arange(20) * 2 * S)], closed=True)
    with pytest.raises(UserError, match="request_id"):
        PairedRuns([table([1.0] * 20)], [table([1.0] * 19)])


def compared(changes: dict[str, float]) -> Compared:
    """A against a B whose latencies are a factor of it, with a little noise; TTFT is half of E2E."""
    rng = np.random.default_rng(1)
    a = rng.uniform(90, 110, 300)
    return compare(PairedRuns([table(a)], [table(a * changes["e2e"] * rng.uniform(0.99, 1.01, 300))]))


@pytest.mark.parametrize(
    ("simulated", "real", "outcome"),
    [(0.8, 0.7, "holds"), (0.8, 1.3, "reversed"), (0.8, 1.0, "open"), (1.0, 0.8, "missed")],
)
def test_a_ranking_is_held_against_the_engine(simulated: float, real: float, outcome: str) -> None:
    found = ranking(compared({"e2e": simulated}).rows, compared({"e2e": real}).rows)
    assert {row.outcome for row in found if row.metric == "e2e_ms"} == {outcome}


def test_simulated_numbers_are_held_against_the_real_ones() -> None:
    """In percent of the real one, of a share in points; what is missing on a side, or nothing, has no error."""

    def rows(*made: tuple) -> list[dict]:
        ends = {"low": None, "high": None, "percent": None, "better": ""}
        return [Row(metric=metric, stat="mean", a=a, b=b, **ends) for metric, a, b in made]

    real = rows(("ttft_ms", 200.0, 100.0), ("slo_attainment", 0.5, 0.9), ("e2e_ms", 300.0, None), ("tpot_ms", 0.0, 5.0))
    simulated = rows(
        ("ttft_ms", 50.0, 110.0), ("slo_attainment", 0.9, 0.8), ("e2e_ms", None, 1.0), ("tpot_ms", 1.0, 5.0)
    )
    errors = simulated_errors(simulated, [*real, *rows(("only_real", 1.0, 1.0))])
    assert [(row.metric, row.side, row.error and round(row.error, 9)) for row in errors] == [
        ("ttft_ms", "A", -75.0),
        ("ttft_ms", "B", 10.0),
        ("slo_attainment", "A", 40.0),
        ("slo_attainment", "B", -10.0),
        ("e2e_ms", "A", None),
        ("e2e_ms", "B", None),
        ("tpot_ms", "A", None),
        ("tpot_ms", "B", 0.0),
    ]
    worst = furthest_off(errors)
    assert worst is not None and (worst.metric, worst.side) == ("ttft_ms", "A")
    assert simulated_errors([], real) == [] and furthest_off([]) is None


# The command


def run(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "spec.yaml"
    arrivals = {"kind": "poisson", "rate": 10}
    path.write_text(yaml.safe_dump({"requests": 200, "arrivals": arrivals, "prompt": 300, "output": 30}))
    return path


FLAGS = ("--gpu", "H100", "--format", "json")


def test_overrides_make_the_sides(spec: Path) -> None:
    own = ("--a", "max_num_seqs=1", "--b", "scheduler.max_num_seqs=2", "--b", "replicas=2", "--b", "router=random")
    result = run("compare", "--trace", spec, *FLAGS, *own, "--slo", "ttft:500")
    told = json.loads(result.output)
    assert (
        result.exit_code == 0
        and told["difference"]
        and told["b"]["name"] == "scheduler.max_num_seqs=2 replicas=2 router=random"
    )
    rows = {(row["metric"], row["stat"]): row for row in told["rows"]}
    assert rows["ttft_ms", "mean"]["better"] == rows["slo_attainment", "value"]["better"] == "B"


def test_both_sides_serve_the_named_model(spec: Path) -> None:
    """As on the Policy lab's page; by default the threshold is that of the request."""
    own = ("--model", "Llama-3.1-70B", "--tensor-parallel-size", 4, "--a", "max_num_seqs=4", "--b", "max_num_seqs=256")
    told = json.loads(run("compare", "--trace", spec, "--limit", 40, *FLAGS, *own).output)
    for side in "ab":
        served = told[side]["deployment"]
        assert (served["model"], served["tensor_parallel_size"]) == ("Llama-3.1-70B", 4)
    threshold = CompareRequest.model_fields["threshold"].default
    help = " ".join(run("compare", "--help").output.split())
    assert told["threshold"] == threshold and f"[default: {100 * threshold:g}]" in help


def test_nothing_to_claim_has_a_status_of_its_own(spec: Path) -> None:
    result = run("compare", "--trace", spec, *FLAGS, "--b", "max_num_seqs=1000", "--seeds", "5")
    assert result.exit_code == 3 and json.loads(result.output)["units"] == {
        "of": "runs",
        "count": 5,
        "carry_over": False,
    }


def test_files_and_recordings_give_the_same_answer(spec: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    run("trace", "synth", trace, "--spec", spec)
    for name, seqs in (("a", 1), ("b", 4)):
        settings = {"model": "Llama-3.1-8B", "device": "cuda", "scheduler": {"max_num_seqs": seqs}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        run("simulate", trace, "--gpu", "H100", "-d", tmp_path / f"{name}.yaml", "-o", tmp_path / name, "--no-band")
    files = run("compare", tmp_path / "a.yaml", tmp_path / "b.yaml", "--trace", trace, *FLAGS)
    runs = run("compare", tmp_path / "a", tmp_path / "b", "--format", "json")
    assert json.loads(files.output)["rows"] == json.loads(runs.output)["rows"]
    shown = run("compare", tmp_path / "a", tmp_path / "b")
    assert (
        shown.exit_code == 0
        and "B is better: TTFT p50 -" in shown.output
        and ", but worse in TPOT p90 +" in shown.output
    )


def test_recordings_that_cannot_be_paired_are_named(spec: Path, tmp_path: Path) -> None:
    run("trace", "synth", tmp_path / "t.parquet", "--spec", spec)
    for place in ("a/one", "a/two", "b"):
        run("simulate", tmp_path / "t.parquet", "--gpu", "H100", "--limit", 20, "-o", tmp_path / place, "--no-band")
    with pytest.raises(UserError) as caught:
        run("compare", tmp_path / "a", tmp_path / "b")
    told = str(caught.value)
    assert f"A has one, two in {tmp_path}/a; B has b in {tmp_path}" in told
    assert "\n" not in told


def test_so_are_real_ones_that_are_also_simulated() -> None:
    request = CompareRecordingsRequest(
        a=PAIR / "a", b=PAIR / "b" / "run-1", timing=Timing(calibration=str(DEMO / "calibration"))
    )
    with pytest.raises(UserError, match=r"recordings: \[3, 1\]: must be as many for A as for B"):
        compare_recordings(request)


def test_one_of_a_kind_is_not_a_plural(spec: Path) -> None:
    shown = run("compare", "--trace", spec, "--gpu", "H100", "--limit", 1, "--b", "max_num_seqs=1").output
    assert "1 request, resampled by 1 block of arrivals;" in shown


def test_whose_means_a_tally_has_is_said_where_some_do_not_finish(spec: Path, tmp_path: Path) -> None:
    settings = {"model": "Llama-3.1-8B", "device": "cuda", "scheduler": {"max_num_seqs": 1}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings | {"fleet": {"admission": {"queue_timeout_s": 0.1}}}))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(settings))
    says = "means cover requests that finish on both sides."
    assert says in run("compare", tmp_path / "a.yaml", tmp_path / "b.yaml", "--trace", spec, "--gpu", "H100").output
    assert says not in run("compare", "--trace", spec, "--gpu", "H100", "--b", "max_num_seqs=1").output


def test_a_ranking_of_nothing_is_a_sentence_and_no_table() -> None:
    assert ranking_verdict([]) == ("open", "neither the simulator nor the real engine shows a difference")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{spec}"], "give both"),
        (["--gpu", "H100"], "trace: is missing"),
        (["--trace", "{spec}", "--gpu", "H100", "--b", "policy=sjf", "--tensor-parallel-size", "2"], "needs --model"),
        (
            ["--trace", "{spec}", "--gpu", "H100", "--b", "policy=sjf", "--model", "nobody"],
            "model: 'nobody': must be one of",
        ),
        (["--trace", "{spec}", "--b", "policy=sjf"], "give --calibration, or --gpu"),
        (["--trace", "{spec}", "--gpu", "H100", "--a", "policy"], "NAME=VALUE"),
        (["--trace", "{spec}", "--a", "gpu=H100", "--a", "gpu=H200"], "--a: 'gpu=H200': must name each setting once"),
        (["--trace", "{spec}", "--gpu", "H100", "--a", "polcy=fair"], "polcy"),
        (["--trace", "{spec}", "--gpu", "H100", "--a", "policy=nice"], "nice"),
        (["--trace", "{spec}", "--gpu", "H100", "--a", "model.x=1"], "is a single value"),
        (["--trace", "{spec}", "--gpu", "H100", "--a", "replicas=0"], "must be at least 1"),
        (["--trace", "{spec}", "--gpu", "H100", "--a", "router=3"], "must be a string"),
        (["--trace", "{spec}", "--gpu", "H100", "--engine"], "out: is missing"),
        (["--trace", "{spec}", "--gpu", "H100", "--repeats", "2"], "repeats: '2': needs --engine"),
        (["{folder}", "{folder}"], "is not a recording"),
        (["{folder}/none", "{folder}"], "^A: .*does not exist"),
        (["{spec}", "{folder}/none"], "^B: .*does not exist"),
        (["{folder}", "{spec}"], "compared with recordings"),
        (["{folder}", "{folder}", "--gpu", "H100"], "leave the options of a simulation out"),
        (["--trace", "{folder}/none.yaml", "--gpu", "H100"], "cannot be read"),
        (["--trace", "{spec}", "--gpu", "H100"], "A and B are the same"),
        (["--trace", "{spec}", "--gpu", "H100", "--a", "policy=sjf", "--b", "policy=sjf"], "A and B are the same"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, spec: Path) -> None:
    filled = [argument.format(spec=spec, folder=spec.parent) for argument in arguments]
    with pytest.raises(UserError, match=says) as caught:
        run("compare", *filled)
    assert "\n" not in str(caught.value)


def test_a_recorded_trace_has_no_other_seeds(spec: Path, tmp_path: Path) -> None:
    run("trace", "synth", tmp_path / "t.parquet", "--spec", spec)
    with pytest.raises(UserError, match="must be 1 for a recorded trace"):
        run("compare", "--trace", tmp_path / "t.parquet", "--gpu", "H100", "--seeds", "2", "--b", "policy=fair")


@pytest.mark.parametrize(
    ("scales", "says"),
    [((3.0, 2.0), "both sides are overloaded: 35.5 requests/s arrive, A serves {} and B serves {}; B is better: "),
     ((3.0, 0.2), "A is overloaded: 35.5 requests/s arrive, A serves {}; B is better: "),
     ((0.3, 0.2), "")],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["vllm", "sjf"])
def test_a_verdict_begins_with_the_sides_that_are_overloaded(
    scales: tuple[float, float], says: str, policy: str
) -> None:
    """And says what each serves: as many requests as it serves if all arrive at once. In short runs that fill, too."""
    rate, rates, tables = 40.0, [], []
    for scale in scales:
        cost = TokenCost(int(8 * scale * MS), int(20_000 * scale), 0)
        made = scenario(rate=rate, policy=policy, cost=cost, max_num_seqs=16)
        tables.append(made.requests())
        full = [replace(request, arrival_ns=0) for request in made.workload.requests]
        ends = np.sort(replace(made, workload=replace(made.workload, requests=full)).requests()["finish_ns"].to_numpy())
        rates.append(0.8 * len(ends) / ((ends[int(0.9 * len(ends))] - ends[int(0.1 * len(ends))]) / 1e9))
    found = compare(PairedRuns([tables[0]], [tables[1]]))
    served = [side.served_rate for side in (found.a, found.b)]
    assert found.verdict.startswith(says.format(*(shown_number(one) for one in served if one is not None)))
    assert bool(says) == any(one is not None for one in served)
    for one, alone in zip(served, rates, strict=True):
        assert one is None or one == pytest.approx(alone, rel=0.15)


@pytest.mark.engine
def test_the_engine_confirms_what_the_simulator_claims(tmp_path: Path) -> None:
    """One place against eight for eight clients: no noise of a machine turns that round, and no queue grows."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 40}
    tiny = Deployment.model_validate({"model": "random:qwen3", "dtype": "float32", "scheduler": scheduler})
    invented = Calibration.load(calibrated(tmp_path))
    replace(invented, deployment=tiny.model_dump_json()).save(tmp_path)
    spec = {"requests": 60, "arrivals": {"kind": "closed", "concurrency": 8}, "prompt": 20, "output": 4}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    own = ("--a", "max_num_seqs=1", "--b", "max_num_seqs=8", "--engine", "--out", tmp_path / "real", "--repeats", 3)
    result = run("compare", "--trace", tmp_path / "spec.yaml", "-c", tmp_path, *own, "--format", "json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0
    assert told["units"]["of"] == "blocks" and told["runs"] == 3 and told["simulated"]["runs"] == 1
    outcomes = {(row["metric"], row["stat"]): row["outcome"] for row in told["ranking"]}
    assert outcomes["ttft_ms", "p50"] == "holds", "a mean may be open if the machine stands still for a second"
    assert "reversed" not in outcomes.values()
    assert "the canary step took" in told["disturbance"] and "of the real steps" in told["disturbance"]
    again = run("compare", tmp_path / "real" / "a", tmp_path / "real" / "b", "--format", "json")
    assert json.loads(again.output)["rows"] == told["rows"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names kinds of x86")
def test_a_comparison_is_the_same_to_the_bit_on_every_cpu() -> None:
    code = """
import numpy as np
from tokentwin.planning.compare.unit_bootstrap import Jain, Ratio, _correlation
rng = np.random.default_rng(1)
weights = rng.multinomial(20, [1 / 20] * 20, size=500)
numbers = rng.lognormal(3, 1, (3, 20))
drawn = np.column_stack([Ratio(*numbers[:2])(weights), Jain(numbers.T)(weights)])
print(drawn.tobytes().hex(), _correlation(weights, drawn).tolist())
"""
    said = []
    for cpu in ("Prescott", "Nehalem"):
        environment = {**os.environ, "OPENBLAS_CORETYPE": cpu}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
        said.append(done.stdout)
    assert said[0] == said[1]
