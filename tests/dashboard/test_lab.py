"""The Policy lab through Streamlit's AppTest: what it opens on, what it asks, what it shows, and every error path."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from tests.budget import examples
from tests.dashboard.bundled_samples import comparison_request, recordings_on_vllm_request, recordings_request
from tests.dashboard.pages import opened, shown, worded_alike
from tests.dashboard.samples import one_line, toy_run
from tests.dashboard.test_uploads import CSV
from tests.planning.sweep_samples import SCHEDULER, calibrated
from tokentwin.dashboard.bundled import bundled_answer
from tokentwin.dashboard.deployment_text import MOST_KB, keep_deployment, kept_deployment, read_text
from tokentwin.dashboard.palette import policy_colour
from tokentwin.dashboard.policy_lab_page import charts as lab_charts
from tokentwin.dashboard.policy_lab_page.charts import Sides
from tokentwin.dashboard.policy_lab_page.tasks import RECORDED, SIMULATED, check_few_enough, recorded, simulated
from tokentwin.dashboard.policy_lab_page.words import side_names
from tokentwin.dashboard.shapes import mixes
from tokentwin.dashboard.uploads import keep_trace
from tokentwin.planning.compare import document
from tokentwin.planning.compare.document import Row
from tokentwin.planning.compare.request import CompareRequest, Side
from tokentwin.planning.compare.runs import side_scenarios
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.request import Request, Timing
from tokentwin.planning.traffic import mixed
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import PRIVATE
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.synth import synthesise

QUIET = Path("/nowhere")
OWN = "model: Llama-3.1-8B\ndevice: cuda\ngpu_memory_utilization: 0.9\npolicy: sarathi\n"


def progress(stage: str, share: float) -> None:
    """Ignore progress."""


lab = partial(opened, "policy_lab")


def asked(app: AppTest, started: list[Job]) -> dict[str, Any]:
    """Return the settings of the job that the page starts."""
    app.button(key="compare").click().run()
    assert not app.exception
    return started[-1].settings


def small(**changes: Any) -> CompareRequest:
    """Return a comparison that takes a second."""
    usual: dict[str, Any] = {
        "a": Side(settings={"policy": "vllm", "max_num_seqs": 2}),
        "b": Side(settings={"policy": "vllm", "max_num_seqs": 8}),
        "traffic": mixes()["classes"].traffic(5.0, 8.0),
        "seeds": 2,
        "timing": Timing(gpu="H100", model="Llama-3.1-8B"),
    }
    return CompareRequest(**{**usual, **changes})


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """Return the answer to `small`, as a page reads it."""
    return json.loads(json.dumps(simulated(small().as_json(), QUIET, progress)))


def leave(runs: Path, task: str, settings: dict[str, Any], result: Any) -> Job:
    job = Job(runs / "jobs", task, settings)
    job.directory.mkdir(parents=True)
    write_json(job.directory / "request.json", {"task": job.task, "settings": job.settings})
    write_json(job.directory / "result.json", result)
    return job


# What is asked, and the answer


def test_the_parts_of_a_mix_arrive_together_and_share_nothing() -> None:
    parts = mixes()["classes"].traffic(40.0, 20.0)
    workload = mixed(parts)
    requests = list(workload.requests)
    assert [request.id for request in requests] == list(range(len(requests)))
    assert [request.arrival_ns for request in requests] == sorted(request.arrival_ns for request in requests)
    for part in parts:
        alone = [(r.arrival_ns, r.prompt_len, r.output_len) for r in synthesise(part).requests]
        assert alone == [(r.arrival_ns, r.prompt_len, r.output_len) for r in requests if r.tenant == part.tenant]
    shared = [spec.model_copy(update={"tenant": name}) for name in "xy" for spec in mixes()["retrieval"].traffic(9, 9)]
    named = {tenant: set() for tenant in "xy"}
    for request in mixed(shared).requests:
        named[request.tenant] |= {name for name, _ in request.prompt if name != PRIVATE}
    assert named["x"] and named["x"].isdisjoint(named["y"])


def test_the_answer_is_that_of_the_command(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from tokentwin.cli import cli

    spec = mixes()["chat"].traffic(8.0, 10.0)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec[0].model_dump(mode="json", exclude_none=True)))
    bare = {"model": "Llama-3.1-8B", "device": "cuda", "gpu_memory_utilization": 0.9}
    limits = {"a": {"scheduler": {"max_num_seqs": 2}}, "b": {"policy": "sjf"}}
    for side, own in limits.items():
        (tmp_path / f"{side}.yaml").write_text(yaml.safe_dump(bare | own))
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml", "spec.yaml")]
    words = ["compare", *files[:2], "--trace", files[2], "--gpu", "H100", "--slo", "ttft:500", "--format", "json"]
    command = json.loads(CliRunner().invoke(cli, words, catch_exceptions=False).output)
    sides = {side: Side(deployment=bare | own) for side, own in limits.items()}
    request = small(**sides, traffic=spec, seeds=1, bounds={"ttft_ms": 500.0})
    page = simulated(request.as_json(), QUIET, progress)
    for part in ("verdict", "rows", "tallies", "units"):
        assert page[part] == command[part]


def test_more_than_one_place_is_better_and_the_document_says_for_whom(answer: dict[str, Any]) -> None:
    rows = {(row["metric"], row["stat"]): row for row in answer["rows"]}
    assert rows["ttft_ms", "mean"]["b"] < rows["ttft_ms", "mean"]["a"]
    assert {tenant["tenant"] for tenant in answer["tenants"]} == {"users", "pipeline"}
    for key in ("requests", "a", "b"):
        assert sum(tenant[key] for tenant in answer["tenants"]) == pytest.approx(100)
    for side, seqs in (("a", 2), ("b", 8)):
        assert answer[side]["deployment"]["scheduler"]["max_num_seqs"] == seqs
        for curve in answer["cdfs"][side].values():
            assert curve["x"] == sorted(curve["x"]) and curve["y"][-1] == 100


def test_too_much_traffic_is_refused_before_it_is_made() -> None:
    with pytest.raises(UserError, match="too many"):
        check_few_enough(small(traffic=mixes()["chat"].traffic(10_000.0, 86_400.0)))


# A pasted deployment


def test_a_pasted_deployment_is_kept_and_found_by_its_content(tmp_path: Path) -> None:
    digest = keep_deployment(tmp_path, OWN)
    assert digest == keep_deployment(tmp_path, "# the same\n" + OWN)
    assert kept_deployment(tmp_path, digest)["policy"] == "sarathi"
    for name in ("../../x", "", "0" * 16, "/etc/passwd"):
        assert kept_deployment(tmp_path, name) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("policy: os:system\n" + OWN.replace("policy: sarathi\n", ""), "deployment.policy"),
        (OWN.replace("Llama-3.1-8B", "/etc"), "must be a model of the catalogue"),
        (OWN.replace("Llama-3.1-8B", "nobody/Llama-3.1-8B"), "must be a model of the catalogue"),
        (OWN + "fleet: {router: {name: 'os:system'}}", "fleet.router"),
        (OWN + "fleet: {processes: ['os:system']}", "fleet.processes"),
        (
            OWN + "fleet: {pools: [{role: prefill}, {name: b, role: decode}], decode_router: 'os:system'}",
            "fleet.decode_router",
        ),
        (OWN + "fleet: {pools: [{role: encode}, {name: b}], encode_router: 'os:system'}", "fleet.encode_router"),
        (OWN + "fleet: {pools: [{name: p, calibration: /tmp}]}", "is a path"),
        (OWN + "fleet: {pools: [{name: p, gpu: ../x}]}", "gpu"),
        (OWN + "fleet: {pools: [{name: p, deployment: {policy: 'os:system'}}]}", "policy"),
        (OWN + "fleet: {pools: [{name: p, replicas: 90000}]}", "1000"),
        (OWN + "fleet: {pools: [{name: p}], autoscaler: {target: 4, max_replicas: 90000}}", "1000"),
        (OWN + "scheduler: {speculative: {num_speculative_tokens: 2, acceptance_rate: 0.5, model: /etc}}", "catalogue"),
        (OWN + "scheduler: {max_num_seq: 3}", "is not a setting"),
        (OWN + "scheduler: {max_num_seqs: 0}", "max_num_seqs"),
        ("a: &a [1]\nb: *a", "alias"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("max_num_seqs: " + "1" * 5000, "is not YAML"),
        ("policy: 2020-99-99", "is not YAML"),
        ("policy: !!timestamp x", "is not YAML"),
        ("policy: !!bool x", "is not YAML"),
        ("[" * 30_000, "nested too deeply"),
        ("just words", "must be a mapping"),
        ("#" * (1000 * MOST_KB + 1), "too large"),
    ],
)
def test_what_a_text_must_not_say_is_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read_text(text)
    assert "\n" not in str(caught.value)


def test_every_setting_that_is_text_has_been_thought_of() -> None:
    """A new one may name a path or code: then `check_bundled` has to know it."""

    def texts(node: Any) -> set[str]:
        inner = node.get("properties", {}).items() if isinstance(node, dict) else ()
        own = {name for name, field in inner if _is_text(field)}
        below = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return own.union(*map(texts, below))

    def _is_text(field: Any) -> bool:
        kinds = [field, *field.get("anyOf", ())]
        return any(kind.get("type") == "string" and "enum" not in kind and "const" not in kind for kind in kinds)

    named = {"model", "policy", "gpu", "calibration"}
    # Read by the real engine alone (`attention`, `adapters`); of the router, checked; a pool's own; checked against a
    # list of engines; `tower` names one of the catalogue.
    labels = {"attention", "name", "pool", "engine", "adapters", "tower"}
    assert texts(Deployment.model_json_schema()) == named | labels


@examples(0.3)
@given(st.text(max_size=200) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(str))
def test_any_text_is_a_deployment_or_one_line(text: str) -> None:
    try:
        read_text(text)
    except UserError as error:
        assert "\n" not in str(error)


# The page


def test_it_opens_on_a_bundled_answer_to_its_own_inputs(tmp_path: Path) -> None:
    answer = bundled_answer(comparison_request().as_json())
    assert answer is not None, "see dashboard-internals.md"
    app = lab(tmp_path)
    text = shown(app)
    assert answer["verdict"][1:] in text and f"{answer['a']['level']}]" in text and "Jain's fairness index is" in text
    assert len(app.get("plotly_chart")) == 4 and not app.get("progress")
    assert {button.label for button in app.get("download_button")} == {
        *("Parquet of rows", "Parquet of tallies", "CSV of rows", "CSV of tallies", "Report", "JSON")
    }
    assert "req_s" not in app.query_params and not (tmp_path / "jobs").exists()


def test_what_is_changed_is_in_the_link_and_a_link_is_the_same_question(tmp_path: Path, started: list[Job]) -> None:
    app = lab(tmp_path)
    app.selectbox(key="url_a").set_value("sarathi")
    app.selectbox(key="url_b").set_value("edf")
    app.number_input(key="url_req_s").set_value(7.5)
    app.run()
    app.number_input(key="url_a_sarathi_token_budget").set_value(256.0)
    app.number_input(key="url_b_max_num_seqs").set_value(32.0)
    app.number_input(key="url_b_replicas").set_value(3)
    app.text_input(key="url_b_deadlines").set_value("chat=250")
    app.run()
    app.selectbox(key="url_b_router").set_value("least-tokens").run()
    request = CompareRequest.model_validate(asked(app, started))
    assert request.a.settings == {"policy": "sarathi", "sarathi_token_budget": 256}
    assert request.b.settings == {"policy": "edf", "max_num_seqs": 32, "edf_ttft_ms": {"chat": 250.0}}
    assert (request.b.replicas, request.b.router) == (3, "least-tokens")
    assert asked(lab(tmp_path, **app.query_params), started) == request.as_json()
    assert started[-1].id == started[-2].id


def test_an_autoscaler_and_drafts_can_be_compared(tmp_path: Path, started: list[Job]) -> None:
    scaled = {
        "b_scaled": "1",
        "b_queue": "30",
        "b_kv": "60",
        "b_fewest": "0",
        "b_rule": "hpa",
        "b_scrape_delay_s": "10",
    }
    drafts = {"a_drafts": "ngram", "a_by_size": "1-8: 3"}
    request = CompareRequest.model_validate(asked(lab(tmp_path, **scaled, **drafts, seeds="2"), started))
    base = Deployment(model="Llama-3.1-8B", device="cuda")
    fleet = request.b.deployed(base).fleet
    assert fleet is not None and fleet.autoscaler is not None
    (scaler,) = fleet.autoscaler
    assert (scaler.targets, scaler.min_replicas, scaler.rule) == ({"queue": 30, "kv": 0.6}, 0, "hpa")
    assert (scaler.scrape_delay_s, scaler.max_replicas) == (10, 4)
    speculative = request.a.deployed(base).scheduler.speculative
    assert speculative is not None and speculative.num_speculative_tokens_per_batch_size == ((1, 8, 3),)
    assert "must have a target" in shown(lab(tmp_path, b_scaled="1", b_queue="0"))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_asked_for_and_settled(tmp_path: Path, policy: str, started: list[Job]) -> None:
    request = CompareRequest.model_validate(asked(lab(tmp_path, a=policy, seeds="2"), started))
    settled = request.a.deployed(Deployment(model="Llama-3.1-8B", device="cuda"))
    assert settled.policy == policy and len(policy_colour(policy)) == 7


def test_a_finished_job_is_shown_whoever_asked_first(tmp_path, answer, started):
    url = {"a_max_num_seqs": "2", "b": "vllm", "b_max_num_seqs": "8", "mix": "classes", "req_s": "5", "seconds": "8"}
    settings = asked(lab(tmp_path, **url, seeds="2", ttft_within="0", tpot_within="0"), started)
    assert settings == small().as_json()
    leave(tmp_path, SIMULATED, settings, answer)
    text = shown(lab(tmp_path, **url, seeds="2", ttft_within="0", tpot_within="0"))
    assert answer["verdict"][1:60] in text


def test_a_failed_job_says_why_in_a_line(tmp_path: Path) -> None:
    job = Job(tmp_path / "jobs", SIMULATED, small().as_json())
    job.directory.mkdir(parents=True)
    write_json(job.directory / "outcome.json", {"state": "failed", "error": "model: 'X' does not fit"})
    url = {"a_max_num_seqs": "2", "b": "vllm", "b_max_num_seqs": "8", "mix": "classes", "req_s": "5", "seconds": "8"}
    app = lab(tmp_path, **url, seeds="2", ttft_within="0", tpot_within="0")
    assert "does not fit" in one_line(app) and app.button(key="compare")


def test_a_pasted_deployment_is_a_side(tmp_path: Path, started: list[Job]) -> None:
    app = lab(tmp_path, b="pasted")
    assert "Paste the deployment of B." in shown(app)
    app.text_area(key="b_yaml_text").set_value(OWN).run()
    settings = asked(app, started)
    assert settings["b"]["deployment"]["policy"] == "sarathi"
    assert asked(lab(tmp_path, b="pasted", b_yaml=app.query_params["b_yaml"]), started) == settings
    assert "is not on this server" in shown(lab(tmp_path, b="pasted", b_yaml="0" * 16))


@pytest.mark.parametrize(
    ("url", "text", "says"),
    [
        ({"b": "pasted"}, OWN.replace("sarathi", "os:system"), "deployment.policy"),
        ({"b": "pasted"}, OWN + "policy: fair", "policy is set twice"),
        ({"b": "pasted"}, "a: [", "is not YAML"),
        ({"b": "edf", "b_deadlines": "soon"}, None, "edf_ttft_ms"),
        ({"req_s": "10000", "seconds": "86400"}, None, "'864,000,000 requests': are too many; 200,000 are allowed"),
        ({"req_s": "100", "seconds": "1000", "seeds": "50"}, None, "requests in all runs': are too many"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, url: dict[str, str], text: str | None, says: str) -> None:
    app = lab(tmp_path, **url)
    if text is not None:
        app.text_area(key="b_yaml_text").set_value(text).run()
    assert says in one_line(app) and not app.button


@pytest.mark.usefixtures("read_here")
def test_an_uploaded_trace_is_offered(tmp_path: Path, started: list[Job]) -> None:
    assert "Upload a trace." in shown(lab(tmp_path, offered="trace"))
    digest = keep_trace(tmp_path, CSV)
    settings = asked(lab(tmp_path, offered="trace", lab_trace=digest, rate_scale="2"), started)
    assert settings["traffic"].endswith(f"{digest}.parquet") and settings["rate_scale"] == 2
    assert settings["seeds"] == 1
    assert "is not on this server" in shown(lab(tmp_path, offered="trace", lab_trace="../../etc/passwd"))


def test_a_calibration_under_the_runs_can_time_the_steps(tmp_path: Path, started: list[Job]) -> None:
    calibrated(tmp_path / "cal")
    settings = asked(lab(tmp_path, timing="cal", b="sjf"), started)
    assert settings["timing"]["calibration"] == str((tmp_path / "cal").resolve())
    answer = simulated(settings | {"traffic": small().model_dump(mode="json")["traffic"], "seeds": 1}, QUIET, progress)
    assert answer["a"]["calibration"] == "invented"
    assert "Step times from: '../cal' of the link is not available" in shown(lab(tmp_path, timing="../cal"))


# Recordings


def engine_pair(out: Path, calibration: Path, repeats: int = 1) -> None:
    """Runs that took what the calibration says, told to be real: A has one place, B sixteen."""
    workload = mixed(mixes()["tenants"].traffic(12.0, 20.0))
    requests = [replace(request, prompt=((PRIVATE, 50),), output_len=8) for request in workload.requests]
    workload = replace(workload, requests=requests)
    for side, seqs in (("a", 1), ("b", 16)):
        deployment = Deployment(scheduler=SCHEDULER.model_copy(update={"max_num_seqs": seqs}))
        (scenario,) = side_scenarios([workload], str(calibration), None, deployment)
        run = {"run_id": side, "clock": "wall", "deployment": deployment.model_dump_json(), "workload": workload.name}
        for number in range(repeats):
            with RecordingWriter(out / side / f"run-{number + 1}", run, workload=workload, overwrite=True) as writer:
                writer.add_requests(scenario.requests().to_pydict())


def test_without_recordings_the_real_engines_bundled_pair_is_shown(tmp_path: Path, started: list[Job]) -> None:
    app = lab(tmp_path, compare="recordings")
    text = shown(app)
    assert not app.exception and not started, "bundled with its answer"
    assert (app.query_params["rec_a"], app.query_params["rec_b"]) == ("bundled pair/a", "bundled pair/b")
    assert len(app.get("plotly_chart")) == 5 and "Does the simulator show the same differences?" in text
    assert "The engine does not contradict the simulator" in text and "--engine --repeats 3" in text


def test_the_bundled_pair_stands_beside_the_same_change_on_vllm(tmp_path: Path, started: list[Job]) -> None:
    app = lab(tmp_path, compare="recordings")
    assert not started and "B - A on each engine" in shown(app) and "on vLLM 0.32.0" in shown(app)
    table = next(frame.value for frame in app.dataframe if "our engine" in frame.value.columns)
    assert [*table.columns] == ["metric", "simulated", "our engine", "vLLM 0.32.0"] and len(table) >= 9
    assert "B - A on each engine" not in shown(lab(tmp_path, compare="recordings", also="none"))


def test_a_pair_of_another_engine_is_compared_at_once(tmp_path: Path, started: list[Job]) -> None:
    calibration = calibrated(tmp_path / "cal")
    for name in ("ours", "theirs"):
        engine_pair(tmp_path / name, calibration)
    where = {"compare": "recordings", "rec_a": "ours/a", "rec_b": "ours/b"}
    lab(tmp_path, **where)
    (job,) = started
    leave(tmp_path, RECORDED, job.settings, json.loads(json.dumps(recorded(job.settings, QUIET, progress))))
    lab(tmp_path, **where, also="theirs")
    (_, other) = started
    assert other.settings["a"].endswith("theirs/a") and "timing" not in other.settings
    leave(tmp_path, RECORDED, other.settings, json.loads(json.dumps(recorded(other.settings, QUIET, progress))))
    app = lab(tmp_path, **where, also="theirs")
    assert not app.exception and "0 are reversed" in shown(app)
    table = next(frame.value for frame in app.dataframe if "our engine" in frame.value.columns)
    assert [*table.columns] == ["metric", "our engine", "our engine (2)"]


@pytest.mark.parametrize("asked", [recordings_request, recordings_on_vllm_request])
def test_the_bundled_pair_is_what_its_answer_says(asked: Callable[[], Request]) -> None:
    """The bundled answer is made anew from the bundled recordings, number for number."""
    settings = asked().as_json()
    answer = json.loads(json.dumps(recorded(settings, QUIET, progress)))
    known = bundled_answer(settings)
    assert known is not None
    read = document.ComparisonDocument.read
    made, kept = (read(one).as_json() for one in ({**answer, "inputs": known["inputs"]}, known))
    assert worded_alike(made) == worded_alike(kept)
    assert {answer[side]["clock"] for side in "ab"} == {"wall"}
    assert [answer[side]["deployment"]["policy"] for side in "ab"] == ["vllm", "sjf"]


@pytest.mark.deep
def test_nor_does_it_depend_on_the_cpu() -> None:
    """The same again on a CPU without this one's vector units, as far as numpy is concerned."""
    units = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    again = test_the_bundled_pair_is_what_its_answer_says.__name__
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(units)}
    script = f"from tests.dashboard.test_lab import {again}, recordings_request; {again}(recordings_request)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ones_own_recordings_come_before_the_bundled_pair(tmp_path: Path, started: list[Job]) -> None:
    for name in "xy":
        toy_run(tmp_path / name, "wall", seed=1)
    app = lab(tmp_path, compare="recordings")
    assert {app.query_params["rec_a"], app.query_params["rec_b"]} == {"x", "y"}
    assert "bundled pair/a" in next(box for box in app.selectbox if box.key == "url_rec_a").options


