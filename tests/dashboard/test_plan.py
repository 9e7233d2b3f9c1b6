"""The Plan and Frontier pages through Streamlit's AppTest: what they open on, what they ask, and every error path."""

import fcntl
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from tests.dashboard.pages import opened, shown
from tests.dashboard.samples import borne, one_line, plan_example
from tests.dashboard.test_uploads import CONFIG, CSV
from tests.planning.sweep_samples import calibrated
from tests.tokentwin.test_plan_command import arrival_rate
from tokentwin.dashboard.bundled import bundled_answer
from tokentwin.dashboard.frontier_page import charts as frontier_charts
from tokentwin.dashboard.palette import REAL, policy_colour
from tokentwin.dashboard.plan_page import charts as plan_charts
from tokentwin.dashboard.plan_page import tasks as plan_tasks
from tokentwin.dashboard.plan_page import words
from tokentwin.dashboard.plan_page.command import plan_command
from tokentwin.dashboard.plan_page.inputs import plan_request
from tokentwin.dashboard.plan_page.tasks import COARSE, FLEET, MOST_CLIENTS, PLAN
from tokentwin.dashboard.plan_page.words import fleet_name, plan_name, why_not_fewer
from tokentwin.dashboard.plan_page.words import ranked as ranked_fleets
from tokentwin.dashboard.shapes import MOST_REQUESTS, shapes
from tokentwin.dashboard.shown import prose
from tokentwin.dashboard.uploads import keep_model, keep_trace, model_path
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.jobs.job import DIED, Job
from tokentwin.planning.plan.answer import length_histogram
from tokentwin.planning.plan.document import FleetPoint, Lengths, LoadPoint, PlanDocument
from tokentwin.planning.plan.mixed_fleet import MixedFleet, MixedPool
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.planning.plan.pricing import priced_candidates
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES
from tokentwin.traces import synth

pytestmark = pytest.mark.usefixtures("read_here")
_RATIOS = ",".join(f"{prefill}:{decode}" for prefill in range(1, 9) for decode in range(1, 9))


