"""Objectives: what can be written, and that a percentile is the share of requests within a bound."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.plan_samples import Steps, engine, fewest, question, traffic
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.planning.plan.objectives import Objective, parse_objectives
from tokentwin.planning.plan.planner import Planners
from tokentwin.planning.plan.search import search
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.tables import percentiles


@pytest.fixture(scope="module")
def metrics() -> RunMetrics:
    """A run in which one request is too long for the engine, and some have a single token."""
    requests = [*traffic().requests, WorkloadRequest(9999, 10**11, ((PRIVATE, 5000),), 10)]
    return run_metrics(Workload(requests, shares_prefixes=False), engine().deployment, Steps(1.0), 2)


def test_objectives_are_read_as_written() -> None:
    found = parse_objectives(["ttft_ms  p99 <= 500", "tpot p95<=50", "ttft_ms p50<=200", "attainment >= 0.98"])
    assert [o.text for o in found.slos] == [
        "ttft_ms p99 <= 500",
        "tpot p95<=50",
        "ttft_ms p50<=200",
        "attainment >= 0.98",
    ]
    assert [o.share for o in found.slos] == [Fraction(99, 100), Fraction(95, 100), Fraction(1, 2), Fraction(98, 100)]
    assert found.bounds == (("tpot_ms", 50.0), ("ttft_ms", 500.0))  # of two bounds the loosest
    assert found.slos[3].bounds == found.bounds


@pytest.mark.parametrize("text", ["TTFT p99 < 1.5 s", "ttft_ms p99<=1.5s", "ttft P99 <= 1500ms", "TTFT p99<=1500"])
def test_bounds_may_have_a_unit(text: str) -> None:
    assert parse_objectives([text]).bounds == (("ttft_ms", 1500.0),)


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["ttft_ms p99>500"], "must be like"),
        (["fast p99<=5"], "fast_ms"),
        (["ttft_ms p0<=5"], "above 0"),
        (["ttft_ms p99<=1e999"], "at most 1,000,000,000,000"),
        (["ttft_ms p99<=1e999999999"], "is not a number"),
        (["ttft_ms p101<=5"], "at most 100"),
        (["ttft_ms p99<=nan"], "is not a number"),
        (["ttft_ms p99<=-3"], "above 0"),
        (["ttft_ms p99<=1e-6"], "below 0.01 ms, which no GPU can meet; bounds are in milliseconds"),
        (["ttft_ms<=500"], "add 'attainment"),
        (["ttft_ms<=500 for chat", "attainment>=0.9"], "needs a percentile"),
        (["attainment>=0.9"], "bounds no latency"),
        (["ttft_ms<=500", "attainment>=1.5"], "at most 1"),
        ([], "bounds no latency"),
    ],
)
def test_a_mistake_is_named_in_one_line(texts: list[str], names: str) -> None:
    with pytest.raises(UserError, match=names) as error:
        parse_objectives(texts)
    assert "\n" not in str(error.value)


def test_a_bound_of_one_class_is_not_for_the_others() -> None:
    rows = [  # class, ms to the first token
        ("chat", 100),
        ("chat", 900),
        ("batch", 900),
        ("batch", 900),
    ]
    requests = pa.table(
        {
            "slo_class": [name for name, _ in rows],
            "status": ["finished"] * len(rows),
            "arrival_ns": [0] * len(rows),
            "first_token_ns": [ms * 10**6 for _, ms in rows],
        }
    )
    of_class = parse_objectives(["ttft_ms p50<=500 for chat", "attainment>=0.75"])
    metrics = RunMetrics(requests)
    assert of_class.bounds == () and of_class.metrics == ("ttft_ms",)
    assert of_class.attainment(metrics) == 0.75 and of_class.broken(metrics) == (0.25,)
    assert of_class.slos[1].misses(metrics) == (1, 4) and of_class.slos[1].observed(metrics) == 0.75
    assert "25.0 % break ttft_ms<=500 for chat" in of_class.seen(of_class.slos[1], 0.75, (0.25,))
    both = parse_objectives(["ttft_ms p50<=500 for chat", "ttft_ms p50<=800", "attainment>=0.75"])
    assert both.bounds == (("ttft_ms", 800.0),) and both.attainment(metrics) == 0.25
    assert both.broken(metrics) == (0.75, 0.25)


@given(st.integers(1, 5000), st.integers(1, 100))
def test_so_many_misses_are_what_a_nearest_rank_percentile_allows(requests: int, percent: int) -> None:
    objective = Objective("", (("ttft_ms", 1.0),), Fraction(percent, 100))
    allowed = objective.allowed(requests)
    values = [0.0] * (requests - allowed) + [2.0] * allowed
    assert percentiles(np.array(values), (percent,)) == [0.0]
    if requests > allowed:
        values[0] = 2.0
        assert percentiles(np.array(sorted(values)), (percent,)) == [2.0]


@pytest.mark.parametrize("metric", ["ttft_ms", "tpot_ms", "e2e_ms"])
@pytest.mark.parametrize("statistic", ["p50", "p90", "p99", "mean"])
def test_an_objective_holds_just_when_its_statistic_is_within_the_bound(metrics, metric, statistic):
    (written,) = parse_objectives([f"{metric} {statistic}<=1"]).slos
    assert written.statistic == statistic
    if statistic == "mean":  # of fleets that turn nobody away
        assert written.observed(metrics) == math.inf and not written.misses(metrics)[0] <= written.allowed(10**9)
        metrics = run_metrics(traffic(), engine().deployment, Steps(1.0), 2)
        assert written.observed(metrics) == pytest.approx(metrics.distribution(metric).mean)
    seen = written.observed(metrics)
    for bound in (seen * 0.999, seen * (1 + 1e-12), seen * 1.001):
        objective = replace(written, bounds=((metric, bound),))
        misses, counted = objective.misses(metrics)
        assert (misses <= objective.allowed(counted)) == (seen <= bound)


def test_a_request_that_is_turned_away_breaks_every_bound(metrics: RunMetrics) -> None:
    assert (~metrics.finished).sum() == 1
    assert parse_objectives(["ttft_ms p100<=1e9"]).slos[0].observed(metrics) == math.inf
    found = parse_objectives(["ttft_ms<=1e9", "attainment>=0.5"])
    assert found.attainment(metrics) == 1 - 1 / len(metrics.finished)
    assert found.slos[0].misses(metrics) == (1, len(metrics.finished))


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms", "e2e_ms"])
def test_among_finished_requests_an_objective_sees_the_percentile_of_a_report(metrics: RunMetrics, name: str) -> None:
    objective = parse_objectives([f"{name} p99<=1"]).slos[0]
    fleet = run_metrics(traffic(), engine().deployment, Steps(1.0), 2)  # a plan's fleet, which finishes all requests
    assert objective.observed(metrics, math.nan) == metrics.distribution(name).p99
    assert fleet.finished.all() and objective.observed(fleet) == fleet.distribution(name).p99


def test_an_objective_of_a_class_is_about_its_requests_only() -> None:
    requests = [replace(request, slo_class=("Chat", "batch", "")[request.id % 3]) for request in traffic().requests]
    workload = replace(traffic(), requests=requests)
    metrics = run_metrics(workload, engine().deployment, Steps(1.0), 2)
    mine = np.array([request.slo_class == "Chat" for request in requests])
    ttft = np.sort(metrics.values("ttft_ms")[mine])
    median = float(ttft[math.ceil(len(ttft) / 2) - 1])
    objectives = parse_objectives([f"TTFT p50 <= {median} ms for Chat", f"ttft_ms p50<={median}"])
    of_class, of_all = objectives.slos
    assert of_class.slo_class == "Chat" and of_class.observed(metrics) == median
    assert of_class.misses(metrics) == (int((ttft > median).sum()), len(ttft))
    assert of_class.allowed(len(ttft)) >= of_class.misses(metrics)[0] and of_all.misses(metrics)[1] == len(requests)
    with pytest.raises(UserError, match="for a class that no request has; the traffic's classes: Chat, batch"):
        parse_objectives(["ttft_ms p50<=9 for chat"]).slos[0].check_class({r.slo_class for r in requests})


@pytest.mark.parametrize("slo", ["ttft_ms mean<=400", "tpot_ms mean<=26 for chat", "e2e_ms mean<=700"])
def test_the_search_for_a_mean_is_that_of_trying_every_fleet(slo: str) -> None:
    """On more requests than are looked at before a run is stopped."""
    requests = [replace(r, slo_class="chat" if r.id % 4 else "batch") for r in traffic(200).requests]
    asked = question(slo, workload=replace(traffic(), requests=requests))
    with Planners(asked, 1) as workers:
        (sized,) = search(workers, [engine()], 12)
    assert sized.replicas == fewest(asked, engine(), 12) and 1 < (sized.replicas or 0) < 12
    stopped = any(trial.figures is None for trial in sized.trials)  # when the mean could not be met any more
    assert stopped or slo.startswith("tpot")


def test_the_search_for_a_class_is_that_of_trying_every_fleet() -> None:
    requests = [replace(r, slo_class="chat" if r.id % 4 else "batch") for r in traffic(80).requests]
    requests = [replace(r, prompt=((PRIVATE, 900),)) if r.slo_class == "batch" else r for r in requests]
    needed = []
    for slo in ("ttft_ms p90<=500 for chat", "ttft_ms p90<=30000 for batch"):
        asked = question(slo, workload=replace(traffic(), requests=requests))
        needed.append(fewest(asked, engine(), 12))
        with Planners(asked, 1) as workers:
            (sized,) = search(workers, [engine()], 12)
        assert sized.replicas == needed[-1]
    assert needed[0] > needed[1]  # the slow class has a loose bound


def test_attainment_is_that_of_the_run_metrics() -> None:
    workload, bounds = traffic(), {"ttft_ms": 250.0, "tpot_ms": 30.0}
    run = run_metrics(workload, engine().deployment, Steps(1.0), 3)
    ours = parse_objectives(["ttft_ms<=250", "tpot_ms<=30", "attainment>=0.9"]).attainment(run)
    run.slo = bounds
    assert 0.1 < ours < 0.99
    assert ours == run.meets_slo().mean()