def test_recordings_are_compared_side_by_side(tmp_path: Path, started: list[Job]) -> None:
    engine_pair(tmp_path / "out", calibrated(tmp_path / "cal"), repeats=2)
    app = lab(tmp_path, compare="recordings")
    assert (app.query_params["rec_a"], app.query_params["rec_b"]) == ("out/a", "out/b")
    (job,) = started  # at once: to compare two recordings takes seconds
    settings = job.settings
    answer = json.loads(json.dumps(recorded(settings, QUIET, progress)))
    assert answer["verdict"].startswith("B is better") and answer["runs"] == 2 and answer["ranking"] is None
    leave(tmp_path, RECORDED, settings, answer)
    app = lab(tmp_path, compare="recordings")
    assert "B is better" in shown(app) and "measured]" in shown(app)
    assert len(app.get("plotly_chart")) == 4
    engine_pair(tmp_path / "out", tmp_path / "cal", repeats=2)
    assert "have not been compared" in shown(lab(tmp_path, compare="recordings")), (
        "a later recording is another question"
    )
    assert len(started) == 2 and started[1].settings != settings


def test_what_takes_longer_and_what_was_cancelled_waits_for_a_click(tmp_path: Path, started: list[Job]) -> None:
    engine_pair(tmp_path / "out", calibrated(tmp_path / "cal"))
    lab(tmp_path, compare="recordings", beside="cal")
    assert not started
    lab(tmp_path, compare="recordings")
    (job,) = started
    job.directory.mkdir(parents=True)
    write_json(job.directory / "outcome.json", {"state": "cancelled", "error": "cancelled"})
    app = lab(tmp_path, compare="recordings")
    assert len(started) == 1 and app.button(key="compare") and "Cancelled" in app.info[0].value


