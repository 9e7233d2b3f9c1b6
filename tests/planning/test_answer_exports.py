"""Exports of plans, comparisons, sweeps and validation reports: the numbers of the answer, the figures of the page."""

import copy
import io
import json
import re
import shlex
import shutil
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

pytest.importorskip("streamlit")

from tests.dashboard.bundled_samples import comparison_request, recordings_request
from tests.dashboard.samples import borne, plan_example
from tests.tokentwin.test_plan_command import EASY
from tokentwin.cli import cli
from tokentwin.dashboard.bundled import DEMO, EXTERNAL_SAMPLE, SAMPLES, bundled_answer, sample_diagnosis
from tokentwin.dashboard.html_reports.report import write_report
from tokentwin.dashboard.plan_page.command import plan_command
from tokentwin.dashboard.plan_page.tasks import plan as planned
from tokentwin.dashboard.sweeps_page.charts import opening_view
from tokentwin.dashboard.trust_page.own_question import judged, questions
from tokentwin.dashboard.trust_page.results import load_external
from tokentwin.planning.compare.document import ComparisonDocument, furthest_off
from tokentwin.planning.diagnose.document import DiagnosisDocument
from tokentwin.planning.exports.export import formats_of, write_export
from tokentwin.planning.exports.exportable import Exportable, open_exportable
from tokentwin.planning.exports.sweep import Sweep
from tokentwin.planning.exports.validation import Validation
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.errors import UserError

EVIL = '<img src=x onerror=alert(1)><a href="https://example.com">"\'&</script>'


def plan() -> PlanDocument:
    return PlanDocument.read(plan_example()["answer"])


def infeasible() -> PlanDocument:
    document = {**plan_example()["answer"], "recommendation": None, "runners_up": [], "by_replicas": [], "by_rate": []}
    return PlanDocument.read({**document, "infeasible": [{"engine": "TP1 L4", "reason": "it does not fit"}]})


def simulated() -> ComparisonDocument:
    return ComparisonDocument.read(bundled_answer(comparison_request().as_json()))


def recorded() -> ComparisonDocument:
    return ComparisonDocument.read(bundled_answer(recordings_request().as_json()))


def diagnosis() -> DiagnosisDocument:
    return DiagnosisDocument.read(bundled_answer(sample_diagnosis().as_json()))


def symptoms() -> DiagnosisDocument:
    """Of a recording alone."""
    nothing = {"counterfactuals": [], "simulated_p99": {}, "twin_error": None, "trust": None}
    return DiagnosisDocument.read(diagnosis().as_json() | nothing)


def sweep() -> Sweep:
    return Sweep(SAMPLES / "sweep")


def validation() -> Validation:
    return Validation(DEMO / "validation")


SOURCES = {
    "plan": (plan, ["parquet", "csv", "html", "json"]),
    "most users": (borne, ["parquet", "csv", "html", "json"]),
    "no fleet": (infeasible, ["parquet", "csv", "html", "json"]),
    "simulated comparison": (simulated, ["parquet", "csv", "html", "json"]),
    "recorded comparison": (recorded, ["parquet", "csv", "html", "json"]),
    "diagnosis": (diagnosis, ["parquet", "csv", "html", "json"]),
    "symptoms": (symptoms, ["parquet", "csv", "html", "json"]),
    "sweep": (sweep, ["parquet", "csv", "html"]),
    "validation": (validation, ["parquet", "csv", "html"]),
}


def written(source: Exportable, name: str, table: str | None = None) -> bytes:
    out = io.BytesIO()
    write_export(source, name, out, table, html=write_report)
    return out.getvalue()


