"""Diagnosis: runs whose cause is known get the right one named first, and counterfactuals are exact."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import LLAMA, Roofline, deployment
from tests.planning import diagnosed_runs as runs
from tests.planning.diagnosed_runs import MS, S, arrivals, diagnosed, diagnosis_of, requests
from tests.planning.sweep_samples import calibrated
from tests.traces.notes import add_notes
from tokentwin.calibration.expert_routing import random_imbalance
from tokentwin.calibration.operations import uniform_step
from tokentwin.calibration.steps.operation_cost import HostTimes, OperationCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.steps.step_trust import stacked
from tokentwin.cli import cli
from tokentwin.planning.diagnose.baseline import FINISHED
from tokentwin.planning.diagnose.changes import changes
from tokentwin.planning.diagnose.constraint_lifts import (
    LIFTS,
    dispersion,
    infinite_kv,
    more_places,
)
from tokentwin.planning.diagnose.diagnosis import diagnose, worth_of
from tokentwin.planning.diagnose.document import Counterfactual, DiagnosisDocument
from tokentwin.planning.diagnose.evidence import Evidence
from tokentwin.planning.diagnose.fleet_lifts import more_replicas, no_failures
from tokentwin.planning.diagnose.lifted_costs import (
    FreePrefill,
    NoCpuTime,
    repriced,
    with_half_the_kv,
    with_parts,
    without_launches,
)
from tokentwin.planning.diagnose.recorded_run import another_run
from tokentwin.planning.diagnose.symptoms import attainable_hit_rate, symptoms
from tokentwin.planning.diagnose.verdict import troubled
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.planning.repricing import Source
from tokentwin.serving.answers.figures import shown_time
from tokentwin.serving.answers.report import Line, Table
from tokentwin.serving.cost_model import CostModel, TokenCost
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import simulate_to
from tokentwin.sim.fleet import alike_pools
from tokentwin.traces.metrics.run_metrics import RunMetrics, unserved_ns
from tokentwin.traces.recording import Recording

CAUSES = {
    runs.kv_starved: ("infinite KV memory", "capacity", "full KV memory"),
    runs.prefill_bound: ("free prefill", "capacity", "prompts take the device"),
    runs.cpu_bound: ("no CPU time between steps", "policy", "time between steps"),
    runs.overloaded: ("one more replica", "capacity", "overload"),
    runs.bursty: ("even arrivals", "capacity", "bursty arrivals"),
    runs.few_places: ("more running requests", "policy", "max_num_seqs reached"),
    runs.evicted_prefixes: ("perfect prefix reuse", "capacity", "missed prefixes"),
    runs.uneven_routing: ("routing by load", "policy", "uneven replicas"),
    runs.long_prompts_block: ("smaller chunks", "policy", "prompts take the device"),
}


@pytest.mark.parametrize("made", CAUSES, ids=lambda made: made.__name__)
def test_the_cause_that_was_built_in_comes_first(made) -> None:
    cause, kind, symptom = CAUSES[made]
    found = diagnosis_of(made, "itl_ms") if made is runs.long_prompts_block else diagnosis_of(made)
    assert (found.cause, found.kind) == (cause, kind)
    assert found.blamed is not None and found.verdict.startswith(f"a {kind} problem: ")
    assert found.blamed.cause in found.verdict
    assert next(iter(found.report())) == Line(found.finding(), "headline")
    assert found.twin_error == pytest.approx(0, abs=1e-9)  # it is the twin's own run
    assert found.symptoms[0].name == symptom


@pytest.mark.parametrize("made", CAUSES, ids=lambda made: made.__name__)
def test_without_a_cost_model_the_evidence_points_the_same_way(made, tmp_path: Path) -> None:
    found = diagnosed(made(), tmp_path / "run", explain=False)
    assert found.symptoms[0].name == CAUSES[made][2] and not found.counterfactuals and found.kind is None
    assert found.verdict.startswith("symptoms only, without a cost model")
    assert all(s.evidence and s.proof and 0 < s.severity <= 1 for s in found.symptoms)


def test_nothing_is_wrong_with_a_calm_run() -> None:
    found = diagnosis_of(runs.calm)
    assert found.cause is None and [s.name for s in found.symptoms] == ["low utilisation"]
    assert found.verdict.startswith("no problem found (low utilisation: ")


def test_an_idle_engine_whose_blocks_are_half_empty_is_well(tmp_path: Path) -> None:
    """Nobody waits for what half-empty last blocks waste of memory that is free."""
    calm = runs.calm()
    offered = requests(arrivals(200, 0.5), 20, 10)
    found = diagnosed(replace(calm, workload=offered), tmp_path / "run")
    evidence = Evidence(Recording.load(tmp_path / "run"))
    assert (evidence.metrics.internal_fragmentation() or 0.0) > 0.1
    assert [s.name for s in found.symptoms] == ["low utilisation"] and not troubled(found) and found.kind is None


def test_what_could_not_be_tried_leaves_an_area_open() -> None:
    """A cost model without parts cannot read half the weights; that free prefill buys little answers nothing."""
    (line,) = diagnosis_of(runs.cpu_bound).shown_areas()
    assert "model not known" in line.text and re.search(r": kernels \d+ % \(no CPU time between steps\), ", line.text)


def keeps_up(scenario: PricedScenario, replicas: int) -> bool:
    saturation = RunMetrics(replace(scenario, replicas=replicas).requests()).saturation
    return saturation is not None and saturation.verdict == "STABLE"


@pytest.mark.parametrize("rate", [13, 24, 45])
def test_an_overload_names_the_fewest_replicas_that_keep_up(rate: int, tmp_path: Path) -> None:
    """One replica serves about 9 requests a second. A bound that the larger fleet breaks is still broken."""
    made = replace(runs.overloaded(), workload=requests(arrivals(40 * rate, rate), 20, 100))
    found = diagnosed(made, tmp_path / "run")
    fewest = next(replicas for replicas in range(1, 10) if keeps_up(made, replicas))
    assert fewest == {13: 2, 24: 3, 45: 6}[rate]
    assert found.best is not None and found.best.settings == {"replicas": fewest} and found.best.mends
    assert found.kind == "capacity" and found.cause == found.best.name == found.changes[0].name
    assert found.arrival_rate == pytest.approx(rate, rel=0.1) and found.served_rate == pytest.approx(9, rel=0.3)
    assert "more GPUs do not help" not in [symptom.name for symptom in found.symptoms]
    assert "the run keeps up" in found.finding() and "still broken" not in found.finding({"e2e_ms": 60_000})
    assert found.finding({"tpot_ms": 0.1}).endswith(f"still broken: TPOT {shown_time(found.best.p99['tpot_ms'])}")


def test_a_setting_that_does_not_mend_an_overload_alone_takes_fewer_replicas_with_it(tmp_path: Path) -> None:
    """Two requests run at once, where one replica would serve 60 of 120 requests a second with more."""
    scheduler = SchedulerConfig(**runs.ROOMY | {"max_num_seqs": 2})
    crowd = requests(arrivals(1200, 120), 20, 20)
    made = PricedScenario(crowd, Deployment(scheduler=scheduler), TokenCost(10 * MS, 400_000, 0))
    found = diagnosed(made, tmp_path / "run")
    best = found.best
    assert found.cause == "more running requests" and best is not None and best.mends
    places, more = best.settings["max_num_seqs"], best.settings["replicas"]
    wide = replace(made, deployment=made.deployment.rescheduled(max_num_seqs=places))
    assert keeps_up(wide, more) and not keeps_up(wide, more - 1)
    alone = next(change for change in found.changes if change.settings.keys() == {"replicas"} and change.mends)
    assert (best.gpus or 0) < (alone.gpus or 0)
    words = shlex.split(found.command(best))
    assert f"max_num_seqs={places}" in words and f"replicas={more}" in words


def test_a_run_that_ends_before_its_answers_is_no_overload(tmp_path: Path) -> None:
    """The backlog of any fleet grows while requests arrive that take longer than all arrivals."""
    slow = PricedScenario(requests(arrivals(100, 50), 20, 200), runs.overloaded().deployment, TokenCost(50 * MS, 1, 0))
    found = diagnosed(slow, tmp_path / "run")
    (overload,) = (symptom for symptom in found.symptoms if symptom.name == "overload")
    assert overload.refuted and overload == found.symptoms[-1] and "too short to tell" in overload.outcome
    assert found.served_rate is None and found.kind is None


@pytest.mark.parametrize("made", [*CAUSES, runs.shed, runs.failing, runs.calm], ids=lambda made: made.__name__)
def test_no_row_contradicts_another(made) -> None:
    """A symptom whose lift gains nothing is no cause, and is not in the table of symptoms."""
    found = diagnosis_of(made)
    gains = {lift.name: lift for lift in found.tried}
    for symptom in found.symptoms:
        lifts = [gains[name] for name in symptom.lifts if name in gains]
        if lifts:
            most = max(lift.gain(name) for lift in lifts for name in (found.metric, symptom.metric))
            assert symptom.refuted == (most < 0.1) and any(lift.name in symptom.outcome for lift in lifts)
    shown = [row[0] for part in found.shown_symptoms() if isinstance(part, Table) for row in part.rows]
    assert shown == [symptom.name for symptom in found.symptoms if not symptom.refuted]
    likely = [symptom.name for symptom in found.symptoms if symptom.refuted]
    assert found.kind is None or not likely or found.verdict.count(likely[0]) == 0


def test_full_memory_that_is_no_cause_is_not_called_one(tmp_path: Path) -> None:
    """Memory is full because requests pile up behind a device that is busy with prompts."""
    scheduler = SchedulerConfig(**runs.ROOMY | {"num_blocks": 400, "max_num_seqs": 256})
    made = replace(runs.overloaded(), deployment=Deployment(scheduler=scheduler))
    found = diagnosed(replace(made, workload=requests(arrivals(500, 22), 150, 30)), tmp_path / "run")
    (full,) = (symptom for symptom in found.symptoms if symptom.name == "full KV memory")
    assert full.refuted and "infinite KV memory" in full.outcome
    assert found.best is not None and found.best.mends and "replica" in found.best.name
    notes = [part.text for part in found.shown_symptoms() if isinstance(part, Line)]
    assert any(note.startswith("seen, but no cause: full KV memory (") for note in notes)


def test_a_healthy_run_on_a_large_gpu_lacks_nothing(tmp_path: Path) -> None:
    """As in README: 2 requests a second, 1.5 in a step. Faster is possible, but nothing is wrong."""
    traffic = requests(arrivals(200, 2), 80, 20)
    dep = Deployment.model_validate({"model": "Qwen3-32B", "device": "cuda", "gpu_memory_utilization": 0.9})
    made = price_scenario(traffic, None, "H200", dep)
    evidence = Evidence(runs.recorded(made, tmp_path / "run"), peak=find_gpu("H200"))
    found = diagnose(symptoms(evidence), evidence.metrics, made, source=Source(None, "H200"))
    assert found.kind is None and found.verdict.startswith("no problem found (small batches: ")
    assert all(symptom.name in ("small batches", "low utilisation") for symptom in found.symptoms)
    lines = [part.text for part in found.report() if isinstance(part, Line)]
    assert not any("Yes:" in line or "No:" in line or "capacity problem" in line for line in lines)


def test_other_fleets_are_tried_of_those_that_prefill_and_those_that_decode() -> None:
    """Each role alone, and another split of as many; twice the same is tried once."""
    pools = [{"name": role, "role": role, "replicas": count} for role, count in (("prefill", 1), ("decode", 3))]
    made = replace(runs.calm(), deployment=Deployment(fleet=FleetConfig.model_validate({"pools": pools})))
    tried = [settings["fleet.pools"] for settings in changes(made, "more prefill replicas")]
    counts = [tuple(pool.get("replicas", 1) for pool in kept) for kept in tried]
    assert counts == [(2, 2), (2, 3), (1, 4)]


@pytest.mark.parametrize(("link", "helps"), [({"link": "ethernet-25", "latency_us": 50}, True), ({}, False)])
def test_a_faster_link_is_offered_to_engines_that_cross_a_slow_one(link: dict[str, object], helps: bool) -> None:
    made = {"pipeline_parallel_size": 2, "inter_node": {"gpus_per_node": 1, **link}}
    calm = replace(runs.calm(), deployment=Deployment.model_validate(made))
    for cause in ("free communication", "no pipeline bubbles"):
        assert ({"inter_node": {"gpus_per_node": 1, "link": "infiniband-ndr"}} in changes(calm, cause)) == helps
    within = replace(calm, deployment=calm.deployment.model_copy(update={"pipeline_parallel_size": 1}))
    assert not any("inter_node" in settings for settings in changes(within, "free communication"))


def test_replicas_come_sooner_by_more_of_them_or_quicker_starts() -> None:
    scaler = {"target": 2, "max_replicas": 6, "cold_start_s": 40}
    fleet = FleetConfig.model_validate({"pools": [{"replicas": 2}], "autoscaler": scaler})
    tried = changes(replace(runs.calm(), deployment=Deployment(fleet=fleet)), "new replicas at once")
    scalers = [settings["fleet.autoscaler"] for settings in tried]
    assert [one.get("min_replicas", 1) for one in scalers] == [4, 6, 1]
    assert [one["cold_start_s"] for one in scalers] == [40, 40, 10]
    assert [settings.get("fleet.pools") for settings in tried] == [[{"replicas": 4}], [{"replicas": 6}], None]


def test_more_gpus_that_do_not_help_are_a_symptom() -> None:
    """One more replica does nothing for steps that wait for the CPU."""
    found = diagnosis_of(runs.cpu_bound)
    assert "more GPUs do not help" in [s.name for s in found.symptoms]


def test_a_bound_decides_what_is_high(tmp_path: Path) -> None:
    recording = runs.recorded(runs.calm(), tmp_path / "run")
    assert not {"high TTFT", "high ITL"} & {s.name for s in symptoms(Evidence(recording))}
    strict = Evidence(recording, {"ttft_ms": 6, "tpot_ms": 5})
    shares = {s.name: s.severity for s in symptoms(strict)}
    for name, latency, bound in (("high TTFT", "ttft_ms", 6), ("high ITL", "tpot_ms", 5)):
        assert shares[name] == (strict.metrics.values(latency) > bound).mean() > 0


def test_a_recording_without_steps_still_shows_its_queue(tmp_path: Path) -> None:
    s = runs.few_places()
    simulate_to(tmp_path / "run", s.workload, s.deployment, s.cost, steps=False)
    evidence = Evidence(Recording.load(tmp_path / "run"))
    assert not evidence.has_steps and "high TTFT" in [symptom.name for symptom in symptoms(evidence)]


def test_a_log_of_a_host_that_launches_while_steps_run_needs_no_cost_model(tmp_path: Path) -> None:
    recording = runs.recorded(runs.calm(), tmp_path / "run")
    for share in (0.1, 0.4):
        add_notes(recording.path, launching_share=share)
        found = {s.name: s.evidence for s in symptoms(Evidence(Recording.load(recording.path)))}
        assert ("launch-bound steps" in found) == (share == 0.4)
    assert found["launch-bound steps"] == "40 % of the steps' time goes into launching kernels"


# Where requests come to nothing


def finished_share(scenario: PricedScenario, out: Path) -> float:
    return float(RunMetrics.from_recording(runs.recorded(scenario, out)).finished.mean())


def test_where_requests_are_shed_it_is_judged_how_many_finish(tmp_path: Path) -> None:
    made, found = runs.shed(), diagnosis_of(runs.shed)
    before, after = finished_share(made, tmp_path / "again"), finished_share(more_places(made), tmp_path / "more")
    assert 0.1 < before < 0.6 and after > before + 0.3
    assert (found.cause, found.kind, found.metric) == ("more running requests", "policy", FINISHED)
    cause = found.blamed
    assert cause is not None and cause.finished == pytest.approx(after, abs=1e-11)
    assert found.recorded_finished == found.simulated_finished == pytest.approx(before)
    assert cause.bought[FINISHED] == pytest.approx((after - before) / (1 - before))
    assert found.verdict.startswith("a policy problem: max_num_seqs is too small (with more running requests ")
    assert f"of the requests would finish instead of {100 * before:.1f} %" in found.verdict
    best = found.best
    assert best is not None and best.mends and (best.finished or 0) > 0.99
    assert found.twin_error == 0


def test_every_claim_of_a_shed_run_is_what_simulating_it_gives() -> None:
    """Shares and p99 of those that finish, of every lift that was tried."""
    made, found = runs.shed(), diagnosis_of(runs.shed)
    for c in found.counterfactuals:
        lifted = LIFTS[c.name].apply(made) if c.name in LIFTS else more_replicas(made, 4)
        assert isinstance(lifted, str) == bool(c.skipped)
        if isinstance(lifted, PricedScenario):
            metrics = RunMetrics(lifted.requests())
            assert c.finished == pytest.approx(metrics.finished.mean(), abs=1e-11)
            for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
                assert c.p99[name] == pytest.approx(metrics.distribution(name).p99, rel=1e-11)
    told = found.dumps()
    assert "inf %" not in told and not any("inf" in symptom.evidence for symptom in found.symptoms)


def test_requests_that_no_lift_could_save_are_left_out(tmp_path: Path) -> None:
    """One in ten is longer than max_model_len; what the others wait for is explained all the same."""
    few = runs.few_places()
    offered = [replace(r, prompt=(("", 5000),)) if r.id % 10 == 0 else r for r in few.workload.requests]
    found = diagnosed(replace(few, workload=replace(few.workload, requests=offered)), tmp_path / "run")
    assert found.recorded_finished == found.simulated_finished == 0.9 and found.metric != FINISHED
    assert found.cause == "more running requests"


def test_what_nothing_that_is_tried_saves_stays_unexplained(tmp_path: Path) -> None:
    """Users who leave before most answers can be written, however little else there is to do."""
    made = runs.shed()
    patience = {"distribution": "constant", "mean_s": 0.5, "until": "finish"}
    fleet = FleetConfig.model_validate({"admission": {"patience": patience}})
    roomy = made.deployment.scheduler.model_copy(update={"max_num_seqs": 64})
    dep = made.deployment.model_copy(update={"fleet": fleet, "scheduler": roomy})
    found = diagnosed(replace(made, deployment=dep), tmp_path / "run")
    assert found.metric == FINISHED and found.recorded_finished < 0.9 and found.cause is None
    assert found.verdict.startswith("unexplained: no lifted constraint lets a tenth of the lost requests finish; ")


# What only a simulation shows


@pytest.mark.parametrize(("places", "hides"), [(1, True), (8, False)])
def test_a_benchmark_that_hides_a_queue_is_told(places: int, hides: bool, tmp_path: Path) -> None:
    """A user who waits for each answer never queues; as many requests a second that come by themselves need places."""
    made = replace(requests(arrivals(100, 10), 60, 20), concurrency=1)
    scheduler = SchedulerConfig(**runs.ROOMY | {"max_num_seqs": places})
    found = diagnosed(
        PricedScenario(made, Deployment(scheduler=scheduler), TokenCost(10 * MS, 1000, 0)), tmp_path / "run"
    )
    told = [symptom for symptom in found.symptoms if symptom.name == "good benchmark, poor product"]
    assert len(told) == hides and all(symptom.lifecycle == "request" for symptom in told)
    assert not troubled(found) and found.kind is None


# Failures


def test_an_outage_is_found_and_blamed(tmp_path: Path) -> None:
    made = runs.failing()
    recording = runs.recorded(made, tmp_path / "recorded")
    found = diagnosed(made, tmp_path / "run")
    (symptom,) = (symptom for symptom in found.symptoms if symptom.name == "replicas fail")
    outage = 20e9 / recording.run["duration_ns"]
    ready = 3 * (1 - outage)
    assert symptom.evidence == (
        f"3 crashes; {ready:.3g} replicas were ready on average, 3 at the start, "
        f"and none for {100 * outage:.1f} % of the run"
    )
    assert (found.cause, found.kind) == ("no failures", "capacity")
    spared = no_failures(made)
    assert isinstance(spared, PricedScenario)
    p99 = RunMetrics(spared.requests()).distribution("e2e_ms").p99
    assert found.blamed is not None and found.blamed.p99["e2e_ms"] == pytest.approx(p99, rel=1e-11)
    assert found.verdict.startswith("a capacity problem: replicas or links fail (with no failures the p99 of")


def test_crashes_that_cost_nothing_are_no_symptom_and_no_lift(tmp_path: Path) -> None:
    made = runs.failing()
    assert made.deployment.fleet is not None
    crash = {"at_s": 20, "replica": 0, "recovery_s": 0.1}
    fleet = FleetConfig.model_validate(made.deployment.fleet.model_dump() | {"failures": {"crashes": [crash]}})
    once = replace(made, deployment=made.deployment.model_copy(update={"fleet": fleet}))
    names = [symptom.name for symptom in symptoms(Evidence(runs.recorded(once, tmp_path / "run")))]
    assert "replicas fail" not in names
    assert isinstance(no_failures(once), PricedScenario) and no_failures(runs.calm()) == "nothing fails"
    assert no_failures(runs.shed()) == "nothing fails"


def test_an_outage_of_one_pool_is_one(tmp_path: Path) -> None:
    """Ten seconds of ten in one pool of two, then it is up again; time before it was first ready is none."""
    lives = [
        {"replica": 0, "pool": "a", "gpus": 1, "started_ns": 0, "ready_ns": 5, "ended_ns": 10, "ended_by": "crash"},
        {"replica": 1, "pool": "a", "gpus": 1, "started_ns": 10, "ready_ns": 30, "ended_ns": 40, "ended_by": "crash"},
    ]
    assert unserved_ns(lives, 100) == 20 + 60
    assert unserved_ns(lives[:1], 8) == 0 and unserved_ns([], 8) == 0


# Too little to tell


def one_token(count: int) -> PricedScenario:
    return replace(runs.calm(), workload=requests(arrivals(count, 5), 100, 1))


def test_outputs_of_one_token_have_no_tpot(tmp_path: Path) -> None:
    found = diagnosed(one_token(100), tmp_path / "run")
    assert set(found.simulated_p99) == set(found.recorded_p99) == {"ttft_ms", "e2e_ms"}
    assert all(set(c.p99) == {"ttft_ms", "e2e_ms"} for c in found.counterfactuals if not c.skipped)
    with pytest.raises(UserError, match="metric: 'tpot_ms': has no value in this run"):
        diagnosed(one_token(100), tmp_path / "again", judged="tpot_ms")


@pytest.mark.parametrize(("count", "kind"), [(19, None), (20, "policy")])
def test_a_handful_of_requests_makes_no_verdict(count: int, kind: str | None, tmp_path: Path) -> None:
    few = runs.few_places()
    few = replace(few, workload=requests(arrivals(count, 50), 60, 80))
    found = diagnosed(few, tmp_path / "run")
    assert found.kind == kind and found.cause == "more running requests"
    says = "a policy problem: " if kind else "too few requests for a verdict (19 of at least 20); still, with max_"
    assert found.verdict.startswith(says)
    assert "more GPUs do not help" not in [symptom.name for symptom in found.symptoms] or kind


def test_idleness_alone_is_no_problem(tmp_path: Path) -> None:
    """Prompts are most of a calm run's latency, and that is no trouble."""
    calm = replace(runs.calm(), cost=TokenCost(5 * MS, 100_000, 0))
    found = diagnosed(calm, tmp_path / "run", judged="ttft_ms")
    assert [symptom.name for symptom in found.symptoms] == ["low utilisation"]
    assert found.cause == "free prefill" and found.kind is None
    assert found.verdict.startswith("no problem found (low utilisation: ")