def test_a_ranking_is_held_against_the_engine(tmp_path: Path, started: list[Job]) -> None:
    engine_pair(tmp_path / "out", calibrated(tmp_path / "cal"))
    settings = asked(lab(tmp_path, compare="recordings", beside="cal"), started)
    answer = json.loads(json.dumps(recorded(settings, QUIET, progress)))
    assert answer["rows"] == answer["simulated"]["rows"] and answer["simulated"]["a"]["level"] == "extrapolated"
    assert {row["outcome"] for row in answer["ranking"]} == {"holds"}
    leave(tmp_path, RECORDED, settings, answer)
    app = lab(tmp_path, compare="recordings", beside="cal")
    assert "The ranking holds on the engine" in shown(app) and len(app.get("plotly_chart")) == 5
    answer["ranking"][0]["outcome"] = "reversed"
    write_json(Job(tmp_path / "jobs", RECORDED, settings).directory / "result.json", answer)
    (warning,) = lab(tmp_path, compare="recordings", beside="cal").warning
    assert "DOES NOT HOLD on the engine" in warning.value


def test_only_a_real_recording_is_held_against(tmp_path: Path) -> None:
    for name in "xy":
        toy_run(tmp_path / name, "virtual", seed=1)
    asked = {"a": str(tmp_path / "x"), "b": str(tmp_path / "y"), "stamps": [0, 0], "timing": {"gpu": "H100"}}
    with pytest.raises(UserError, match="is simulated"):
        recorded(asked, QUIET, progress)


