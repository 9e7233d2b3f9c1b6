"""The Trust page through Streamlit's AppTest: what it opens on, what it shows of each rung, and every error path."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("streamlit")


from tests.dashboard.badges import badges
from tests.dashboard.bundled_samples import condense
from tests.dashboard.pages import charts, opened, parameter, shown, text
from tests.dashboard.samples import one_line, report, write_report
from tokentwin.calibration.steps.external_calibration import identity, predicted_cost
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.calibration.validation.report import RunRow, ValidationReport, load_report
from tokentwin.dashboard.bundled import DEMO, DEMO_ON_VLLM, EXTERNAL_SAMPLE
from tokentwin.dashboard.trust_page import results
from tokentwin.dashboard.trust_page.charts import errors
from tokentwin.dashboard.trust_page.domain import domain
from tokentwin.dashboard.trust_page.external_charts import errors_by_source
from tokentwin.dashboard.trust_page.own_question import Question, judged
from tokentwin.dashboard.trust_page.results import (
    DECISIONS,
    EXTERNAL,
    External,
    load_external,
    median_errors_pct,
    newest_clients,
    newest_decisions,
)
from tokentwin.dashboard.trust_page.rungs import rungs
from tokentwin.planning.learn.watched import Layer, WatchedServer
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.planning.repricing import Source
from tokentwin.planning.simulation import recorded
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory):
    """A directory with one simulated run on a GPU, where no step is far from what kernels were measured at."""
    return predicted_run(tmp_path_factory.mktemp("gpu"), 1)


def predicted_run(runs: Path, prompt_scale: int, gpu: str = "H100") -> Path:
    scheduler = SchedulerConfig(
        max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=8192 * prompt_scale, num_blocks=30000
    )
    deployment = Deployment(model="Llama-3.1-8B", device="cuda", scheduler=scheduler)
    spec = {
        "requests": 30,
        "arrivals": {"kind": "poisson", "rate": 10},
        "prompt": {"kind": "lognormal", "mean": 500 * prompt_scale, "sigma": 0.5, "max": 6000 * prompt_scale},
        "output": {"kind": "exponential", "mean": 40, "max": 200},
    }
    cost = predicted_cost(gpu, deployment)
    simulate_to(runs / "run", synthesise(parse_spec(spec)), deployment, cost, calibration=identity(gpu))
    return runs


trust = partial(opened, "trust")


# A learnt server


def test_a_server_that_has_changed_is_a_line_above_the_report(tmp_path: Path) -> None:
    twin = tmp_path / "my-twin"
    twin.mkdir()
    for seen_ms, changed in ((9.0, False), (10.1, True)):
        steps = Layer(layer="decode steps", seen=seen_ms, twin=9.0, unit="ms", allowed_pct=6.0)
        look = WatchedServer(url="http://server:8000", at="2026-11-27 UTC", layers=(steps,))
        (twin / "watched.json").write_text(look.dumps())
        words = shown(trust(tmp_path))
        line = "my-twin: The server has changed since its twin was learnt: decode steps +12 % (2026-11-27 UTC)."
        assert (line in words) == changed, words


# The report


def test_trust_opens_with_the_verdict(samples):
    app = trust(samples)
    assert not app.exception and not app.error and not app.warning
    shown = text(app)
    assert "TTFT p50 -3.1 % (floor 2.4 %)" in text(app)
    assert "**1,234 of 1,234** steps identical" in shown
    assert "median error **4.0 %** or less" in shown
    assert "**9 of 14** errors within the noise" in shown
    assert "TTFT p99 +8.5 % (floor 5.8 %)" in shown
    cdfs, errors = charts(app)
    assert len(cdfs["data"]) == 12  # three real repeats and the simulation, of three metrics
    assert len(errors["layout"]["shapes"]) == 14
    assert app.selectbox(key="url_report").value == "validation" and not dict(app.query_params)


def test_a_disturbed_run_says_so(tmp_path, samples):
    content = report(samples, disturbed=True)
    content["rungs"]["replay"] |= {"identical": 1200, "first_difference": "step 1201: 64 tokens, not 48"}
    content["extrapolated_share"] = 0.042
    write_report(tmp_path / "validation", content)
    app = trust(tmp_path)
    assert "badge[:material/help: unknown]" in text(app)
    assert "canary steps drifted by 31 %" in app.warning[0].value
    assert ":gray[:material/help:] **9 of 14** errors" in text(app)
    assert "**1,200 of 1,234** steps identical" in text(app)
    assert "step 1201" in text(app)


def test_real_runs_that_differ_too_much_tell_nothing(tmp_path, samples):
    """As on a machine at twice its load: whatever is predicted lies within such noise, and in such bands."""
    content = report(samples)
    rows = content["rungs"]["run"]["rows"]
    for row in rows:
        row |= {"low": 0.5 * row["real"], "high": 2 * row["real"]}
    rows[0]["floor_pct"] = 168.0
    one, all_of_them = ValidationReport.model_validate(content), [{**row, "floor_pct": 168.0} for row in rows]
    assert rungs(one, None)[2].headline.startswith("**9 of 13** ")
    assert all(figure in rungs(one, None)[2].detail for figure in ("1 of 14 figures", "168 %"))
    assert rungs(one, None)[4].headline == "**13 of 13** measured figures in their 90 % band"
    rows[:] = all_of_them
    content["rungs"]["step"]["regimes"]["decode"]["median_error_pct"] = 80.0
    write_report(tmp_path / "validation", content)
    app = trust(tmp_path)
    assert text(app).count(":gray[:material/help:] too noisy to say") == 1
    assert "unknown" in {badge.level for badge in badges(app)}
    assert rungs(ValidationReport.model_validate(content), None)[4].headline == "too noisy to say"


def test_the_furthest_out_of_the_published_engines_is_named():
    published = load_external(EXTERNAL_SAMPLE)
    errors = {(case.title, error) for case in published.cases for error in median_errors_pct(case.rows).values()}
    title, worst = max(errors, key=lambda pair: pair[1])
    detail = rungs(None, published)[3].detail
    assert f"Largest: {title}, " in detail and f"{worst:.1f} %" in detail


def test_a_report_whose_recordings_are_gone_still_opens(tmp_path, samples):
    content = report(samples)
    content["recordings"] = {"real": ["gone"], "simulated": None}
    write_report(tmp_path / "validation", content)
    (tmp_path / "validation" / "step_residuals.parquet").unlink()
    app = trust(tmp_path)
    assert not app.exception
    assert "gone" in app.warning[0].value
    assert "no errors of single steps" in text(trust(tmp_path, view="steps"))


def test_held_out_steps_are_a_view_of_their_own(samples):
    (residuals,) = charts(trust(samples, view="steps"))
    assert len(residuals["data"]) == 9


def test_a_report_that_climbed_nothing_still_opens(tmp_path):
    write_report(tmp_path / "validation", {"verdict": "Nothing was compared.", "of_a_later_version": 1})
    app = trust(tmp_path)
    assert not app.exception and not app.error
    assert text(app).count("does not contain this check") == 3
    assert "% of the published figures" in text(app)  # rungs 4 and 5 stand on the bundled figures


def test_without_reports_the_page_opens_on_the_bundled_demo_and_says_so(tmp_path):
    app = trust(tmp_path / "nowhere")
    assert not app.exception and not app.error
    shown = text(app)
    assert "This report is **bundled**" in shown
    assert "`tokentwin demo`" in shown and not app.code  # the highlighter would come before the first figure
    assert load_report(DEMO / "validation").verdict[1:] in shown
    assert "does not contain this check" not in shown and shown.count("Rung") == 7
    assert len(charts(app)) == 3


def test_the_bundled_report_of_vllm_says_so(tmp_path):
    app = trust(tmp_path / "nowhere", report="bundled: tokentwin demo --engine vllm")
    assert not app.exception and not app.error
    assert load_report(DEMO_ON_VLLM / "validation").verdict[1:] in text(app)
    assert "on vLLM 0.32.0" in text(app) and "The error on each engine" in text(app)
    (by_engine,) = (frame.value for frame in app.dataframe if "vLLM 0.32.0" in frame.value)
    assert list(by_engine)[2:] == ["vLLM 0.32.0", "our engine"]
    mean = next(
        row for row in load_report(DEMO_ON_VLLM / "validation").rows if (row.metric, row.stat) == ("ttft_ms", "mean")
    )
    assert by_engine["vLLM 0.32.0"][0].startswith(f"{mean.error_pct:+.1f} %")


def test_both_verdicts_stand_side_by_side(tmp_path, samples):
    content = report(samples)
    for row in content["rungs"]["run"]["rows"]:
        row |= {"weather_simulated": 1.01 * row["real"], "weather_error_pct": 1.0, "weather_floor_pct": 2.0}
    of_steps = content["rungs"]["step"]
    of_steps["same_weather"] = {name: of | {"median_error_pct": 0.7} for name, of in of_steps["regimes"].items()}
    content["disturbance"] = "others took 43 % of the engine's time"
    write_report(tmp_path / "validation", content)
    app = trust(tmp_path)
    assert not app.exception and not app.error
    shown, count = text(app), len(content["rungs"]["run"]["rows"])
    assert f"within the noise of real runs blind, {count} of {count} with the machine's speed known" in shown
    assert all(figure in shown for figure in ("**4.0 %** or less blind, 0.7 %", "took 43 % of the engine's time"))
    headings = [heading.value for heading in app.header]
    assert headings.index("Error of the blind prediction") + 1 == headings.index("Error with the machine's speed known")


def test_the_bundled_demo_is_what_condensing_makes_and_small(tmp_path):
    laid_out = tmp_path / "demo"
    shutil.copytree(DEMO, laid_out)
    condense(laid_out, tmp_path / "again")
    files = sorted(path.relative_to(DEMO) for path in DEMO.rglob("*.*"))
    again = [path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*")]
    assert files == sorted(again)
    assert sum((DEMO / name).stat().st_size for name in files) < 330_000
    for name in ("real-1", "validation/simulated"):
        first, again = (Recording.load(folder / name) for folder in (DEMO, tmp_path / "again"))
        assert first.requests.equals(again.requests) and first.run == again.run
    with pytest.raises(UserError, match="cannot be read"):
        condense(tmp_path, tmp_path / "nothing")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"created": ""}',
        '{"verdict": 3}',
        '{"verdict": "", "rungs": {"run": {"rows": [{}]}}}',
        "\xff",
    ],
)
def test_a_corrupt_report_is_one_line(tmp_path, content):
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "report.json").write_bytes(content.encode("latin-1"))
    assert "report.json" in one_line(trust(tmp_path))


def test_corrupt_residuals_are_one_line(tmp_path, samples):
    write_report(tmp_path / "validation", report(samples))
    (tmp_path / "validation" / "step_residuals.parquet").write_text("not parquet")
    assert "step_residuals.parquet" in one_line(trust(tmp_path, view="steps"))


def test_an_unknown_report_in_the_url_is_said_and_never_a_path(samples):
    app = trust(samples, report="../../etc")
    assert "../../etc" in app.info[0].value
    assert parameter(app, "report") == "validation"


# Rung 5


def test_a_whisker_is_the_band_around_the_simulated_number():
    row = {"metric": "ttft_ms", "real": 100.0, "floor_pct": 2.0}
    rows = [
        RunRow(stat="p50", simulated=110.0, error_pct=10.0, low=95.0, high=130.0, **row),
        RunRow(stat="p99", simulated=80.0, error_pct=-20.0, low=70.0, high=90.0, **row),
    ]
    assert [row.covered for row in rows] == [True, False]
    bars = errors(rows).data[0]
    assert np.allclose(np.array(bars.y) + bars.error_y.array, [30, -10])
    assert np.allclose(np.array(bars.y) - bars.error_y.arrayminus, [-5, -30])
    without = RunRow(stat="p50", simulated=110.0, error_pct=10.0, **row)
    assert without.covered is None and errors([without]).data[0].error_y.array is None


# The domain


def test_the_run_in_question_is_the_reports_own_and_the_url_chooses_another(tmp_path):
    shutil.copytree(DEMO, tmp_path / "runs")
    app = trust(tmp_path / "runs", view="domain")
    assert app.selectbox(key="url_scenario").value == "validation/simulated"
    share = json.loads((DEMO / "validation" / "report.json").read_text())["extrapolated_share"]
    assert f"**{100 * share:.1f} %** of the" in text(app)  # as the cost model counted while it simulated
    real = trust(tmp_path / "runs", view="domain", scenario="real-1")
    assert not real.exception and not real.error
    assert any(trace.get("name") == "real step" for trace in charts(real)[0]["data"])
    gone = trust(tmp_path / "runs", view="domain", scenario="../../etc")
    assert "../../etc" in gone.info[0].value and parameter(gone, "scenario") == "validation/simulated"


def test_every_step_is_marked_once_and_lies_in_the_map():
    run = Recording.load(DEMO / "validation" / "simulated")
    maps = domain(run, Source(str(DEMO / "calibration"), None))
    assert len(maps.decode.points) + len(maps.prompts.points) == maps.steps == run.steps.num_rows
    for panel in (maps.decode, maps.prompts):
        assert panel.known.shape == (len(panel.y) - 1, len(panel.x) - 1)
        assert (np.isnan(panel.known) ^ np.isnan(panel.outside)).all()
        assert (panel.points >= [panel.x[0], panel.y[0]]).all() and (panel.points <= [panel.x[-1], panel.y[-1]]).all()


def test_kernel_tables_have_a_map_too(on_a_gpu):
    app = trust(on_a_gpu, view="domain", scenario="run")
    assert not app.exception and not app.error
    assert "kernel tables of the H100" in text(app)
    maps = domain(Recording.load(on_a_gpu / "run"), Source(None, "H100"))
    assert not maps.counted and maps.level == "interpolated" and maps.beyond.steps == 0
    long = domain(Recording.load(predicted_run(on_a_gpu / "long", 16) / "run"), Source(None, "H100"))
    assert long.level == "extrapolated" and "beyond measured shapes" in long.reason
    assert 0 < long.beyond.steps <= 1 and str(long.beyond) in long.trust.reason


def test_of_a_sample_of_the_steps_it_says_of_how_many(on_a_gpu, monkeypatch):
    monkeypatch.setattr("tokentwin.dashboard.trust_page.domain._MOST_JUDGED", 50)
    run = Recording.load(on_a_gpu / "run")
    maps = domain(run, Source(None, "H100"))
    assert (maps.steps, maps.all_steps) == (50, run.steps.num_rows)
    assert f"none of 50 (of {maps.all_steps:,}) steps lies outside" in maps.trust.reason


def test_a_run_says_the_same_of_itself_as_the_map_of_its_steps(tmp_path):
    """`tokentwin simulate` and a fleet of a plan note it; here of prompts far beyond those that were measured."""
    made = Recording.load(predicted_run(tmp_path / "long", 16) / "run")
    alone = recorded_deployment(made).model_copy(update={"fleet": None})
    scenario = price_scenario(made.workload(), None, "H100", alone)
    done = recorded(scenario, tmp_path / "run", band=False)
    maps = domain(done.recording, Source(None, "H100"))
    assert maps.level == done.trust.level == "extrapolated"
    assert done.trust.reason.endswith(f"(least certain: prefill attention), in {maps.beyond}")
    few = recorded(price_scenario(made.workload(), None, "H100", alone), tmp_path / "few", band=False, details=False)
    assert few.trust.reason.endswith("were not measured at such sizes (least certain: prefill attention)")


def test_a_run_of_an_unknown_calibration_is_said_to_be_one(tmp_path, samples):
    app = trust(samples, view="domain")
    assert "There is no map" in text(app) and "(toy)" in text(app)
    shutil.copytree(DEMO, tmp_path / "runs")
    (tmp_path / "runs" / "calibration" / "steps.parquet").write_text("not parquet")
    assert "calibration/steps.parquet" in one_line(trust(tmp_path / "runs", view="domain"))


# Rung 4


def test_published_engines_are_shown_with_their_errors_and_targets(tmp_path):
    app = trust(tmp_path, view="engines")
    bundled = load_external(EXTERNAL_SAMPLE)
    met = sum(target.met for target in bundled.targets)
    assert f"**{met} of {len(bundled.targets)}** targets met, {len(bundled.cases)} sources" in text(app)
    dots = [trace for trace in charts(app)[0]["data"] if trace["mode"] == "markers"]
    assert any(trace["name"] == "in the 90 % band" for trace in dots)
    anchored = trust(tmp_path, view="engines", prediction="anchored")
    assert not anchored.exception and parameter(anchored, "prediction") == "anchored"


def test_every_figure_of_a_kind_that_is_drawn_is_a_dot():
    bundled = load_external(EXTERNAL_SAMPLE)
    for column in ("blind", "anchored"):
        figure = errors_by_source(bundled.cases, column)
        dots = sum(len(trace.x) for trace in figure.data if trace.mode == "markers")
        assert dots == sum(row.error_pct(column) is not None for case in bundled.cases for row in case.rows)
    assert errors_by_source([], "blind").layout.annotations[0].text.startswith("No source")


def test_results_of_ones_own_come_before_the_bundled_ones(tmp_path, samples):
    content = json.loads((EXTERNAL_SAMPLE / EXTERNAL).read_text())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / EXTERNAL).write_text(json.dumps({**content, "cases": content["cases"][:1]}))
    assert "targets met, 1 source" in text(trust(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", '{"cases": [{}]}', '{"cases": []}'])
def test_corrupt_external_results_are_one_line(tmp_path, content):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / EXTERNAL).write_text(content)
    assert EXTERNAL in one_line(trust(tmp_path))


# Rung 6


def client_results(folder: Path, content: Any) -> Path:
    (folder / "rung").mkdir(parents=True)
    (folder / "rung" / "clients.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_what_clients_saw_is_a_rung_and_a_table(tmp_path):
    row = {"metric": "ttft_ms", "statistic": "mean", "real": 20.0, "engine_alone": 10.0, "simulated": 19.0}
    row |= {"error_pct": -5.0, "floor_pct": 8.0, "in_weather": 20.4, "in_weather_error_pct": 2.0}
    other = {**row, "metric": "itl_ms", "error_pct": 3.0, "in_weather_error_pct": -1.0}
    rows = [row, other, {**row, "statistic": "p99"}]
    app = trust(client_results(tmp_path, {"created": "", "clients": ["a", "b"], "rows": rows}))
    assert not app.exception and not app.error
    page = text(app)
    for figures in ("TTFT -5.0 %, ITL +3.0 % blind", "TTFT +2.0 %, ITL -1.0 %", "TTFT 8.0 %, ITL 8.0 %"):
        assert figures in page
    table = next(frame.value for frame in app.dataframe if "with the front door" in frame.value.columns)
    assert table["clients"].tolist() == [20.0] * 3 and table["its error"].tolist() == [2.0, -1.0, 2.0]


@pytest.mark.parametrize("content", ["", "[]", {"rows": []}, {"rows": [{}]}])
def test_corrupt_results_of_clients_are_one_line(tmp_path, content):
    with pytest.raises(UserError, match=r"rung/clients.json") as error:
        newest_clients(client_results(tmp_path, content))
    assert "\n" not in str(error.value)


def test_the_page_goes_on_without_corrupt_results_of_clients(tmp_path):
    assert "clients.json" in one_line(trust(client_results(tmp_path, "")))


# Rung 7


def decision_results(folder: Path, content: Any) -> Path:
    (folder / "choices").mkdir(parents=True)
    (folder / "choices" / DECISIONS).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_what_choices_were_worth_is_a_rung_and_a_table(tmp_path):
    score = {"questions": 1200, "groups": 30, "low": 0.71, "high": 0.79, "broke": 0.05}
    rules = [{"rule": "ours", "utility": 0.75, **score}, {"rule": "roofline", "utility": 0.2, **score}]
    app = trust(decision_results(tmp_path, {"rules": rules}))
    assert not app.exception and not app.error
    assert "**75 %** of the best" in text(app) and "5 % of choices broke" in text(app)
    assert "1,200 questions" in text(app) and "interval 71–79 %. With other rules of choice: roofline 20 %" in text(app)
    table = next(frame.value for frame in app.dataframe if "utility (%)" in frame.value.columns)
    assert table["choice by"].tolist() == ["ours", "roofline"]


@pytest.mark.parametrize("content", ["", "[]", {"rules": []}, {"rules": [{}]}])
def test_corrupt_results_of_choices_are_one_line(tmp_path, content):
    with pytest.raises(UserError, match=r"choices/decisions.json") as error:
        newest_decisions(decision_results(tmp_path, content))
    assert "\n" not in str(error.value)


# The planner's own question


@pytest.mark.parametrize(
    ("asked", "error", "answer", "says"),
    [
        (
            {},
            8.0,
            "Yes",
            "2 measured runs are on H100, of Llama-3.1-70B, with weights in FP8, with KV cache in BF16, with TP4, with "
            "a fixed number of requests in flight, with about 14 ",
        ),
        ({}, 60.0, "No", "The predictions of these runs have large errors."),
        ({"at_a_time": 500.0}, 8.0, "Partly", "but none is with about 500 requests at a time per replica."),
        ({"model": "Mixtral-8x7B"}, 8.0, "Partly", "but none is of Mixtral-8x7B. The nearest run is Llama-3.1-70B by"),
        ({"weights": "bf16", "shards": 8}, 8.0, "Partly", "but none is with weights in BF16, none is with TP8."),
        ({"kv_cache": "fp8"}, 8.0, "Partly", "but none is with KV cache in FP8."),
        ({"closed": False}, 8.0, "Partly", "but none is with requests that come at a rate."),
        ({"figures": ("ttft_ms.p99", "tpot_ms.mean")}, 8.0, "Partly", "but none states TTFT p99."),
        ({"gpu": "B300"}, 8.0, "No", "There is no measured run on B300"),
    ],
)
def test_trust_answers_the_planners_own_question(asked, error, answer, says):
    """Planted: two runs of one model on one GPU, with 8 and 16 requests at a time, and so large an error."""
    rows = [
        {"run": f"c{load}", "figure": f"{metric}.mean", "measured": 100.0}
        | {"blind": 100.0 + error, "low": 50.0, "high": 200.0, "blind_error_pct": error, "covered": error < 50}
        for load in (8, 16)
        for metric in ("ttft_ms", "tpot_ms")
    ]
    source = {"name": "planted", "title": "Planted", "source": "here", "engine": "vLLM", "gpu": "H100"}
    facts = {"model": "Llama-3.1-70B", "weights": "fp8", "kv_cache": "bf16", "shards": 4, "closed": True}
    served = {f"c{load}": {**facts, "at_a_time": load} for load in (8, 16)}
    case = results.Source(**source, trust="interpolated", why="it is", rows=rows, served=served)
    question = Question("H100", "Llama-3.1-70B", 14.0, "fp8", 4, ("ttft_ms.mean",), "", "bf16", True)._replace(**asked)
    verdict = judged(question, External(cases=[case]))
    assert verdict.answer == answer and says in verdict.why
    if answer == "Yes":
        assert verdict.why.endswith("a fixed number of requests in flight, about 16 at a time.")
        assert verdict.figures["TTFT error"] == "8 %" and verdict.figures["in their 90 % band"] == "100 %"


def test_trust_opens_on_the_question_of_the_plan_and_folds_the_ladder(samples):
    app = trust(samples)
    shown = text(app)
    question = "Partly, for Llama-3.1-70B on H100"  # published runs have weights in FP8, and state only means
    assert question in app.header[0].value and "TTFT p50 -3.1 % (floor 2.4 %)" in shown
    assert "The simulator against a real run" in [heading.value for heading in app.header[1:]]
    ladder = next(expander for expander in app.expander if expander.label.startswith("Seven checks"))
    assert not ladder.proto.expanded and "called a rung" in ladder.caption[0].value