@pytest.fixture
def sleeper():
    """Start a process for a job that does nothing, in its own process group, which a test may end."""
    processes = []

    def sleep(job: Job) -> subprocess.Popen:
        job.directory.mkdir(parents=True)
        with (job.directory / "process.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            processes.append(subprocess.Popen(command, start_new_session=True, pass_fds=[lock.fileno()]))
        leave(job, process=processes[-1].pid)
        return processes[-1]

    yield sleep
    for process in processes:
        process.kill()
        process.wait()


plan = partial(opened, "plan")


def asked(app: AppTest, started: list[Job]) -> dict[str, Any]:
    """Return the settings of the job that the page starts."""
    app.button(key="find").click().run()
    assert not app.exception
    return started[-1].settings


def unanswered(runs: Path, rate: str = "7") -> Job:
    """Return the job that the page asks for if it is opened with this rate."""
    request = plan_request()
    traffic = next(iter(shapes().values())).traffic(float(rate))
    return Job(runs / "jobs", PLAN, request.model_copy(update={"traffic": traffic}).as_json())


def leave(job: Job, **documents: Any) -> None:
    job.directory.mkdir(parents=True, exist_ok=True)
    write_json(job.directory / "request.json", {"task": job.task, "settings": job.settings})
    for name, document in documents.items():
        write_json(job.directory / f"{name}.json", document)


def bundled() -> PlanDocument:
    return PlanDocument.read(plan_example()["answer"])


# Plan


def test_it_opens_on_a_bundled_answer_to_its_own_inputs(tmp_path: Path) -> None:
    assert bundled_answer(plan_request().as_json()) is not None, (
        "python -m tests.dashboard.bundled_samples makes it anew"
    )
    app = plan(tmp_path)
    text, answer = shown(app), plan_example()["answer"]
    assert answer["answer"].partition("/h. ")[2] in text
    assert "Why not" in text and answer["recommendation"]["vllm_serve"] in text
    assert f"{answer['recommendation']['trust']['level']}]" in text
    assert len(app.get("plotly_chart")) == 6 and not app.get("progress")
    assert {button.label for button in app.get("download_button")} == {"Parquet", "CSV", "Report", "JSON"}
    assert not app.query_params.get("rate"), "what is as usual is not in the link"


def test_what_is_changed_is_in_the_link_and_a_link_is_the_same_question(tmp_path: Path, started: list[Job]) -> None:
    app = plan(tmp_path)
    app.selectbox(key="url_model").set_value("Llama-3.1-8B")
    app.multiselect(key="url_gpus").set_value(["L40S", "H100"])
    app.number_input(key="url_rate").set_value(7.5)
    app.number_input(key="url_cv").set_value(2.0)
    app.number_input(key="url_spares").set_value(1.0)
    app.run()
    app.number_input(key="url_price_L40S").set_value(0.5)
    app.run()
    first = asked(app, started)
    assert first["prices"] == {"L40S": 0.5} and first["spares"] == 1
    assert first["traffic"]["arrivals"] == {"kind": "gamma", "rate": 7.5, "cv": 2.0}
    link = dict(app.query_params)
    assert link["gpus"] == "L40S,H100" and link["price"] == "L40S:0.5"
    assert asked(plan(tmp_path, **link), started) == first


def test_slos_are_what_the_command_line_takes(tmp_path: Path, started: list[Job]) -> None:
    app = plan(tmp_path)
    slos = ["tpot_ms<=50", "ttft p97.5<=35.5", "attainment>=0.995"]
    app.text_area(key="url_slo").set_value("tpot_ms<=50\n\n ttft  p97.5<=35.5\ntpot_ms<=50\nattainment>=0.995").run()
    assert asked(app, started)["slos"] == slos == app.query_params["slo"]
    assert asked(plan(tmp_path, slo=slos), started)["slos"] == slos
    for typed in ("ttft_ms", "tpot_ms<=50", "attainment>=0.9", "nonsense_ms p99<=1"):
        with pytest.raises(UserError) as refused:
            parse_objectives([typed])
        app.text_area(key="url_slo").set_value(typed).run()
        assert refused.value.remedy in one_line(app).replace("\\", "") and app.number_input(key="url_rate").value == 20
    app.text_area(key="url_slo").set_value(" ").run()
    assert "Choose at least one SLO." in shown(app)


def test_any_risk_and_any_ratio_of_engines_can_be_asked_for(tmp_path: Path, started: list[Job]) -> None:
    settings = asked(plan(tmp_path, hold="97.5", splits="search,7:3", tp="1,3"), started)
    assert (settings["risk"], settings["splits"]) == (0.025, ["search", "7:3"])
    assert settings["tensor_parallel_sizes"] == [1, 3]
    said = dict(pairwise(shlex.split(plan_command(settings)[0])))
    assert (said["--risk"], said["--split"], said["--tp"]) == ("0.025", "search,7:3", "1,3")
    for link in (
        {"splits": "nine"},
        {"tp": "x"},
        {"tp": "3"},
        {"tp": ",".join(map(str, range(1, 65))), "splits": _RATIOS},
    ):
        assert one_line(plan(tmp_path, **link))


def test_a_shape_of_ones_own(tmp_path: Path, started: list[Job]) -> None:
    url = {"traffic": "shape", "prompt": "300", "output": "40", "prompt_sigma": "0", "prefix": "100", "minutes": "2"}
    spec = asked(plan(tmp_path, **url), started)["traffic"]
    assert spec["requests"] == 2400
    assert (spec["prompt"]["mean"], spec["prompt"]["sigma"], spec["output"]["mean"]) == (300, 0, 40)
    assert spec["system_prompts"]["tokens"]["tokens"] == 100


def test_images_and_adapters_of_a_shape_make_the_engine_serve_them(tmp_path: Path, started: list[Job]) -> None:
    shape = {"traffic": "shape", "minutes": "2", "prompt": "300", "output": "40"}
    url = shape | {"images": "2", "image_tokens": "400", "adapters": "20", "max_loras": "4", "splits": "none,1e2"}
    settings = asked(plan(tmp_path, **url), started)
    spec = settings["traffic"]
    assert (spec["images"]["count"], spec["images"]["tokens"]["tokens"], spec["adapters"]["count"]) == (2, 400, 20)
    assert settings["deployment"] == {"multimodal": {}, "lora": {"max_loras": 4, "max_lora_rank": 16}}
    assert settings["splits"] == ["none", "1e2"]
    _, files = plan_command(settings)
    assert "max_loras: 4" in files["deployment.yaml"] and "images:" in files["traffic.yaml"]
    plain = asked(plan(tmp_path, **shape), started)
    assert "deployment" not in plain and not {"images", "adapters"} & plain["traffic"].keys()


def test_drafts_can_depend_on_the_batch_size(tmp_path: Path, started: list[Job]) -> None:
    url = {"model": "Qwen3-Next-80B-A3B", "drafts": "mtp", "draft_tokens": "2", "accepted": "80"}
    settings = asked(plan(tmp_path, **url, by_size="1-16: 2, 17-64: 0"), started)
    drafts = settings["deployment"]["scheduler"]["speculative"]
    assert drafts["num_speculative_tokens_per_batch_size"] == [[1, 16, 2], [17, 64, 0]]
    assert (drafts["method"], drafts["num_speculative_tokens"], drafts["acceptance_rate"]) == ("mtp", 2, 0.8)
    assert one_line(plan(tmp_path, **url, by_size="many"))
    assert one_line(plan(tmp_path, **url, by_size="1-16: 2, 4-64: 0"))


def test_users_and_requests_in_flight_need_no_rate(tmp_path: Path, started: list[Job]) -> None:
    users = {"traffic": "shape", "prompt": "300", "output": "40", "minutes": "2", "arrivals": "users", "users": "30"}
    app = plan(tmp_path, **users, think="5")
    assert "Peak req/s" not in {one.label for one in app.number_input}
    assert "30 clients who wait for answers; 3" in shown(app)
    spec = asked(app, started)["traffic"]
    assert spec["arrivals"]["users"] == 30 and spec["arrivals"]["think_ms"]["mean"] == 5000
    assert (spec["duration_s"], spec["prompt"]["mean"], spec["output"]["mean"]) == (120, 300, 40)
    app = plan(tmp_path, arrivals="concurrency", concurrency="16")
    settings = asked(app, started)
    assert settings["traffic"]["arrivals"] == {"kind": "closed", "concurrency": 16}
    assert parse(PlanRequest, settings, "plan").loop is not None and "Minutes to simulate" not in shown(app)


def test_how_many_users_a_fleet_bears_is_a_question_of_its_own(tmp_path: Path, started: list[Job]) -> None:
    link = {"arrivals": "users", "users": "30", "replicas": "2"}
    settings = asked(plan(tmp_path, **link), started)
    command, files = plan_command(settings)
    said = dict(pairwise(shlex.split(command)))
    assert (started[-1].task, said["--replicas"], settings["replicas"]) == (MOST_CLIENTS, "2", 2)
    assert "users: 30" in files["traffic.yaml"]
    leave(Job(tmp_path / "jobs", MOST_CLIENTS, settings), result=borne().as_json())
    text = shown(plan(tmp_path, **link))
    assert prose(borne().answer) in text and "How many users?" in text


def test_settings_of_the_engine_are_candidates_as_with_vary(tmp_path: Path, started: list[Job]) -> None:
    app = plan(tmp_path, quantization="none,fp8", kv="fp8", seqs="256", **{"async": "on"})
    settings = asked(app, started)
    assert settings["vary"] == {
        "quantization": ["none", "fp8"],
        "kv_cache_dtype": ["fp8"],
        "async_scheduling": [True],
        "max_num_seqs": [256],
    }
    request = PlanRequest.model_validate(settings)
    engines, ruled_out, _ = priced_candidates(request, request.workload())
    assert not ruled_out
    deployments = [engine.deployment for engine in engines]
    assert [d.quantization for d in deployments] == ["none", "fp8"] * 4
    assert {(d.kv_cache_dtype, d.scheduler.async_scheduling, d.scheduler.max_num_seqs) for d in deployments} == {
        ("fp8", True, 256)
    }
    words = shlex.split(plan_command(settings)[0])
    varied = [word for before, word in pairwise(words) if before == "--vary"]
    assert varied == ["quantization=none,fp8", "kv_cache_dtype=fp8", "async_scheduling=true", "max_num_seqs=256"]


def test_policies_splits_and_routers_are_asked_for_as_on_the_command_line(tmp_path: Path, started: list[Job]) -> None:
    url = {"policies": "vllm,sjf", "splits": "none,1:2", "router": "random", "most": "50"}
    settings = asked(plan(tmp_path, **url), started)
    request = PlanRequest.model_validate(settings)
    names = {engine.name for engine in priced_candidates(request, request.workload()).engines}
    assert {"TP4 H100", "TP4 H100 sjf", "TP4 H100 1P2D", "TP4 H100 1P2D sjf"} <= names
    words = shlex.split(plan_command(settings)[0])
    said = dict(pairwise(words))
    assert (said["--policy"], said["--split"]) == ("vllm,sjf", "none,1:2")
    assert (said["--router"], said["--max-replicas"]) == ("random", "50")


def test_energy_is_asked_for_with_the_place_of_the_fleet(tmp_path: Path, started: list[Job]) -> None:
    settings = asked(plan(tmp_path, energy="1", pue="1.2", grid="380"), started)
    assert (settings["energy"], settings["pue"], settings["grid_gco2_per_kwh"]) == (True, 1.2, 380)
    assert " --energy --pue 1.2 --grid-gco2-per-kwh 380.0" in plan_command(settings)[0]
    assert not {"energy", "pue", "grid_gco2_per_kwh"} & asked(plan(tmp_path, rate="22"), started).keys()


def test_a_calibration_of_our_own_engine_fixes_the_model_and_its_device_has_a_price(tmp_path, started):
    calibrated(tmp_path / "cal")
    settings = asked(plan(tmp_path, calibration="cal", own_price="0.25", rate="2"), started)
    assert settings["calibration"] == str((tmp_path / "cal").resolve()) and settings["prices"] == {"cpu": 0.25}
    assert not {"model", "gpus", "tensor_parallel_sizes"} & settings.keys()
    request = PlanRequest.model_validate(settings)
    (engine,) = priced_candidates(request, request.workload()).engines
    assert (engine.gpu, engine.usd_per_hour) == ("cpu", 0.25)
    assert "Choose at least one policy." in shown(plan(tmp_path, calibration="cal", policies=""))


def test_settings_that_are_as_usual_leave_the_question_as_it_was(tmp_path: Path, started: list[Job]) -> None:
    assert "vary" not in asked(plan(tmp_path, rate="21", quantization="none", kv="auto", batch_tokens="0"), started)
    assert "Choose at least one Quantization" in shown(plan(tmp_path, quantization=""))


DEPLOYMENT = """
model: Llama-3.1-8B
device: cuda
gpu_memory_utilization: 0.8
tensor_parallel_size: 2
policy: sarathi
scheduler: {max_model_len: 16384, sarathi_token_budget: 512}
"""


def test_a_deployment_says_all_other_settings(tmp_path: Path, started: list[Job]) -> None:
    """What it states is not asked again, and the command line reads the same file."""
    app = plan(tmp_path, rest="yaml")
    assert "Paste the deployment." in shown(app)
    app.text_area(key="yaml_text").set_value(DEPLOYMENT + "fleet: {}").run()
    assert "deployment.fleet: " in one_line(app)
    app.text_area(key="yaml_text").set_value(DEPLOYMENT).run()
    settings = asked(app, started)
    assert not {"model", "tensor_parallel_sizes", "policies"} & settings.keys()
    request = PlanRequest.model_validate(settings)
    for engine in priced_candidates(request, request.workload()).engines:
        deployment = engine.deployment
        assert (deployment.model, deployment.tensor_parallel_size) == ("Llama-3.1-8B", 2)
        assert (deployment.policy, deployment.scheduler.sarathi_token_budget) == ("sarathi", 512)
    command, files = plan_command(settings)
    assert command.endswith("--deployment deployment.yaml") and "sarathi_token_budget: 512" in files["deployment.yaml"]
    assert asked(plan(tmp_path, **dict(app.query_params)), started) == settings
    assert "is not on this server" in shown(plan(tmp_path, rest="yaml", yaml="0" * 16))


@pytest.mark.parametrize("traffic", ["preset", "trace"])
def test_the_first_requests_alone(traffic: str, tmp_path: Path, started: list[Job]) -> None:
    app = plan(tmp_path, traffic=traffic, trace=keep_trace(tmp_path, CSV), limit="2")
    assert "2 requests" in shown(app)
    settings = asked(app, started)
    assert settings["limit"] == 2 and "--limit 2 " in plan_command(settings)[0]


def test_a_price_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "price: 'H100: 0': " in one_line(plan(tmp_path, price="H100:0"))
    settings = plan_request().as_json() | {"prices": {"H100": -1.0}}
    with pytest.raises(UserError, match=r"plan\.prices\.H100"):
        parse(PlanRequest, settings, where="plan")


def test_spares_are_counted_apart_and_in_one_way(tmp_path: Path) -> None:
    recommended = bundled().recommendation
    assert recommended is not None
    best = recommended.model_copy(update={"replicas": 3, "engine": "TP4 H100", "gpus": 16})
    assert fleet_name(best, 1) == "3+1 × TP4 H100 = 16 GPUs" and why_not_fewer(best, 1) == "Why not 2+1?"
    assert fleet_name(best) == "3 × TP4 H100 = 16 GPUs" and why_not_fewer(best) == "Why not 2?"
    assert list(plan_charts.prices([best], 1).data[0].y) == ["3+1 × TP4 H100"]


def test_an_uploaded_trace(tmp_path: Path, started: list[Job]) -> None:
    digest = keep_trace(tmp_path, CSV)
    app = plan(tmp_path, traffic="trace", trace=digest, trace_rate="15")
    assert "3 requests" in shown(app)
    assert asked(app, started)["traffic"] == str(tmp_path / "uploads" / f"{digest}.parquet")
    request = PlanRequest.model_validate(started[0].settings)
    assert arrival_rate(request.workload()) == pytest.approx(15)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ({"traffic": "trace"}, "Upload a trace."),
        ({"traffic": "trace", "trace": "../../etc/passwd"}, "of this link is not on this server"),
        ({"gpus": ""}, "Choose at least one GPU."),
        ({"tp": ""}, "Choose at least one tensor-parallel size."),
        ({"model": "a config.json of your own"}, "Paste the model's config.json."),
        (
            {"model": "a config.json of your own", "config": "/etc"},
            "The config.json of this link is not on this server",
        ),
        ({"model": "nonsense"}, "Model: 'nonsense' of the link is not available"),
    ],
)
def test_what_is_still_to_be_given_is_said(tmp_path: Path, url: dict[str, str], says: str) -> None:
    app = plan(tmp_path, **url)
    assert says in shown(app) and not app.error