class Tags(HTMLParser):
    """Tags with attributes, and the figures' JSON."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[dict[str, Any]] = []
        self._figure = False
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        self._figure = tag == "script" and dict(attributes).get("class") == "figure"

    def handle_data(self, data: str) -> None:
        if self._figure:
            self.figures.append(json.loads(data))
            self._figure = False


def axes(figures: list[dict[str, Any]]) -> list[str]:
    """The titles of all axes."""
    return [
        axis["title"]["text"]
        for figure in figures
        for name, axis in figure["layout"].items()
        if re.match("[xy]axis", name) and axis.get("title", {}).get("text")
    ]


# Every source and format


@pytest.mark.parametrize("name", SOURCES)
def test_every_format_is_there_and_the_same_bytes_each_time(name: str) -> None:
    make, formats = SOURCES[name]
    assert formats_of(make()) == formats
    for format in formats:
        first = written(make(), format)
        assert first and first == written(make(), format), format


@pytest.mark.parametrize("name", SOURCES)
def test_csv_holds_the_rows_of_parquet(name: str) -> None:
    source = SOURCES[name][0]()
    for table in source.tables:
        exact = pq.read_table(io.BytesIO(written(source, "parquet", table)))
        read = csv.read_csv(io.BytesIO(written(source, "csv", table)))
        assert read.column_names == exact.column_names and read.num_rows == exact.num_rows > 0
        for field in exact.schema:
            if pa.types.is_floating(field.type):
                assert read[field.name].cast(pa.float64()).to_pylist() == exact[field.name].to_pylist()


@pytest.mark.parametrize("name", SOURCES)
def test_a_format_or_a_table_that_it_has_not_names_those_it_has(name: str) -> None:
    make, formats = SOURCES[name]
    source = make()
    for format in ("perfetto", "openmetrics"):
        with pytest.raises(UserError) as caught:
            written(source, format)
        assert caught.value.field == "format" and all(known in str(caught.value) for known in (source.what, *formats))
    with pytest.raises(UserError) as caught:
        written(source, "csv", "requests")
    assert caught.value.field == "table" and all(known in str(caught.value) for known in source.tables)
    with pytest.raises(UserError, match="cannot be chosen"):
        written(source, "html", source.tables[0])


# Tables


def test_fleets_are_those_of_the_answer() -> None:
    source = plan()
    rows = source.table("fleets").to_pylist()
    document = source.as_json()
    assert [{name: row[name] for name in document["points"][0] if name in row} for row in rows] == [
        {name: point[name] for name in point if name in rows[0]} for point in document["points"]
    ]
    (best,) = [row for row in rows if row["recommended"]]
    assert (best["engine"], best["replicas"]) == tuple(document["recommendation"][n] for n in ("engine", "replicas"))
    met = [row for row in rows if row["met"]]
    for flag, gain in (("on_frontier", "tok_s_gpu"), ("on_frontier_by_price", "usd_per_mtok_out")):
        sign = -1 if gain == "usd_per_mtok_out" else 1
        figures = {(row["tok_s_user"], sign * row[gain]) for row in met}
        on = {(row["tok_s_user"], sign * row[gain]) for row in rows if row[flag]}
        assert all(row["met"] for row in rows if row[flag])
        assert on == {(u, g) for u, g in figures if not any(a >= u and b >= g and (a, b) != (u, g) for a, b in figures)}
    assert source.table("fleets").schema.field("tok_s_user").metadata[b"unit"] == b"tokens/s"
    assert not any(row["recommended"] for row in infeasible().table("fleets").to_pylist())


def test_a_saved_number_of_users_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "users.json").write_text(borne().dumps())
    source = open_exportable(tmp_path / "users.json")
    assert source == borne()
    (row,) = source.table("fleets").to_pylist()
    assert (row["clients"], row["if_fast"], row["engine"]) == (154, 297, "TP1 H100")
    assert b"154 users: so many does" in written(source, "html")


@pytest.mark.parametrize("make", [simulated, recorded])
def test_rows_and_tallies_are_those_of_the_comparison(make: Any) -> None:
    source = make()
    for table in ("rows", "tallies"):
        of_ours = source.as_json()[table]
        assert [{name: row[name] for name in of_ours[0]} for row in source.table(table).to_pylist()] == of_ours
    units = {row["metric"]: row["unit"] for row in source.table("rows").to_pylist()}
    assert units["ttft_ms"] == "ms" and units["jain_fairness"] == "fraction"


def test_what_was_simulated_beside_real_runs_is_in_tables_of_its_own() -> None:
    source = recorded()
    document = source.as_json()
    assert simulated().tables == ("rows", "tallies")
    assert source.tables == ("rows", "tallies", "simulated", "errors", "outcomes")
    of_ours = document["simulated"]["rows"]
    assert [{name: row[name] for name in of_ours[0]} for row in source.table("simulated").to_pylist()] == of_ours
    assert source.table("outcomes").to_pylist() == document["ranking"]
    errors = source.table("errors").to_pylist()
    assert len(errors) == 2 * len(document["rows"])
    for row in errors:
        name, side = (row["metric"], row["stat"]), row["side"].lower()
        mine, real = (
            next(r for r in rows if (r["metric"], r["stat"]) == name)[side] for rows in (of_ours, document["rows"])
        )
        assert (row["simulated"], row["real"]) == (mine, real)
        whole = 1 if row["unit"] == "fraction" and row["metric"] != "jain_fairness" else real
        assert row["error"] == pytest.approx(100 * (mine - real) / whole)
    assert {row["unit"] for row in errors if row["metric"] == "ttft_ms"} == {"ms"}
    with pytest.raises(UserError, match=r"outcomes.*choose rows or tallies"):
        written(simulated(), "csv", "outcomes")


def test_a_report_of_real_runs_says_how_far_off_the_simulated_ones_are_and_whether_they_were_disturbed() -> None:
    document = recorded().model_copy(update={"disturbed": True, "disturbance": "the canary drifted"})
    text = written(document, "html").decode()
    assert "DISTURBED: the canary drifted" in text and "A canary step is" in text
    worst = furthest_off(document.errors())
    assert worst is not None and f", {worst.error:+.1f} % (" in text and "Simulated against real" in text
    calm = written(document.model_copy(update={"disturbed": False}), "html").decode()
    assert "DISTURBED" not in calm


def test_rows_of_a_validation_report_are_its_figures_and_steps_its_residuals() -> None:
    source = validation()
    report = json.loads((DEMO / "validation" / "report.json").read_text())
    rows = source.table("rows").to_pylist()
    assert [(r["metric"], r["stat"], r["real"], r["low"]) for r in rows] == [
        (r["metric"], r["stat"], r["real"], r["low"]) for r in report["rungs"]["run"]["rows"]
    ]
    assert source.table("steps").equals(pq.read_table(DEMO / "validation" / "step_residuals.parquet"))


def test_a_sweep_keeps_every_run_and_what_is_known_of_its_columns() -> None:
    read = pq.read_table(io.BytesIO(written(sweep(), "parquet")))
    assert read.equals(sweep().results.runs)
    assert read.schema.field("ttft_ms_p99").metadata[b"unit"] == b"ms"


# Reports


@pytest.mark.parametrize(
    ("name", "figures", "titles"),
    [
        ("plan", 8, ["attainment (%)", "TTFT p99 (ms)", "TPOT p99 (ms)", "output tokens/s per GPU", "prompt (tokens)"]),
        ("no fleet", 4, ["output tokens/s per GPU", "prompt (tokens)"]),
        ("simulated comparison", 4, ["TTFT (s)", "B - A (%)", "requests (%)", "tenant"]),
        ("recorded comparison", 5, ["TTFT (s)", "B - A (%)", "requests (%)", "tenant"]),
        ("diagnosis", 1, ["share of TTFT p99 that disappears (%); with all constraints"]),
        ("symptoms", 0, []),
        ("most users", 0, []),
        ("sweep", 6, ["rate (requests/s)", "TTFT p99 (ms)"]),
        ("validation", 6, ["TTFT (ms)", "error (%)", "predicted against measured (%)", "decoding requests"]),
    ],
)
def test_a_report_stands_alone_and_holds_the_figures_of_the_page(name: str, figures: int, titles: list[str]) -> None:
    content = written(SOURCES[name][0](), "html")
    tags = Tags(content)
    assert not [a for _, a in tags.found if a.get("src") or a.get("href")]
    assert not [tag for tag, _ in tags.found if tag in ("link", "img", "iframe", "base", "form")]
    assert content.count(b"plotly.js v") == 1, "once"
    assert len(tags.figures) == figures
    assert set(titles) <= {title.split(":")[0] for title in axes(tags.figures)}
    assert b"How to reproduce it" in content


def test_a_plans_report_says_the_answer_its_trust_and_how_to_serve_and_ask_it_again() -> None:
    answer = plan_example()["answer"]
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", written(plan(), "html").decode(), flags=re.DOTALL)
    assert answer["recommendation"]["trust"]["level"] in text
    assert answer["recommendation"]["trust"]["reason"][1:] in text
    assert answer["recommendation"]["vllm_serve"].split()[2] in text and "tokentwin plan traffic.yaml" in text
    assert escape(shown_share(answer["recommendation"]["attainment"], 1)) in text
    (question,) = questions(PlanDocument.read(answer))
    assert judged(question, load_external(EXTERNAL_SAMPLE)).sentence in text
    assert "Other candidates" in text and all(entry["engine"] in text for entry in answer["dearer"])


def test_the_command_of_a_plan_asks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # one CPU, so that neither starts workers
    asked = copy.deepcopy(plan_example()["settings"])
    asked |= {"model": "Llama-3.1-8B", "gpus": ["L40S"], "tensor_parallel_sizes": [1], "spares": 1, "max_replicas": 50}
    for part, mean, most in (("prompt", 200.0, 800), ("output", 20.0, 60)):
        asked["traffic"][part] |= {"mean": mean, "max": most}
    asked["traffic"]["requests"] = 60
    asked |= {"slos": [EASY], "prices": {"L40S": 0.5}, "risk": 0.4}
    line, files = plan_command(asked)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    words = shlex.split(line.replace("traffic.yaml", str(tmp_path / "traffic.yaml")))[1:]
    done = CliRunner().invoke(cli, [*words, "--save", str(tmp_path / "plan.json")], standalone_mode=False)
    assert done.exit_code == 0, done.output
    ours = planned(asked, tmp_path, lambda stage, share: None)
    theirs = json.loads((tmp_path / "plan.json").read_text())
    assert ours.pop("inputs") == asked and theirs.pop("inputs")["command"].startswith("tokentwin plan ")
    assert ours == theirs, "the page and the command line give one and the same document"
    assert b"--spares 1" in written(open_exportable(tmp_path / "plan.json"), "html")


def test_a_report_of_a_sweep_draws_what_the_page_shows() -> None:
    found = sweep().results
    view = opening_view(found)
    mine = Sweep(SAMPLES / "sweep", found, view._replace(y="tok_s_gpu", by=None, values=(None,)))
    first = Tags(written(mine, "html")).figures[0]
    assert axes([first]) == ["rate (requests/s)", found.metrics["tok_s_gpu"]] and not first["layout"]["showlegend"]


def test_a_validation_report_whose_recordings_are_gone_still_has_a_report(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "validation", tmp_path / "validation")
    shutil.rmtree(tmp_path / "validation" / "simulated")
    content = written(Validation(tmp_path / "validation"), "html")
    assert len(Tags(content).figures) == 4 and b'class="warning"' in content
    (tmp_path / "validation" / "report.json").write_text('{"verdict": "nothing was climbed"}')
    (tmp_path / "validation" / "step_residuals.parquet").unlink()
    bare = Validation(tmp_path / "validation")
    assert bare.tables == () and formats_of(bare) == ["html"]
    assert b"nothing was climbed" in written(bare, "html")


# Names that would be something else


def evil_plan() -> PlanDocument:
    document = json.loads(json.dumps(plan_example()["answer"]).replace("TP4 H100", json.dumps(EVIL)[1:-1]))
    document["inputs"] = {"command": EVIL}
    document["objectives"] = [EVIL]
    document["version"] = EVIL
    return PlanDocument.read(document)


def evil_comparison() -> ComparisonDocument:
    document = json.loads(json.dumps(recorded().as_json()).replace('"greedy"', json.dumps(EVIL)))
    document["verdict"] = document["simulated"]["verdict"] = EVIL
    for side in "ab":
        document[side]["deployment"]["policy"] = EVIL + side
    for row in (document["rows"][0], document["ranking"][0]):
        row |= {"metric": EVIL, "stat": EVIL}
    document |= {"inputs": {EVIL: EVIL}, "disturbed": True, "disturbance": EVIL}
    return ComparisonDocument.read(document)


def evil_sweep() -> Sweep:
    found = sweep().results
    gpu = found.runs.column_names.index("gpu")
    names = [EVIL if name == "H100" else name for name in found.runs["gpu"].to_pylist()]
    runs = found.runs.set_column(gpu, found.runs.schema.field("gpu"), pa.array(names))
    return Sweep(SAMPLES / EVIL.replace("/", ""), type(found)(runs, found.parameters, found.paths, found.metrics))


@pytest.fixture
def evil_validation(tmp_path: Path) -> Validation:
    shutil.copytree(DEMO / "validation", tmp_path / "validation")
    path = tmp_path / "validation" / "report.json"
    report = json.loads(path.read_text())
    report |= {"verdict": EVIL, "workload": EVIL, "calibration": EVIL, "disturbed": True, "disturbance": EVIL}
    report["hardware"] = {EVIL: EVIL}
    report["rungs"]["run"]["rows"][0] |= {"metric": EVIL, "stat": EVIL}
    report["rungs"]["replay"] |= {"identical": 0, "first_difference": EVIL}
    path.write_text(json.dumps(report))
    return Validation(tmp_path / "validation")


@pytest.mark.parametrize("name", ["plan", "comparison", "sweep", "validation"])
def test_nothing_in_a_report_acts_as_html(name: str, evil_validation: Validation) -> None:
    makers = {"plan": evil_plan, "comparison": evil_comparison, "sweep": evil_sweep}
    source = makers[name]() if name in makers else evil_validation
    content = written(source, "html")
    tags = Tags(content)
    assert b"onerror" in content, "it was there to be escaped"
    assert not [tag for tag, _ in tags.found if tag in ("img", "a")]
    assert [a for _, a in tags.found if a.get("onerror")] == []
    drawn = json.dumps(tags.figures)
    assert "<img" not in drawn and "<a " not in drawn, "Plotly makes links of <a>"
    if name != "validation":
        assert "&lt;a href" in drawn


# Files


def test_a_saved_answer_is_found_wherever_it_lies(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", plan_example()["answer"])
    (tmp_path / "job").mkdir()
    write_json(tmp_path / "job" / "result.json", simulated().as_json())
    for path, kind in ((tmp_path / "plan.json", PlanDocument), (tmp_path / "job", ComparisonDocument)):
        found = open_exportable(path)
        assert isinstance(found, kind)
        (tmp_path / "again.json").write_bytes(written(found, "json"))
        assert open_exportable(tmp_path / "again.json") == found
    assert isinstance(open_exportable(SAMPLES / "sweep"), Sweep)
    assert isinstance(open_exportable(DEMO / "validation"), Validation)


def without(document: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != field}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no json", "source: .* cannot be exported; give a recording"),
        ("[" * 100_000, "source: .* cannot be exported; give a recording"),
        ("[1, 2]", "source: .* cannot be exported; give a recording"),
        ('{"points": []}', "source: .* cannot be exported; give a recording"),
        (json.dumps(without(plan_example()["answer"], "lengths")), "plan.lengths: is missing"),
        (json.dumps(plan_example()["answer"] | {"points": [{"engine": 3}]}), r"plan.points.0.engine: 3: "),
        (json.dumps(plan_example()["answer"]).replace('"attainment": 1.0', '"attainment": NaN'), "NaN is no number"),
        (json.dumps(without(simulated().as_json(), "cdfs")), "comparison.cdfs: is missing"),
        (json.dumps(simulated().as_json() | {"rows": []}), "comparison.rows: "),
    ],
)
def test_what_is_damaged_is_one_line_and_nothing_is_written(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "answer.json").write_text(content)
    words = ["export", str(tmp_path / "answer.json"), "--to", "html", "-o", str(tmp_path / "x.html")]
    with pytest.raises(UserError, match=says) as caught:
        cli.main(words, standalone_mode=False)
    assert "\n" not in str(caught.value) and not (tmp_path / "x.html").exists()


def test_a_comparison_that_was_saved_is_what_is_printed_and_exported(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("{requests: 120, arrivals: {kind: poisson, rate: 20}, prompt: 200, output: 20}")
    saved = tmp_path / "comparison.json"
    sides = ["--a", "max_num_seqs=1", "--b", "max_num_seqs=8", "--gpu", "H100"]
    words = ["compare", "--trace", str(tmp_path / "spec.yaml"), *sides, "--save", str(saved), "--format", "json"]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == json.loads(saved.read_text())
    again = CliRunner().invoke(cli, words, standalone_mode=False)
    assert isinstance(again.exception, UserError) and again.exception.field == "output"
    source = open_exportable(saved)
    assert isinstance(source, ComparisonDocument)
    asked = source.inputs["command"]
    assert asked.startswith("tokentwin compare --trace ") and "max_num_seqs=8" in asked and "--save" not in asked
    assert len(Tags(written(source, "html")).figures) == 3