def test_recordings_of_other_workloads_are_one_line(tmp_path: Path) -> None:
    toy_run(tmp_path / "x", "wall", seed=1)
    toy_run(tmp_path / "y", "wall", seed=1, count=20)
    with pytest.raises(UserError, match="same workload"):
        recorded({"a": str(tmp_path / "x"), "b": str(tmp_path / "y"), "stamps": [0, 0]}, QUIET, progress)


# Figures


def row(percent: float, low: float | None, high: float | None, better: str) -> Row:
    b = 200.0 + 2 * percent
    return Row(metric="ttft_ms", stat=f"p{percent:g}", a=200, b=b, low=low, high=high, better=better, percent=percent)


def test_an_interval_is_drawn_in_percent_of_a_and_coloured_by_who_is_better() -> None:
    colours = Sides("#111111", "#222222")
    rows = [row(-20, -60.0, -20.0, "B"), row(10, 10.0, 30.0, "A"), row(1, -8.0, 12.0, ""), row(2, None, None, "")]
    figure = lab_charts.differences(rows, colours)
    by = {trace.name: trace for trace in figure.data}
    assert (by["B is better"].marker.color, by["A is better"].marker.color) == ("#222222", "#111111")
    bars = by["B is better"].error_x
    assert (by["B is better"].x[0] - bars.arrayminus[0], by["B is better"].x[0] + bars.array[0]) == (-30.0, -10.0)
    assert list(by["no clear difference"].marker.symbol) == ["circle", "diamond"]
    assert figure.layout.yaxis.categoryarray[-1] == lab_charts.label(rows[0]), "the first row is on top"