def test_numbers_of_a_link_that_are_none_are_passed_over(tmp_path: Path) -> None:
    app = plan(tmp_path, rate="1e99", cv="nan", spares="x", price="H100:cheap")
    assert plan_example()["answer"]["answer"].partition("/h. ")[2] in shown(app)


def test_a_pasted_config_is_a_candidate_or_an_error_in_a_line(tmp_path: Path, started: list[Job]) -> None:
    app = plan(tmp_path, model="a config.json of your own")
    app.text_area(key="config_text").set_value("{").run()
    assert "is not JSON" in one_line(app)
    app.text_area(key="config_text").set_value(json.dumps(CONFIG)).run()
    model = asked(app, started)["model"]
    assert Path(model, "config.json").is_file() and Path(model).parent == tmp_path / "uploads"
    assert app.query_params["config"] == Path(model).name.removeprefix("model-")


def test_a_trace_of_too_few_requests_is_an_error_in_a_line(tmp_path: Path) -> None:
    digest = keep_trace(tmp_path, b"arrival_s,prompt_tokens,output_tokens\n0,10,5\n")
    assert "planning needs at least 2" in one_line(plan(tmp_path, traffic="trace", trace=digest))


def test_a_running_job_is_found_by_its_inputs_and_can_be_cancelled(tmp_path: Path, sleeper) -> None:
    job = unanswered(tmp_path)
    process = sleeper(job)
    leave(job, progress={"stage": "searching 4 candidates", "share": 0.25, "left_s": 40.0})
    app = plan(tmp_path, rate="7")
    assert re.search(r"Searching 4 candidates, about \d+ (s|min) left", app.get("progress")[0].proto.text)
    assert "A first answer" not in shown(app)
    write_json(job.directory / COARSE, {"said": "2 to 4 GPUs"})
    app = plan(tmp_path, rate="7")
    assert "2 to 4 GPUs." in shown(app)
    app.button(key=f"cancel_{job.id}").click().run()
    process.wait(10)
    app.run()
    assert job.status.state == "cancelled"
    assert "Cancelled." in shown(app) and app.button(key="find")