def test_uneven_gaps_are_a_problem_if_a_setting_mends_them_or_an_slo_bounds_them() -> None:
    found = diagnosis_of(runs.long_prompts_block, "itl_ms")
    gaps = [symptom for symptom in found.symptoms if symptom.name == "high ITL"]
    alone = found.model_copy(update={"symptoms": gaps})
    costly = [tried.model_copy(update={"bought": tried.bought | {"ttft_ms": -0.3}}) for tried in found.counterfactuals]
    traded = alone.model_copy(update={"counterfactuals": costly})
    bounded = traded.model_copy(
        update={"symptoms": [symptom.model_copy(update={"metric": "tpot_ms"}) for symptom in gaps]}
    )
    assert gaps and [troubled(known) for known in (alone, traded, bounded)] == [True, False, True]


# Lifted costs


def decodes(contexts: list[int]) -> StepPlan:
    plan = StepPlan(0, DecodeSet(16), 0)
    plan.add_decodes(len(contexts), sum(contexts), sum(c * c for c in contexts))
    return plan


def step_cost(**changes: int) -> StepCost:
    prices = {"launch": 3_000_001, "decode_rows_padded": 7_003, "decode_context": 1_009, "prefill_rows": 17}
    prices |= {"prefill_tokens": 99_991, "prefill_context": 333, "prefill_pairs": 11, "sampling": 5, "sampled_rows": 13}
    cpu = {"plan": 2_000_003, "rows": 10_007, "prefill_tokens": 31}
    return StepCost(Calibration("id", "", {}, "", "", prices | changes, cpu, {}, {}, {}, 1))


