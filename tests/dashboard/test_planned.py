"""A plan's settings are taken to the Policy lab, to a run of the fleet, to a claim, and into a link."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("streamlit")

from tests.dashboard.pages import opened, parameter, shown
from tests.dashboard.samples import plan_example
from tests.dashboard.test_uploads import CSV
from tokentwin.dashboard.bundled import RUN_SAMPLE
from tokentwin.dashboard.plan_page.estimates import estimates
from tokentwin.dashboard.plan_page.inputs import plan_request
from tokentwin.dashboard.plan_page.tasks import PLAN, glance
from tokentwin.dashboard.plan_page.words import EXAMPLE, LOOKED_AT
from tokentwin.dashboard.planned import TO_COMPARE, Planned, link_to, plan_settings
from tokentwin.dashboard.run_page.slo_lines import slo_figure
from tokentwin.dashboard.uploads import keep_trace, trace_name, trace_path
from tokentwin.planning.compare.request import CompareRequest
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.serving.deployments.config import parse
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording


@pytest.fixture(scope="module")
def plan() -> Planned:
    return Planned(EXAMPLE, plan_request().as_json(), PlanDocument.read(plan_example()["answer"]))


def test_policies_are_compared_on_the_planned_fleet_and_traffic_at_once(tmp_path, started, plan):
    best = plan.answer.recommendation
    assert best is not None
    app = opened("policy_lab", tmp_path, session={TO_COMPARE: EXAMPLE}, plan=EXAMPLE, offered="plan")
    assert f"{best.replicas} × {best.engine}" in shown(app)
    (job,) = started
    request = parse(CompareRequest, job.settings, where="lab")
    assert job.settings["traffic"] == plan.settings["traffic"]
    assert request.bounds == plan.bounds == dict(parse_objectives(plan.settings["slos"]).bounds)
    for side, policy in ((request.a, "vllm"), (request.b, "fair")):
        assert side.deployment is not None and side.replicas == best.replicas
        assert side.deployment == best.to_change() and side.settings == {"policy": policy}
        assert side.deployment.gpu_memory_utilization == 0.9  # so that KV blocks follow from other settings
    again = opened("policy_lab", tmp_path, plan=EXAMPLE, offered="plan")
    assert len(started) == 1 and again.button[-1].label == "Compare"  # a link alone starts nothing


@pytest.mark.parametrize(
    ("inputs", "said"), [({"offered": "plan"}, False), ({}, True), ({"offered": "plan", "compare": "recordings"}, True)]
)
def test_a_comparison_of_other_traffic_says_so_beside_the_plan(tmp_path, started, inputs, said):
    app = opened("policy_lab", tmp_path, plan=EXAMPLE, **inputs)
    assert ("The comparison below is not of this plan" in shown(app)) == said


def test_a_run_of_a_planned_fleet_is_held_against_the_slos_of_its_plan(tmp_path: Path) -> None:
    metrics = RunMetrics.from_recording(Recording.load(RUN_SAMPLE))
    ttft = float(np.nanpercentile(metrics.values("ttft_ms"), 99, method="inverted_cdf"))
    slos = [f"ttft_ms p99<={ttft * 2:.0f}", "tpot_ms p99<=0.5"]
    directory = tmp_path / "jobs" / "0123456789abcdef"
    directory.mkdir(parents=True)
    (directory / "run").symlink_to(RUN_SAMPLE)
    write_json(directory / "request.json", {"task": "x", "settings": {"plan": {"slos": slos}}})
    settings = plan_settings(tmp_path, "jobs/0123456789abcdef/run")
    assert settings is not None and settings["slos"] == slos
    drawn = slo_figure(metrics, parse_objectives(slos), "#000000")
    assert sorted(shape.x0 for shape in drawn.layout.shapes) == [0.5, round(ttft * 2)]
    assert plan_settings(tmp_path, "mine") is None


def test_a_link_to_what_this_server_has_not_says_who_must_do_what(tmp_path: Path) -> None:
    digest = sha256(CSV).hexdigest()[:16]
    message = shown(opened("plan", tmp_path, traffic="trace", trace=f"{digest}:azure hour.csv"))
    assert "azure_hour.csv" in message and "is not on this server" in message
    assert "Upload the same file" in message
    assert "is not on this server" in shown(opened("policy_lab", tmp_path, plan="fedcba9876543210"))


def test_a_trace_keeps_its_name_and_the_hash_of_its_file(tmp_path: Path, read_here: None) -> None:
    digest = keep_trace(tmp_path, CSV, "../../Azure hour.csv")
    path = trace_path(tmp_path, digest)
    assert digest == sha256(CSV).hexdigest()[:16] and path is not None
    assert trace_name(path) == "Azure_hour.csv"
    settings = {**plan_request().as_json(), "traffic": str(path)}
    assert Planned("x", settings, PlanDocument.read(plan_example()["answer"])).traffic.startswith("Azure_hour.csv at ")


def test_an_estimate_is_there_at_once_and_no_simulated_fleet_is_faster(plan: Planned) -> None:
    request = plan_request()
    rows, ruled_out = estimates(request, glance(request, 2000))
    by_engine = {row["candidate"]: row for row in rows}
    assert by_engine.keys() | {name for name, _ in ruled_out} >= {point.engine for point in plan.answer.points}
    for point in plan.answer.points:
        row = by_engine[point.engine]
        assert (point.tok_s_user or 0) < row["tok/s per user"]
        assert not point.met or row["GPUs"] <= point.gpus
    for row in rows:
        assert row["KV room (tokens)"] == plan.answer.candidates[row["candidate"]].kv_tokens


def test_a_plan_that_was_made_here_is_found_by_its_name(tmp_path: Path, plan: Planned) -> None:
    job = Job(tmp_path / "jobs", PLAN, {**plan.settings, "spares": 1})
    job.directory.mkdir(parents=True)
    write_json(job.directory / "request.json", {"task": PLAN, "settings": job.settings})
    write_json(job.directory / "result.json", plan_example()["answer"])
    best = plan.answer.recommendation
    assert best is not None
    assert f"{best.replicas} × {best.engine}" in shown(opened("claims", tmp_path, plan=job.id))
    write_json(job.directory / "result.json", {"answer": 3})
    assert "is not on this server" in shown(opened("claims", tmp_path, plan=job.id))


def test_the_plan_page_has_all_fleets_and_other_pages_lead_back_to_it(tmp_path, started):
    link = {"rate": "7", "slo": ["TTFT p99 < 1s", "tpot_ms p99<=50"], "show": "fleets"}
    app = opened("plan", tmp_path, **link)
    app.button(key="find").click().run()
    (job,) = started
    job.directory.mkdir(parents=True)
    write_json(job.directory / "request.json", {"task": job.task, "settings": job.settings})
    write_json(job.directory / "result.json", plan_example()["answer"])
    assert link_to(tmp_path, job.id) is None
    app = opened("plan", tmp_path, **link)
    assert "Choose a fleet in the table" in shown(app)
    assert [figure.key for figure in app.get("plotly_chart")] == ["frontier", "price", "lengths", "over_time"]
    assert link_to(tmp_path, job.id) == {"plan": job.id} and link_to(tmp_path, "../../etc") is None
    assert link_to(tmp_path, "example", "fleets") == {"plan": "example", "show": "fleets"}


def test_a_link_of_any_page_opens_the_same_plan_for_a_colleague(tmp_path, started):
    mine = opened("plan", tmp_path, rate="7", spares="1")
    mine.button(key="find").click().run()
    (job,) = started
    job.directory.mkdir(parents=True)
    write_json(job.directory / "request.json", {"task": job.task, "settings": job.settings})
    assert parameter(mine, "plan") == job.id
    mine.run()  # a plan that was only started has its inputs, too
    write_json(job.directory / "result.json", plan_example()["answer"])
    theirs = opened("plan", tmp_path, plan=job.id)
    assert "Why not" in shown(theirs)
    said = {name: parameter(theirs, name) for name in ("rate", "spares", "plan")}
    assert said == {"rate": "7", "spares": "1", "plan": job.id}
    for page in ("policy_lab", "run", "trust"):
        after = opened(page, tmp_path, session={LOOKED_AT: job.id})  # from the navigation bar
        assert parameter(after, "plan") == job.id, page
    theirs.number_input(key="url_spares_1").set_value(2).run()
    assert parameter(theirs, "spares") == "2" and parameter(theirs, "plan") != job.id
    gone = opened("plan", tmp_path, plan="fedcba9876543210")
    assert "is not on this server" in shown(gone)