def test_winners_and_losers_add_up_to_everybody(answer: dict[str, Any]) -> None:
    figure = lab_charts.winners(document.ComparisonDocument.read(answer).tallies, Sides("#111111", "#222222"))
    groups = {(trace.xaxis, y): 0.0 for trace in figure.data for y in trace.y}
    for trace in figure.data:
        for x, y in zip(trace.x, trace.y, strict=True):
            groups[trace.xaxis, y] += x
    assert list(groups.values()) == pytest.approx([100] * 10)
    assert {y for _, y in groups} == {"all", "tenant users", "tenant pipeline", "class chat", "class batch"}


def test_two_sides_never_have_one_colour_and_a_policy_keeps_its_own() -> None:
    for a in POLICIES:
        for b in POLICIES:
            colours = lab_charts.side_colours(a, b)
            assert colours.a == policy_colour(a) and colours.a != colours.b
            assert a == b or colours.b == policy_colour(b)


def test_where_nothing_finishes_or_is_claimed_a_figure_says_so() -> None:
    empty = {name: {"x": [], "y": []} for name in lab_charts.LATENCIES}
    nothing = document.Cdfs.model_validate({"a": empty, "b": empty})
    figures = [
        lab_charts.cdfs(nothing, Sides("a", "b"), Sides("#111111", "#222222")),
        lab_charts.differences([], Sides("#111111", "#222222")),
        lab_charts.ranking([]),
    ]
    assert [len(figure.layout.annotations) for figure in figures] == [1, 1, 1]