def operation_cost() -> OperationCost:
    return OperationCost(LLAMA, deployment(), Roofline(), host=HostTimes(1e6, 3e3))


COSTS = {"token": TokenCost(5 * MS, 1001, 457, plan_ns=3 * MS), "step": step_cost(), "operation": operation_cost()}
LIFTED = {
    "free prefill": FreePrefill,
    "no CPU": NoCpuTime,
    "both": lambda cost: NoCpuTime(FreePrefill(cost)),
    "KV reads": lambda cost: with_half_the_kv(cost) or cost,
    "launches": lambda cost: without_launches(cost) or cost,
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("lifted", LIFTED.values(), ids=LIFTED)
@examples(0.2)
@given(contexts=st.lists(st.integers(1, 2000), min_size=1, max_size=8), steps=st.integers(1, 40))
def test_a_leap_costs_what_stepping_does(cost: CostModel, lifted, contexts: list[int], steps: int) -> None:
    model = lifted(cost)
    plan = decodes(contexts)
    leap = list(model.decode_run_ns(len(contexts), plan.decode_context, plan.decode_squares, steps))
    stepped = [decodes([c + k for c in contexts]) for k in range(steps)]
    assert leap == [model.cpu_ns(p) + model.step_ns(p) for p in stepped]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_what_is_lifted_is_gone_and_the_rest_is_as_before(cost: CostModel) -> None:
    mixed, alone = decodes([100, 200]), decodes([100, 200])
    mixed.prefill_rows, mixed.prefill_tokens, mixed.prefill_pairs = 1, 500, 125_250
    mixed.sampled_rows += 1
    free = FreePrefill(cost)
    assert (free.cpu_ns(mixed), free.step_ns(mixed)) == (cost.cpu_ns(alone), cost.step_ns(alone))
    only = StepPlan(0, DecodeSet(16), 0)
    only.prefill_rows, only.prefill_tokens = 1, 500
    assert free.cpu_ns(only) == free.step_ns(only) == 0
    assert NoCpuTime(cost).cpu_ns(mixed) == 0 and NoCpuTime(cost).step_ns(mixed) == cost.step_ns(mixed)


def test_each_cost_model_says_what_kv_has_to_do_with_it() -> None:
    plan = decodes([4000] * 64)
    for cost in (COSTS["step"], COSTS["operation"]):
        half = with_half_the_kv(cost)
        assert half is not None and 0.5 < half.step_ns(plan) / cost.step_ns(plan) < 0.95
        assert half.cpu_ns(plan) == cost.cpu_ns(plan)
    assert with_half_the_kv(COSTS["token"]) is None
    assert with_parts(COSTS["step"], 0.0, "weights") is None and without_launches(COSTS["token"]) is None


@pytest.mark.parametrize("part", ["weights", "decode attention", "collectives", "elementwise"])
def test_a_part_that_is_lifted_takes_its_time_with_it(part: str) -> None:
    cost = OperationCost(LLAMA, deployment(tensor_parallel_size=2), Roofline())
    sizes = stacked([uniform_step(64, 4000, 0, 0, 0)])
    lifted = with_parts(cost, 0.0, part)
    assert isinstance(lifted, OperationCost)
    before, after = cost.parts(sizes), lifted.parts(sizes)
    assert before[part] > 0 and after[part] == 0
    assert all(after[name] == before[name] for name in before if name != part)
    assert lifted.step_ns(decodes([4000] * 64)) < cost.step_ns(decodes([4000] * 64))


def test_a_model_of_operations_is_priced_for_as_many_rows_as_may_run() -> None:
    wide = more_places(PricedScenario(Workload([]), deployment(), operation_cost()))
    rows = wide.deployment.scheduler.max_num_seqs
    assert rows == 512
    exact = OperationCost(LLAMA, wide.deployment, Roofline(), host=HostTimes(1e6, 3e3))
    assert wide.all_pools[0].cost.step_ns(decodes([10] * rows)) == exact.step_ns(decodes([10] * rows))
    assert repriced(COSTS["token"], wide.deployment) is COSTS["token"]


# Lifts


def test_infinite_kv_never_preempts() -> None:
    before = runs.kv_starved()
    assert sum(before.requests()["preemptions"].to_pylist()) > 100
    assert sum(infinite_kv(before).requests()["preemptions"].to_pylist()) == 0


def test_uneven_experts_by_chance_are_those_of_a_mean_step(tmp_path: Path) -> None:
    split = {"tensor_parallel_size": 8, "enable_expert_parallel": True, "expert_imbalance": "random"}
    dep = Deployment.model_validate({**runs.calm().deployment.model_dump(), "model": "Qwen3-30B-A3B", **split})
    evidence = Evidence(runs.recorded(replace(runs.calm(), deployment=dep), tmp_path / "run"))
    tokens = evidence.metrics.step_mean("batch_tokens")
    assert evidence.expert_imbalance == pytest.approx(random_imbalance(128, 8, 8, tokens)) and tokens
    assert evidence.expert_imbalance > 1.1 and isinstance(
        LIFTS["even experts"].apply(replace(runs.calm(), deployment=dep)), PricedScenario
    )


def test_each_pool_is_explained_by_its_own_model(tmp_path: Path) -> None:
    """One device sends nothing to others, four of another GPU do: between what each would be alone."""
    shares = {}
    wide = {"name": "wide", "gpu": "L40S", "deployment": {"tensor_parallel_size": 4}}
    for name, pools in {"both": [{"name": "one"}, wide], "one": [{"name": "one"}], "wide": [wide]}.items():
        dep = Deployment.model_validate({"model": "Llama-3.1-8B", "device": "cuda", "fleet": {"pools": pools}})
        made = price_scenario(requests(arrivals(40, 4), 300, 20), None, "H100", dep)
        simulate_to(
            tmp_path / name, made.workload, made.deployment, made.cost, fleet=made.routed_fleet, pools=made.pools
        )
        evidence = Evidence(Recording.load(tmp_path / name))
        evidence.explain_by(made)
        assert sum(evidence.parts.values()) == pytest.approx(1)
        shares[name] = evidence.parts.get("collectives", 0.0)
    assert shares["one"] == 0 < shares["both"] < shares["wide"]


@pytest.mark.parametrize(("gib", "missed"), [(0.01, True), (10.0, False)])
def test_prefixes_that_a_tier_kept_are_not_missed(gib: float, missed: bool, tmp_path: Path) -> None:
    made = runs.evicted_prefixes()
    tier = {"name": "cpu", "capacity_gib": gib, "read_gb_s": 1000, "write_gb_s": 1000}
    tiers = {"tiers": [tier], "kv_bytes_per_token": 100_000}
    dep = Deployment.model_validate(made.deployment.model_dump() | {"kv_tiers": tiers})
    evidence = Evidence(runs.recorded(replace(made, deployment=dep), tmp_path / "run"))
    assert ("missed prefixes" in [symptom.name for symptom in symptoms(evidence)]) == missed
    hits = [sum(dict(held or ()).values()) for held in evidence._recording.requests["tier_hit_tokens"].to_pylist()]
    assert evidence.tier_loads[0] == pytest.approx(sum(hits) / len(hits) * 100_000 / 1000 / 1e6)


def test_a_fleet_whose_prefills_are_apart_grows_by_one_of_each_role() -> None:
    base = runs.overloaded()
    named = (("p", "prefill", 1), ("spare", "prefill", 2), ("d", "decode", 3))
    pools = [{"name": name, "role": role, "replicas": replicas} for name, role, replicas in named]
    fleet = FleetConfig.model_validate({"pools": pools, "links": {"kv_bytes_per_token": 1000}})
    dep = base.deployment.model_copy(update={"fleet": fleet})
    grown = more_replicas(
        PricedScenario(base.workload, dep, base.cost, pools=tuple(alike_pools(fleet, dep, base.cost)))
    )
    assert isinstance(grown, PricedScenario) and grown.deployment.fleet is not None and grown.pools is not None
    assert [pool.replicas for pool in grown.deployment.fleet.pools] == [2, 2, 4]
    assert [pool.config for pool in grown.pools] == list(grown.deployment.fleet.pools)


def test_a_fleet_grows_by_one_in_its_first_pool() -> None:
    base = runs.calm()
    fleet = FleetConfig.model_validate({"pools": [{"name": "a", "replicas": 2}, {"name": "b"}]})
    dep = base.deployment.model_copy(update={"fleet": fleet})
    scenario = PricedScenario(base.workload, dep, base.cost, pools=tuple(alike_pools(fleet, dep, base.cost)))
    grown = more_replicas(scenario)
    assert isinstance(grown, PricedScenario) and (scenario.engines, grown.engines) == (3, 4)
    assert grown.pools is not None and grown.pools[0].config.replicas == 3
    assert len(set(grown.requests()["replica"].to_pylist())) == 4


def test_dispersion_is_that_of_the_process() -> None:
    def index(at: list[int]) -> float:
        return dispersion([WorkloadRequest(i, t, (("", 1),), 1) for i, t in enumerate(at)])

    assert index(list(range(0, 10**6, 100))) == pytest.approx(0, abs=0.01)
    assert index(arrivals(20_000, 10)) == pytest.approx(1, abs=0.15)
    assert index([S * (i // 40) for i in range(4000)]) > 5
    assert index([5]) == 1


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(1, 4)), max_size=3), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_attainable_hits_are_those_of_an_endless_trie_of_tokens(made) -> None:
    """Against the tokens themselves: prompts of segments, some followed by the answer of the request before."""
    offered = []
    for i, (segments, follows) in enumerate(made):
        history = (*offered[-1].prompt, (f"out:{i - 1}", 2)) if follows and offered else ()
        offered.append(WorkloadRequest(i, i, (*history, *segments, (f"own{i}", 1)), 2))
    seen: set[tuple] = set()
    hits = tokens = 0
    for request in offered:
        parts = [
            (name, j) if name else ("private", request.id, at, j)
            for at, (name, count) in enumerate(request.prompt)
            for j in range(count)
        ]
        tokens += len(parts)
        prefixes = [tuple(parts[:n]) for n in range(1, len(parts) + 1)]
        public = next((at for at, part in enumerate(parts) if part[0] == "private"), len(parts))
        hits += sum(prefix in seen for prefix in prefixes[:public])
        answer = [(f"out:{request.id}", j) for j in range(2)]
        seen |= {tuple((parts + answer)[:n]) for n in range(1, len(parts) + 3)}
    assert attainable_hit_rate(offered) == pytest.approx(hits / tokens)


# The command


def run(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two places, by an invented calibration."""
    folder = tmp_path_factory.mktemp("diagnose")
    calibrated(folder / "calibration")
    from tokentwin.traces.formats.parquet import write_parquet

    write_parquet(requests(arrivals(120, 4), 60, 80), folder / "t.parquet")
    run(
        "simulate",
        folder / "t.parquet",
        "-c",
        folder / "calibration",
        "--max-num-seqs",
        2,
        "-o",
        folder / "run",
        "--no-band",
    )
    return folder


def test_the_command_explains_a_recording(slow_run: Path) -> None:
    told = json.loads(run("diagnose", slow_run / "run", "-c", slow_run / "calibration", "--format", "json").output)
    assert told["cause"] == "more running requests" and told["kind"] == "policy"
    assert told["twin_error"] == pytest.approx(0) and told["metric"] == "ttft_ms"
    tried = {c["name"]: c for c in told["counterfactuals"]}
    assert tried["more running requests"]["bought"]["ttft_ms"] > 0.9 and tried["routing by load"]["skipped"]
    shown = run("diagnose", slow_run / "run", "-c", slow_run / "calibration", "--metric", "e2e").output
    assert "p99 of E2E" in shown and "more running requests" in shown


def test_the_command_that_is_recommended_works_when_it_is_pasted(slow_run: Path) -> None:
    """A setting, and one more replica; B wins as it was said to."""
    timed = ("-c", slow_run / "calibration", "--max-num-seqs", 1, "--no-band")
    run("simulate", slow_run / "t.parquet", *timed, "--replicas", 2, "-o", slow_run / "two")
    for recording in (slow_run / "run", slow_run / "two"):
        arguments = ("diagnose", recording, "-c", slow_run / "calibration", "--format", "json")
        told = DiagnosisDocument.read(json.loads(run(*arguments).output))
        assert told.changes and not any(change.ideal for change in told.changes)
        assert "max_num_seqs is too small" in told.verdict and "; with max_num_seqs=" in told.verdict
        best, left = told.best, told.best and told.best.p99[told.metric]
        assert best is not None and left is not None and shown_time(left) in told.remains()
        assert told.remains({told.metric: left + 1}) == "every p99 is then within its SLO"
        assert told.remains({told.metric: left - 1}).startswith("still broken: ")
        assert any(c.ideal for c in told.counterfactuals) and {c.called[-1] for c in told.counterfactuals} > {"*"}
        for change in told.changes:
            words = shlex.split(told.command(change))
            assert words[0] == "tokentwin"
            shown = run(*words[1:], "--format", "json")
            rows = {(row["metric"], row["stat"]): row for row in json.loads(shown.output)["rows"]}
            row = rows[told.metric, "mean"]
            assert row["better"] == "B" and row["b"] < 0.5 * row["a"]


def test_what_buys_nothing_is_not_recommended_unless_it_spares_gpus(tmp_path: Path) -> None:
    """One user of a small model waits for launches, on one GPU as on eight."""
    lengths = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 20}}
    traffic = {"requests": 30, "arrivals": {"kind": "closed", "concurrency": 1}, **lengths}
    (tmp_path / "t.yaml").write_text(json.dumps(traffic))
    for tp, told in ((1, "no problem found"), (8, "with tensor_parallel_size=4 the p99 of")):
        options = ("--model", "Qwen3-0.6B", "--tensor-parallel-size", tp, "--no-band")
        run("simulate", tmp_path / "t.yaml", "--gpu", "H100", *options, "-o", tmp_path / str(tp))
        shown = " ".join(run("diagnose", tmp_path / str(tp), "--gpu", "H100").output.split())
        assert told in shown and ("on 4 fewer GPUs" in shown) == ("tokentwin compare" in shown) == (tp == 8)


@pytest.fixture(scope="module")
def routed(slow_run: Path) -> Path:
    """Three replicas that a router chooses among by what they have to do."""
    options = ("-c", slow_run / "calibration", "--max-num-seqs", 2, "--no-band")
    run("simulate", slow_run / "t.parquet", *options, "--replicas", 3, "--router", "least-tokens", "-o", slow_run / "3")
    return slow_run / "3"


def test_a_simulated_fleet_is_simulated_again_as_it_was(routed: Path) -> None:
    told = json.loads(run("diagnose", routed, "-c", routed.parent / "calibration", "--format", "json").output)
    assert told["simulated_p99"] == told["recorded_p99"] and told["warning"] is None
    assert "least-tokens already balances loads" in json.dumps(told["counterfactuals"])


def test_a_simulated_run_that_comes_out_otherwise_is_warned_of(routed: Path, tmp_path: Path) -> None:
    arguments = ("diagnose", routed, "-c", routed.parent / "calibration")
    shown = run(*arguments, "--router", "random").output
    assert "its router, policy or cost model has changed" in shown
    assert "otherwise" not in run(*arguments).output
    recording = Recording.load(routed)
    found = DiagnosisDocument.read(json.loads(run(*arguments, "--format", "json").output))
    assert another_run(recording, recording.run["calibration"], recording.requests, found) is None
    last = recording.requests.num_rows - 1
    late = recording.requests["finish_ns"].to_pylist()
    late[last] += 1
    requests = recording.requests.set_column(
        recording.requests.schema.get_field_index("finish_ns"), "finish_ns", pa.array(late)
    )
    told = another_run(recording, "fedcba", requests, found)
    assert told is not None and "1 of 120 requests" in told and "timed by invented, and here by fedcba" in told


@pytest.mark.parametrize(
    ("bought", "worth"),
    [
        ({"itl_ms": 0.7, "ttft_ms": 0.2}, 0.7),
        ({"itl_ms": 0.7, "ttft_ms": -0.5}, 0.7),
        ({"itl_ms": 0.7, "ttft_ms": -1.3}, -0.6),
        ({"itl_ms": 0.7, "ttft_ms": None}, -math.inf),
    ],
)
def test_a_change_that_costs_more_than_it_buys_is_worth_less_than_nothing(
    bought: dict[str, float | None], worth: float
) -> None:
    told = {"name": "it", "cause": "so", "lifecycle": "request", "kind": "policy"}
    made = Counterfactual.model_validate({**told, "p99": dict.fromkeys(bought, 1.0), "bought": bought})
    assert worth_of(made, "itl_ms") == pytest.approx(worth)


def test_a_slow_front_door_is_lifted(slow_run: Path, tmp_path: Path) -> None:
    """As it was noted, to the nanosecond; and, of a server that notes nothing, as its recording explains it."""
    FrontDoor(prompt_token_ns=2 * MS, chunk_ns=MS / 5, client_ns=MS).save(tmp_path / "door")
    timed, out = ("-c", slow_run / "calibration"), tmp_path / "served"
    run(
        "simulate",
        slow_run / "t.parquet",
        *timed,
        "--limit",
        40,
        "--front-door",
        tmp_path / "door",
        "-o",
        out,
        "--no-band",
    )
    for told_by in ("notes", "fit"):
        told = json.loads(run("diagnose", out, *timed, "--format", "json").output)
        assert (told["cause"], told["metric"], told["warning"]) == ("no front door", "ttft_ms", None)
        assert told["symptoms"][0]["name"] == "slow front door" and told["kind"] == "capacity"
        assert told["simulated_p99"] == pytest.approx(told["recorded_p99"], rel=0.0 if told_by == "notes" else 0.02)
        assert told["counterfactuals"][0]["bought"]["ttft_ms"] > 0.9
        add_notes(out, front_door=None)


def test_without_a_cost_model_it_says_that_there_is_only_evidence(slow_run: Path) -> None:
    shown = " ".join(run("diagnose", slow_run / "run").output.split())
    assert shown.startswith("symptoms only") and "max_num_seqs reached" in shown


def test_bad_input_is_one_line(slow_run: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ([tmp_path / "none"], "not a directory"),
        ([slow_run / "run", "--gpu", "H100"], "smollm2"),
        ([slow_run / "run", "-c", tmp_path], "calibration.json"),
        ([slow_run / "run", "--slo", "soon"], "METRIC:MILLISECONDS"),
        ([slow_run / "run", "-c", slow_run / "calibration", "--router", "nearest"], "nearest"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            run("diagnose", *arguments)
        assert "\n" not in str(caught.value)


def test_a_run_of_which_nothing_finished_cannot_be_explained(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_model_len=32, max_num_batched_tokens=32, num_blocks=16)
    offered = Workload([WorkloadRequest(0, 0, (("", 100),), 5)], shares_prefixes=False)
    simulate_to(tmp_path / "run", offered, Deployment(scheduler=scheduler), TokenCost(1, 1, 1))
    with pytest.raises(UserError, match="nothing can be explained"):
        run("diagnose", tmp_path / "run")