def test_a_cancel_in_the_moment_of_a_first_answer_is_not_lost(tmp_path, sleeper, monkeypatch):
    job = unanswered(tmp_path)
    sleeper(job)
    write_json(job.directory / COARSE, {"said": "from 250"})
    app = plan(tmp_path, rate="7")
    left = iter(range(251, 254))  # it is left anew each time that the page looks
    monkeypatch.setattr(Job, "document", lambda job, name: {"said": f"from {next(left, 254)}"})
    app.button(key=f"cancel_{job.id}").click().run()
    assert job.status.state == "cancelled"


def test_a_queued_job_says_so(tmp_path: Path, sleeper) -> None:
    sleeper(unanswered(tmp_path))
    assert "Queued" in plan(tmp_path, rate="7").get("progress")[0].proto.text


def test_a_job_that_failed_or_died_says_why_and_can_be_started_again(tmp_path: Path, started: list[Job]) -> None:
    job = unanswered(tmp_path)
    leave(job, outcome={"state": "failed", "error": "gpu: 'X': is none"})
    app = plan(tmp_path, rate="7")
    assert one_line(app) == "gpu: 'X': is none"
    assert asked(app, started) == job.settings
    (job.directory / "outcome.json").unlink()
    (job.directory / "process.lock").touch()
    assert one_line(plan(tmp_path, rate="7")) == DIED


