"""Pages that are about the same thing say the same."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("streamlit")

from tests.dashboard.pages import charts, opened, parameter, shown
from tests.dashboard.samples import plan_example
from tokentwin.calibration.trust import VALIDATED
from tokentwin.calibration.validation.evidence import MOST_MEDIAN_PCT, trust_in_recording, trust_in_report
from tokentwin.calibration.validation.report import load_report
from tokentwin.dashboard.bundled import DEMO, DEMO_ON_VLLM, EXTERNAL_SAMPLE
from tokentwin.dashboard.plan_page import words
from tokentwin.dashboard.plan_page.inputs import plan_request
from tokentwin.dashboard.plan_page.tasks import COARSE, PLAN
from tokentwin.dashboard.policy_lab_page.inputs import b_as_a
from tokentwin.dashboard.run_page.slo_lines import _verdicts
from tokentwin.dashboard.trust_page.own_question import judged, questions
from tokentwin.dashboard.trust_page.results import load_external
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.jobs.job import Job, Status
from tokentwin.planning.plan.document import PlanDocument, percent
from tokentwin.planning.plan.frontier import Fleet
from tokentwin.planning.plan.mixed_fleet import MixedFleet
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.serving.answers.figures import shown_change, shown_share, shown_time
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording


@pytest.mark.parametrize("demo", [DEMO, DEMO_ON_VLLM], ids=["our engine", "vLLM"])
def test_a_run_is_as_certain_as_the_report_that_compared_it(demo: Path) -> None:
    report = load_report(demo / "validation")
    trust = trust_in_recording(Recording.load(demo / "validation" / "simulated"))
    assert trust == trust_in_report(report)
    medians = [row for row in report.rows if row.stat == "p50" and not row.noisy]
    off = any(abs(row.error_pct or 0) > max(MOST_MEDIAN_PCT, abs(row.floor_pct or 0)) for row in medians)
    assert off and trust.level != VALIDATED and re.search(r"p50 differs from the real run by [-+]\d", trust.reason)


def test_the_attainment_of_a_fleet_is_one_number_with_its_band_on_plan_and_frontier(tmp_path: Path) -> None:
    answer = PlanDocument.read(plan_example()["answer"])
    best = answer.recommendation
    assert best is not None and best.choices is not None
    one = words.attainment_of(answer, best)
    assert one.startswith(shown_share(best.attainment, 1)) and one == best.choices.recommended.attained
    below = next(choice for choice in best.choices.existing if choice.replicas == best.replicas - 1)
    assert answer.why_not_fewer and answer.why_not_fewer.endswith(f"attainment {below.attained}")
    for view in ("fleet", "fleets"):
        assert f"{one} of the requests" in shown(opened("plan", tmp_path, plan="example", show=view))


def test_the_verdict_on_an_slo_names_the_main_figure_if_unfinished_requests_make_another() -> None:
    objectives = parse_objectives(["ttft_ms p99<=1000"])
    for last in ("finished", "rejected"):
        columns = {"status": ["finished"] * 298 + [last] * 2, "arrival_ns": [0] * 300}
        metrics = RunMetrics(pa.table({**columns, "first_token_ns": [10**6 * ms for ms in range(301, 601)]}))
        main = shown_time(metrics.distribution("ttft_ms").p99, 4)
        (verdict,) = _verdicts(metrics, objectives)
        assert verdict.startswith("ttft_ms p99<=1000 holds (597 ms") and main in verdict
        assert ("among finished" in verdict) == (last != "finished") == (main == "596 ms")


PLANNED_MODEL = "Llama-3.1-70B"


def answered(runs: Path, **changes: object) -> Job:
    job = Job(runs / "jobs", PLAN, plan_request().model_copy(update=changes).as_json())
    job.directory.mkdir(parents=True)
    write_json(job.directory / "request.json", {"task": PLAN, "settings": job.settings})
    write_json(job.directory / "result.json", plan_example()["answer"])
    return job


def test_a_pinned_plan_stands_beside_the_next_one(tmp_path: Path) -> None:
    other = answered(tmp_path, spares=1)
    app = opened("plan", tmp_path, pin=other.id)
    assert "The pinned plan beside this one" in shown(app) and "Different inputs: spares." in shown(app)
    app.button(key="unpin").click().run()
    assert "The pinned plan beside this one" not in shown(app)
    app.button(key="pin").click().run()
    assert "This plan is pinned as A" in shown(app)


def test_a_pinned_run_stands_beside_the_next_one(samples: Path) -> None:
    app = opened("run", samples, run="real-1")
    app.button(key="pin").click().run()
    assert "This run is pinned as A" in shown(app)
    app = opened("run", samples, run="real-2", pin="real-1")
    assert "The pinned run beside this one" in shown(app) and "Different inputs:" in shown(app)
    table = next(one.value for one in app.dataframe if "B against A" in one.value.columns)
    assert list(table.columns) == ["figure", "A", "B against A", "B"]
    a, b = (
        RunMetrics.from_recording(Recording.load(samples / name)).distribution("ttft_ms").p99
        for name in ("real-1", "real-2")
    )
    (row,) = table[table["figure"] == "TTFT p99"].to_dict("records")
    assert row["A"] == shown_time(a) and row["B"] == shown_time(b)
    assert row["B against A"] == ("the same" if a == b else shown_change(100 * (b / a - 1)))


def test_a_policy_is_pinned_and_stands_beside_the_next_one(tmp_path: Path) -> None:
    app = opened("policy_lab", tmp_path)
    table = next(one.value for one in app.dataframe if "B against A" in one.value.columns)
    assert list(table.columns) == ["figure", "A: vllm", "B against A", "B: fair"]
    app.button(key="pin").click().run()
    assert [app.selectbox(key=key).value for key in ("url_a_1", "url_b")] == ["fair", "fair"]
    said = {"b": ["edf"], "b_replicas": ["2"], "a_max_num_seqs": ["8"], "rate": ["3"]}
    assert b_as_a(said) == {"a": ["edf"], "a_replicas": ["2"], "a_max_num_seqs": ""}


def test_another_price_is_answered_at_once(tmp_path: Path, started: list[Job]) -> None:
    best = PlanDocument.read(plan_example()["answer"]).recommendation
    assert best is not None
    usual = {name: find_gpu(name).usd_per_hour for name in ("H100", "H200")}
    link = ",".join(f"{name}:{2 * usd:.10g}" for name, usd in usual.items())
    said = shown(opened("plan", tmp_path, price=link))
    assert (
        f"{words.fleet_name(best)}, ${2 * best.usd_per_hour:,.2f}/h" in said and "Nothing was simulated again" in said
    )
    assert not started


@pytest.fixture
def under_way(tmp_path: Path) -> Job:
    """A plan with a router of its own whose fleet is final, while plots follow."""
    job = answered(tmp_path, router="random")
    (job.directory / "result.json").unlink()
    bare = {"by_rate": [], "by_replicas": [], "engine_curves": []}
    write_json(job.directory / COARSE, {"said": "2 GPUs", "answer": {**plan_example()["answer"], **bare}})
    return job


@pytest.mark.parametrize("ended", [False, True], ids=["plots follow", "cancelled"])
def test_a_final_fleet_stays_the_answer_whatever_becomes_of_its_plots(
    tmp_path: Path, under_way: Job, ended: bool, monkeypatch: pytest.MonkeyPatch, started: list[Job]
) -> None:
    status = Status("cancelled") if ended else Status("running", "what each engine can do", 0.5, 20.0)
    monkeypatch.setattr(Job, "status", property(lambda job: status if job.id == under_way.id else Status("absent")))
    best = PlanDocument.read(plan_example()["answer"]).recommendation
    assert best is not None
    app = opened("plan", tmp_path, router="random")
    assert words.fleet_name(best) in shown(app) and "Plots of other fleets" in shown(app)
    assert len(charts(app)) == 2  # of the numbers of replicas that are known, and of prices
    assert ended == any(button.label == "Complete the plan" for button in app.button)
    dearer = 2 * find_gpu("H100").usd_per_hour
    said = shown(opened("plan", tmp_path, router="random", price=f"H100:{dearer:.10g},H200:50"))
    assert f"{words.fleet_name(best)}, ${2 * best.usd_per_hour:,.2f}/h" in said and "There is no answer" not in said
    assert f"for {PLANNED_MODEL} on H100" in shown(opened("trust", tmp_path, plan=under_way.id))
    assert not started


def test_a_number_out_of_its_range_stops_the_button(tmp_path: Path, started: list[Job]) -> None:
    app = opened("plan", tmp_path, spares="3")
    assert app.button(key="find")
    (spares,) = [box for box in app.number_input if box.label == "Spare replicas"]
    spares.set_value(101).run()
    assert "Spare replicas: '101': must be from 0 to 100" in shown(app)
    assert not [button for button in app.button if button.key == "find"]
    (spares,) = [box for box in app.number_input if box.label == "Spare replicas"]
    spares.set_value(5).run()
    assert app.button(key="find") and not app.error


def test_plan_and_trust_state_the_same_errors_of_the_same_runs(tmp_path: Path) -> None:
    """Planted: a plan on a GPU with its own runs, and one whose fleet has two kinds of GPUs."""
    content = plan_example()["answer"]
    pools = [dict(content["runners_up"][0]), dict(content["recommendation"])]
    mix = {"pools": [{name: pool[name] for name in Fleet.model_fields} for pool in pools], "gpus": 3, "attainment": 1}
    mix |= {"usd_per_hour": 1.0, "change": -0.1, "holds": 0.9, "met": True}
    name = MixedFleet.model_validate(mix).name
    mixed = {**content, "mixes": [mix], "answer": f"{name} = 3 GPUs", "mixed": "It is cheaper."}
    answered(tmp_path, router="random")
    job = answered(tmp_path, spares=2)
    write_json(job.directory / "result.json", mixed)
    for link, plan, kinds in (({"router": "random"}, content, 1), ({"spares": "2"}, mixed, 2)):
        asked = list(questions(PlanDocument.read(plan)))
        page, verdicts = opened("plan", tmp_path, **link), [judged(it, load_external(EXTERNAL_SAMPLE)) for it in asked]
        assert len(asked) == kinds and all(verdict.sentence in shown(page) for verdict in verdicts)
        metrics = opened("trust", tmp_path, plan=parameter(page, "plan")).metric
        stated = [(metric.label, metric.value) for metric in metrics]
        expected = [figure for verdict in verdicts for figure in verdict.figures.items()]
        assert stated[: len(expected)] == expected


def test_a_fleet_keeps_the_slos_in_as_many_cases_wherever_it_is_named(tmp_path: Path) -> None:
    """A fleet that breaks an SLO if steps are slow is not simply `met`."""
    answer = PlanDocument.read(plan_example()["answer"])
    for fleet, app in (("4 x TP4 H100", opened("plan", tmp_path, show="fleets")), ("3 x TP4 H100", None)):
        app = app or opened("plan", tmp_path, show="fleets", fleet=fleet)
        point = next(point for point in answer.points if f"{point.replicas} x {point.engine}" == fleet)
        holds = answer.hold_probabilities[point.engine, point.replicas]
        said = f"hold in {percent(holds)} of cases"
        table = next(one.value for one in app.dataframe if "SLOs" in one.value.columns)
        assert f"SLOs {said}" in shown(app) and f"The SLOs {said}" in shown(app) and said in set(table["SLOs"])
    unknown = next(p for p in answer.points if p.met and (p.engine, p.replicas) not in answer.hold_probabilities)
    assert words.slos_of(answer, unknown) == "hold in ≥ 90 % of cases"
    assert words.slos_of(answer, unknown.model_copy(update={"met": False})) == "hold in < 90 % of cases"
    never = unknown.model_copy(update={"met": False, "met_as_predicted": False})
    assert words.slos_of(answer, never) == "broken"


def test_a_link_with_a_question_opens_on_its_answer_alone(tmp_path: Path) -> None:
    app = opened("trust", tmp_path, asked_gpu="MI300X")
    asking = next(one for one in app.expander if one.label.startswith("Ask about"))
    assert asking.proto.expanded and "There is no measured run on MI300X" in shown(app)
    assert app.header[0].value.endswith(f", for {PLANNED_MODEL} on MI300X")
    asking = next(one for one in opened("trust", tmp_path).expander if one.label.startswith("Ask about"))
    assert not asking.proto.expanded


def test_trust_is_asked_without_a_plan(tmp_path: Path) -> None:
    link = {"asked_model": "Llama-3.1-8B", "asked_gpu": "H100", "asked_figure": "ttft_ms.mean", "asked_tp": "1"}
    said = shown(opened("trust", tmp_path, asked_weights="bf16", asked_load="0", **link))
    like = "by vLLM, with weights in BF16, with KV cache in BF16, with TP1, with requests that come at a rate"
    assert "Llama-3.1-8B on H100" in said and like in said
    said = shown(opened("trust", tmp_path, **link, asked_kv="fp8", asked_loop="closed"))
    assert "none is with KV cache in FP8, none is with a fixed number of requests in flight" in said
    said = shown(opened("trust", tmp_path, **{**link, "asked_gpu": "MI300X"}))
    assert "There is no measured run on MI300X" in said