def test_sides_are_named_by_what_tells_them_apart() -> None:
    def side(policy: str, replicas: int = 1, **scheduler: Any) -> document.Side:
        deployment = Deployment.model_validate({"policy": policy, "scheduler": scheduler}).model_dump(mode="json")
        return document.Side(deployment=document.RanDeployment(**deployment), replicas=replicas, router="round-robin")

    assert side_names(side("vllm"), side("fair")) == ("vllm", "fair")
    few, many = side_names(side("vllm", max_num_seqs=8), side("vllm", 3, max_num_seqs=9))
    assert (few, many) == ("vllm, 1 replica, max_num_seqs 8", "vllm, 3 replicas, max_num_seqs 9")
    long = side_names(side("vllm"), side("edf", 2, max_num_seqs=9, num_blocks=77, block_size=32))[1]
    assert long.startswith("edf, 2 replicas, ") and long.endswith(", 2 more")


def test_requests_that_do_not_finish_are_told(tmp_path: Path, answer: dict[str, Any], started: list[Job]) -> None:
    lost = {"metric": "finished", "stat": "share", "a": 0.25, "b": 0.5, "low": None, "high": None}
    extended = {**answer, "rows": [*answer["rows"], {**lost, "percent": 100.0, "better": ""}]}
    leave(tmp_path, SIMULATED, asked(lab(tmp_path, seconds="8"), started), extended)
    app = lab(tmp_path, seconds="8")
    assert "25.0 % of the requests finish on A, 50.0 % on B" in shown(app)
    assert "finish on A" not in shown(lab(tmp_path))