def test_a_finished_job_is_answered_without_asking_again(tmp_path: Path) -> None:
    leave(unanswered(tmp_path), result={**plan_example()["answer"], "near_ties": ["the answer of the job"]})
    app = plan(tmp_path, rate="7")
    assert "the answer of the job" in shown(app)
    assert "find" not in [button.key for button in app.button]


def test_a_mixed_fleet_that_wins_is_the_title_and_headroom_is_said_to_be_another_fleets(tmp_path: Path) -> None:
    answer = bundled()
    pools = [
        MixedPool(engine=engine, replicas=1, gpus=2, usd_per_hour=5.0, max_prompt_tokens=most)
        for engine, most in (("TP2 H100", 1000), ("TP2 H200", None))
    ]
    about = {"gpus": 4, "usd_per_hour": 10.0, "change": -0.5, "holds": 0.95, "met": True, "attainment": 0.999}
    mix = MixedFleet(pools=tuple(pools), **about)
    won = {"mixes": (mix,), "mixed": "It is cheaper.", "answer": f"{mix.name} = 4 GPUs, $10.00/h."}
    leave(unanswered(tmp_path), result=answer.model_copy(update=won).as_json())
    app = plan(tmp_path, rate="7")
    assert app.title[0].value == f"{mix.name} = 4 GPUs"
    text = shown(app)
    assert "The SLOs hold in 95 % of cases." in text and "The best single kind: " in text
    assert [metric.label for metric in app.metric].count("headroom") == 1
    assert app.metric[0].value == "4" and "was not simulated" in text


def test_traffic_too_short_to_fill_the_fleet_is_warned_of(tmp_path: Path) -> None:
    short = {**plan_example()["answer"], "too_short": "the traffic is too short", "requests": MOST_REQUESTS}
    leave(unanswered(tmp_path), result=short)
    (warning,) = plan(tmp_path, rate="7").warning
    assert warning.value.startswith("The traffic is too short. ") and "20,000 requests" in warning.value
    assert not plan(tmp_path).warning


def test_a_tpot_bound_makes_the_traffic_as_long_as_its_answers(tmp_path: Path, started: list[Job]) -> None:
    """3 times the 99th percentile of the output lengths, some 1,170 tokens, at 200 ms each: 12 minutes."""
    spec = asked(plan(tmp_path, slo="tpot_ms p99<=200", rate="2"), started)["traffic"]
    assert spec["requests"] == pytest.approx(12 * 60 * 2, abs=120)


def test_no_fleet_is_an_answer_too(tmp_path: Path) -> None:
    nothing = {
        **plan_example()["answer"],
        "recommendation": None,
        "answer": "Infeasible: no fleet meets the SLOs. The closest is TP2 H100: tpot_ms p99<=1.",
        "runners_up": [],
        "infeasible": [{"engine": "TP2 H100", "reason": "tpot_ms p99<=1"}],
    }
    leave(unanswered(tmp_path), result=nothing)
    app = plan(tmp_path, rate="7")
    assert one_line(app).replace("\\", "") == prose(nothing["answer"])
    assert "No fleet" in shown(app) and "More expensive: TP2 H200" in shown(app)


def test_a_folder_that_cannot_be_written_is_an_error_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("a file")
    app = plan(tmp_path, rate="7")
    app.button(key="find").click().run()
    assert "cannot be written" in one_line(app)


# Frontier


def test_all_fleets_are_a_view_of_the_plan(tmp_path: Path) -> None:
    app = opened("plan", tmp_path, show="fleets", fleet="99 x nothing")
    text, best = shown(app), plan_example()["answer"]["recommendation"]
    assert f"{len(plan_example()['answer']['points'])} fleets, each simulated" in text
    assert f"**{best['replicas']} × {best['engine']}** :blue-badge[SLOs hold in 97 % of cases]" in text
    assert "simulate_fleet" not in [button.key for button in app.button]


def test_a_fleet_of_the_link_can_be_simulated(tmp_path: Path, started: list[Job]) -> None:
    point = next(point for point in plan_example()["answer"]["points"] if not point["met"])
    app = opened("plan", tmp_path, show="fleets", fleet=f"{point['replicas']} x {point['engine']}")
    assert "gray-badge[SLOs hold in 65 % of cases" in shown(app)
    app.button(key="simulate_fleet").click().run()
    (job,) = started
    assert job.task == FLEET and job.settings["replicas"] == point["replicas"]
    assert job.settings["engine"] == point["engine"]
    leave(job, result={"level": "interpolated"})
    app.run()
    assert "simulate_fleet" not in [button.key for button in app.button]


def test_a_plan_without_any_fleet_says_so(tmp_path: Path) -> None:
    nothing = {"recommendation": None, "points": [], "frontier": [], "frontier_by_price": []}
    leave(unanswered(tmp_path), result=plan_example()["answer"] | nothing)
    assert opened("plan", tmp_path, rate="7", show="fleets").title[0].value == "No fleet"


def test_names_tell_plans_apart(tmp_path: Path) -> None:
    settings, answer = plan_example()["settings"], bundled()
    pasted = model_path(tmp_path, keep_model(tmp_path, json.dumps(CONFIG)))
    arrivals = {"kind": "poisson", "rate": 21.5}
    others = [
        (settings | {"traffic": settings["traffic"] | {"arrivals": arrivals}}, answer),
        (settings, answer.model_copy(update={"objectives": ("ttft_ms p99<=2000",)})),
        (settings | {"model": str(pasted)}, answer),
        (settings | {"traffic": "/x"}, answer),
        (settings | {"model": str(tmp_path / "gone")}, answer.model_copy(update={"recommendation": None})),
    ]
    names = [plan_name(settings, answer), *(plan_name(*other) for other in others)]
    assert len(set(names)) == len(names)
    assert all(part in names[0] for part in ("Llama-3.1-70B, ", "20 requests/s, ", "≤ 1,000 ms, ", "≤ 50 ms"))
    assert "21.5 requests/s" in names[1] and "≤ 2,000 ms" in names[2]
    assert "LlamaForCausalLM, " in names[3] and "model-" not in names[3]
    assert names[5].startswith("no fleet: a model that was deleted")


def test_a_curve_ends_at_the_highest_rate_within_the_slos_and_says_its_units() -> None:
    """Two GPUs that tie at the offered load do not tie in what they can do: the faster one ends higher."""
    answer = bundled()
    chosen = answer.recommendation
    assert chosen is not None
    assert {p.tok_s_gpu for p in answer.points if p.gpus == chosen.gpus} == {chosen.tok_s_gpu}
    slow, fast = sorted((c for c in answer.engine_curves if c.engine.startswith("TP4")), key=lambda c: c.gpu)
    assert (slow.gpu, fast.gpu) == ("H100", "H200") and fast.points[-1].tok_s_gpu > 1.05 * slow.points[-1].tok_s_gpu
    for curve in (slow, fast):
        rates = [p.requests_per_s for p in curve.points]
        assert rates == sorted(rates) and curve.points[-1].met
        assert [p.concurrency for p in curve.points] == sorted(p.concurrency for p in curve.points)
    beyond = fast.model_copy(
        update={"points": tuple(p.model_copy(update={"level": "extrapolated"}) for p in fast.points)}
    )
    for draw, unit in ((frontier_charts.frontier, "tokens/s per GPU"), (frontier_charts.price, "per million output")):
        drawn = draw([slow, beyond], chosen)
        curves = {trace.name: trace for trace in drawn.data}
        assert {"H100", "H200", "hollow: extrapolated", frontier_charts.STAR} == set(curves)
        assert curves["H100"].line.color != curves["H200"].line.color == curves["H200"].line.color
        assert {note.text for note in drawn.layout.annotations} == {slow.engine, beyond.engine}
        assert all(unit in text and "tokens/s of the median user" in text for text in curves["H100"].customdata)
        star, its_line = curves[frontier_charts.STAR], curves["H100"]
        assert (star.x[0], star.y[0]) in list(zip(its_line.x, its_line.y, strict=True))
        on_line = sorted([*slow.points, slow.planned], key=lambda p: p.requests_per_s)
        at_a_time = [f"{p.concurrency:,.0f}" for p in on_line]
        assert all(text in ("", number) for text, number in zip(its_line.text, at_a_time, strict=True))
        assert f"{chosen.replicas} × TP4 H100" in star.customdata[0]
    assert "plan again" in frontier_charts.frontier([], None).layout.annotations[0].text
    of_one_token = tuple(p.model_copy(update={"tok_s_user": None}) for p in slow.points)
    nobody_waits = frontier_charts.frontier([slow.model_copy(update={"points": of_one_token, "planned": None})], None)
    assert "one token" in nobody_waits.layout.annotations[0].text


# Traffic that is too much


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the ids of all requests that are synthesised."""
    ids: list[int] = []
    whole = synth.synthesise

    def counted(spec):
        def requests():
            for request in workload.requests:
                ids.append(request.id)
                yield request

        workload = whole(spec)
        return replace(workload, requests=requests())

    monkeypatch.setattr(synth, "synthesise", counted)
    return ids


def of_many(requests: int) -> PlanRequest:
    request = plan_request()
    return request.model_copy(update={"traffic": request.traffic.model_copy(update={"requests": requests})})


def test_too_many_requests_are_refused_before_any_is_made(made: list[int]) -> None:
    for look in (plan_tasks.check_few_enough, lambda request: plan_tasks.glance(request, 20_000)):
        with pytest.raises(UserError, match="'36,000,000 requests': are too many to plan for; 100,000 are allowed"):
            look(of_many(36_000_000))
    assert not made


def test_of_much_traffic_the_first_requests_are_looked_at(made: list[int]) -> None:
    first = plan_tasks.glance(of_many(97_200), 1_000).requests
    assert len(list(first)) == 1_000 and len(made) < 10_000
    assert len(list(plan_tasks.glance(of_many(600), 1_000).requests)) == 600
    users = PlanRequest.model_validate(
        {
            "traffic": shapes()["chat"].awaited(users=500),
            "model": "Llama-3.1-8B",
            "gpus": ("H100",),
            "slos": ("ttft_ms p99<=1000",),
        }
    )
    assert len(plan_tasks.glance(users, 1_000).requests) > 5_000  # the first 1,000 would be the warm-up alone


@pytest.mark.parametrize("rate", ["10000", "27"])
def test_no_link_has_the_page_make_more_than_it_shows(tmp_path: Path, made: list[int], rate: str) -> None:
    url = {"traffic": "shape", "prompt": "1e6", "output": "1e5", "minutes": "60", "rate": rate}
    app = plan(tmp_path, **url)
    assert not app.exception and len(made) < 30_000
    assert app.error or "requests in" in shown(app)


@pytest.mark.parametrize("name", list(shapes()))
@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize("cv", [0.5, 10.0])
def test_the_rate_that_is_asked_is_the_rate_that_is_planned_for(name: str, rate: float, cv: float) -> None:
    traffic = shapes()[name].traffic(rate, cv)
    request = plan_request().model_copy(update={"traffic": traffic})
    workload = request.workload(at_named_rate=True)
    assert arrival_rate(workload) == pytest.approx(rate, rel=1e-6)
    gaps = np.diff([made.arrival_ns for made in workload.requests])
    drawn = np.diff([made.arrival_ns for made in synth.synthesise(traffic).requests])
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(np.std(drawn) / np.mean(drawn), rel=1e-6)


def test_a_trace_of_too_many_requests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_tasks, "MOST_REQUESTS", 2)
    digest = keep_trace(tmp_path, CSV)
    assert "'3 requests': are too many to plan for" in one_line(plan(tmp_path, traffic="trace", trace=digest))


# Figures


@pytest.mark.parametrize("most", [300, 40_000])
def test_a_bound_is_named_where_its_line_is(most: float) -> None:
    points = [
        LoadPoint(requests_per_s=at, ttft_p99_ms=value, tpot_p99_ms=None) for at, value in enumerate((100, most), 1)
    ]
    layout = plan_charts.latency(points, "ttft_ms", 2, 3, {300: "SLO p99"}).layout
    (line,) = [shape for shape in layout.shapes if shape.y0 == shape.y1]
    (name,) = [note for note in layout.annotations if note.text == "SLO p99"]
    assert line.y0 == 300
    assert (10**name.y if layout.yaxis.type == "log" else name.y) == pytest.approx(300)
    assert layout.yaxis.dtick == (1 if layout.yaxis.type == "log" else None)


@pytest.mark.parametrize(
    ("low", "high"), [(40, 89), (100, 101), (128, 128), (1, 2), (3, 900), (1, 100_000), (900, 1100)]
)
def test_lengths_have_ticks_however_little_they_differ(low: int, high: int) -> None:
    histogram = length_histogram([low, high])
    ticks = plan_charts.lengths(Lengths(prompt=histogram, output=histogram)).layout.xaxis.tickvals
    assert 1 + (low < high) <= len(ticks) <= 6
    assert all(low <= tick <= high + 1 and tick == int(tick) for tick in ticks)


def test_the_axis_is_logarithmic_only_where_latency_explodes() -> None:
    def axis(*values: float | None) -> str:
        points = [LoadPoint(requests_per_s=at, ttft_p99_ms=v, tpot_p99_ms=None) for at, v in enumerate(values, 1)]
        return plan_charts.latency(points, "ttft_ms", 2, 3, {300: "SLO p99"}).layout.yaxis.type

    assert axis(100, 200, 400) == "linear"
    assert axis(100, 200, 40_000) == "log"
    assert axis(100, 200, None) == "linear"


def test_every_policy_has_a_colour_of_its_own_and_none_is_that_of_the_real() -> None:
    colours = [policy_colour(name) for name in POLICIES]
    assert len(set(colours)) == len(POLICIES) and REAL not in colours
    mine = policy_colour("mine:Policy")
    assert mine == policy_colour("mine:Policy") and mine not in (*colours, REAL)


def test_the_band_goes_out_on_the_fast_end_and_comes_back_on_the_slow() -> None:
    points = [FleetPoint(replicas=n, attainment=0.5, if_slow=0.1 * n, if_fast=0.9) for n in (1, 2)]
    band = plan_charts.attainment(points, chosen=2).data[0]
    assert list(band.x) == [1, 2, 2, 1] and list(band.y) == pytest.approx([90, 90, 20, 10])


def test_every_candidate_is_listed_with_its_room_and_the_recommended_first() -> None:
    best = {**plan_example()["answer"]["recommendation"], "engine": "TP4 H100", "replicas": 3}
    changed = {
        "recommendation": best,
        "spares": 1,
        "runners_up": [{**best, "engine": "TP2 H200"}],
        "dearer": [{"engine": "TP2 H100", "usd_per_hour_at_least": 86.0}],
        "infeasible": [{"engine": "TP1 H100", "reason": "it does not fit"}],
        "candidates": {
            "TP4 H100": {"kv_tokens": 480_160, "kv_requests": 384.2},
            "TP2 H100": {"kv_tokens": 24_768, "kv_requests": 19.8},
            "TP2 H200": {"gpu": "H200"},  # of a plan of an older version
        },
    }
    answer = PlanDocument.read(plan_example()["answer"] | changed)
    offers = answer.shown_offers()
    rows = [dict(zip(offers.titles, row, strict=True)) for row in offers.rows]
    assert [row["fleet"] for row in rows] == ["3+1 × TP4 H100", "3+1 × TP2 H200"]
    assert [row["KV room (tokens)"] for row in rows] == [480_160, None]
    assert rows[0]["KV room (requests)"] == 384.2
    assert [str(line) for line in answer.shown_others()] == [
        "more expensive: TP2 H100, at least $86.00/h (KV room for 24,768 tokens, 20 requests)",
        "not feasible: TP1 H100: it does not fit",
    ]


def test_the_frontiers_table_begins_with_the_recommended_and_the_cheapest() -> None:
    answer = bundled()
    points = answer.points
    recommended = answer.place(answer.recommendation)
    ranked = [points[at] for at in ranked_fleets(points, recommended)]
    assert sorted(map(id, ranked)) == sorted(map(id, points)) and ranked[0] == points[recommended]
    met = [point.met for point in ranked]
    assert met == sorted(met, reverse=True)
    assert [p.usd_per_hour for p in ranked[1:] if p.met] == sorted(p.usd_per_hour for p in ranked[1:] if p.met)


def test_every_headline_figure_that_step_times_decide_carries_its_band() -> None:
    """A fleet has a number of GPUs and a price, however long steps take."""
    answer = PlanDocument.read(plan_example()["answer"])
    best, bands = answer.recommendation, words.headline_bands(answer)
    assert best is not None and best.choices is not None and best.choices.whole_interval is not None
    assert set(bands) == {"attainment", "tok/s per user", "headroom"}
    low, high = best.headroom_band or (0, 0)
    assert low <= best.headroom_percent <= (high or math.inf) and bands["headroom"] == f"{low}–{high} %"
    assert f"headroom {best.headroom} ({low}–{high} %)" in "\n".join(map(str, answer.report()))
    labels = {None: f"{low} or more %", low: f"{low} %"}
    for most, shown_as in labels.items():
        assert best.model_copy(update={"headroom_band": (low, most)}).headroom_range == shown_as


def test_any_other_setting_can_be_varied(tmp_path: Path, started: list[Job]) -> None:
    """Words may name what is bundled, and nothing else: a link is anybody's."""
    link = {"vary": "enable_chunked_prefill=true,false; dtype=bfloat16,float16"}
    settings = asked(plan(tmp_path, **link), started)
    assert settings["vary"] == {"enable_chunked_prefill": [True, False], "dtype": ["bfloat16", "float16"]}
    for link, message in (
        ({"vary": "policy=mine.py:Policy"}, "neither a number nor a valid value"),
        ({"vary": "fleet.router.name=mine.py:Router"}, "neither a number nor a valid value"),
        ({"vary": "dtype=int3"}, "neither a number nor a valid value"),
        ({"vary": "scheduler={a: 1}"}, "neither a number nor a valid value"),
        ({"vary": "scheduler.speculative.model=/etc"}, "neither a number nor a valid value"),
        ({"vary": "max_num_seqs=64,128", "seqs": "32"}, "is set above"),
        ({"vary": "max_num_seqs=" + ",".join(map(str, range(1, 100)))}, "99 combinations"),
    ):
        assert message in one_line(plan(tmp_path, **link))
