"""Rung 4: case files, the anchored correction, scoring, the report and the command."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lab.external.cases import FOLDER
from lab.external.page import markdown
from tokentwin.calibration.steps.external_calibration import ExternalCalibration, kernels
from tokentwin.calibration.steps.observed import observed
from tokentwin.calibration.trust import EXTRAPOLATED, Trust
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.calibration.validation.external.case import Case, Target, load_case, load_cases
from tokentwin.calibration.validation.external.predictor import Prediction, Predictor
from tokentwin.calibration.validation.external.report import as_dict, level_rows
from tokentwin.calibration.validation.external.scoring import Corrected, Correction, Row, score
from tokentwin.calibration.validation.external.steps import score_steps
from tokentwin.commands import validate_external
from tokentwin.commands.calibrate import calibrate
from tokentwin.commands.validate import validate
from tokentwin.serving.cost_model import CostModel, TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the measured runs are not here: no ../shared/data")
SILICON_TABLE = "lab.external.silicon_table:SiliconTable"
BASE_NS, TOKEN_NS, PAIR_PS = 5_000_000, 40_000, 2_000


class Sure:
    """Any cost model, with an interval and a trust level as a predictor has."""

    def __init__(self, cost: CostModel, interval: tuple[float, float] = (1.0, 1.0)) -> None:
        self._cost, self._interval = cost, interval
        self.cpu_ns, self.step_ns, self.decode_run_ns = cost.cpu_ns, cost.step_ns, cost.decode_run_ns

    def ends(self) -> tuple[CostModel, CostModel]:
        fast, slow = (Corrected(self._cost, Correction(decode=f, prefill=f)) for f in self._interval)
        return fast, slow

    def trust(self) -> Trust:
        return Trust(EXTRAPOLATED, "made up")


def predictor(cost: CostModel, interval: tuple[float, float] = (1.0, 1.0), client_ms: float = 0.0) -> Predictor:
    return lambda case, run, deployment: Prediction(Sure(cost, interval), 500, (0.0, 0.0, client_ms))


def case_data(**over: Any) -> dict[str, Any]:
    return {
        "name": "ours",
        "title": "A run of our own simulator",
        "source": "this test",
        "engine": "tokentwin",
        "gpu": "H100",
        "deployment": {"model": "Llama-3.1-8B", "scheduler": {"max_num_seqs": 8, "max_model_len": 512}},
        "measured": {"format": "guidellm-spans", "file": "spans.csv", "shared_prefix_tokens": 32},
        "shown": ["ttft_ms.mean", "tpot_ms.mean", "e2e_ms.p90"],
        **over,
    }


def case(**over: Any) -> Case:
    return Case.model_validate(case_data(**over))


PHASES = {"0 synchronous": (0.0, 6), "1 constant@9rps": (0.11, 25), "2 throughput": (0.0, 20)}


def measure(folder: Path, cost: CostModel) -> None:
    """Write `spans.csv`: three phases, as our simulator serves them with `cost`."""
    lines = ["arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s,phase,phase_kind"]
    scheduler = SchedulerConfig(max_num_seqs=8, max_model_len=512, num_blocks=500)
    start = 0
    for name, (gap, count) in PHASES.items():
        requests = [
            WorkloadRequest(i, round(i * gap * 1e9), ((f"prefix of {name}", 32), (PRIVATE, 20 + 7 * i % 60)), 3 + i % 9)
            for i in range(count)
        ]
        alone = name.endswith("synchronous")
        sink = TableSink()
        workload = Workload(requests, concurrency=1 if alone else None)
        Cluster(Deployment(scheduler=scheduler), cost, sink, steps=False).run(workload)
        number, kind = name.split()
        for row in sorted(sink.requests.to_pylist(), key=lambda row: row["request_id"]):
            times = [f"{(row[t] - row['arrival_ns']) / 1e9:.9f}" for t in ("first_token_ns", "finish_ns")]
            cells = (f"{(start + row['arrival_ns']) / 1e9:.9f}", row["prompt_tokens"], row["output_tokens"], *times)
            lines.append(",".join(map(str, (*cells, number, kind))))
        start += 10**10
    (folder / "spans.csv").write_text("\n".join(lines) + "\n")


TRUE = TokenCost(BASE_NS, TOKEN_NS, PAIR_PS)


# Scoring


def test_a_run_of_our_own_simulator_is_predicted_to_the_nanosecond(tmp_path: Path) -> None:
    measure(tmp_path, TRUE)
    target = {"figure": "e2e_ms.p90", "within_pct": 0.001}
    result = score(case(targets=[target]), tmp_path, predictor(TRUE))
    assert len(result.rows) == 9
    assert all(abs(row.error_pct() or 0.0) < 1e-6 for row in result.rows)
    assert [verdict.met for verdict in result.verdicts] == [True]


def test_an_anchor_finds_the_factors_and_is_not_scored(tmp_path: Path) -> None:
    """Decode and prompt times off by known factors: the synchronous phase tells them, the others come out right."""
    measure(tmp_path, Corrected(TRUE, Correction(decode=1.3, prefill=0.8)))
    anchor = {"run": "0 synchronous", "decode": "tpot_ms.mean", "prefill": "ttft_ms.mean"}
    target = {"figure": "ttft_ms.mean", "within_pct": 0.5, "column": "anchored"}
    result = score(case(anchor=anchor, targets=[target]), tmp_path, predictor(TRUE))
    assert result.correction is not None
    assert result.correction.decode == pytest.approx(1.3, rel=1e-3)
    assert result.correction.prefill == pytest.approx(0.8, rel=1e-3)
    for row in result.rows:
        assert (row.anchored is None) == (row.run == "0 synchronous")
        assert row.anchored is None or abs(row.error_pct("anchored") or 0.0) < 0.5
    assert max(abs(row.error_pct() or 0.0) for row in result.rows) > 10
    assert result.verdicts[0].met and result.verdicts[0].run != "0 synchronous"


def test_an_overhead_outside_the_engine_is_found_too(tmp_path: Path) -> None:
    measure(tmp_path, TRUE)
    lines = (tmp_path / "spans.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines[1:]]
    later = [[*c[:3], f"{float(c[3]) + 0.02:.9f}", f"{float(c[4]) + 0.02:.9f}", *c[5:]] for c in cells]
    (tmp_path / "spans.csv").write_text("\n".join([lines[0], *map(",".join, later)]) + "\n")
    anchor = {"run": "0 synchronous", "decode": "tpot_ms.mean", "overhead": "ttft_ms.p50"}
    result = score(case(anchor=anchor), tmp_path, predictor(TRUE))
    assert result.correction is not None
    assert result.correction.overhead_ms == pytest.approx(20, abs=0.01)
    assert all(abs(row.error_pct("anchored") or 0.0) < 0.01 for row in result.rows)


@pytest.mark.parametrize("phase", PHASES)
def test_the_interval_is_that_of_slower_and_faster_steps(tmp_path: Path, phase: str) -> None:
    measure(tmp_path, TRUE)
    wide = score(case(), tmp_path, predictor(TRUE, (0.8, 1.25)))
    slow = score(case(), tmp_path, predictor(Corrected(TRUE, Correction(decode=1.25, prefill=1.25))))
    for row, slower in zip(wide.rows, slow.rows, strict=True):
        assert row.low <= row.blind <= row.high and row.covered
        if row.run == phase:
            assert row.low < 0.9 * row.blind and row.high == pytest.approx(slower.blind, rel=1e-5)


def table_case(folder: Path, rule: Mapping[str, Any] | None = None, **load: Any) -> Case:
    """Return a case with a row of eight requests in flight, whose lengths are stated or not."""
    header = "id,silicon_data_source,model_path,system,isl,osl,batch_size,tp_size,silicon_ttft_ms,silicon_tpot_ms"
    (folder / "table.csv").write_text(f"{header}\nrow,,m,h,64,16,8,1,400,6\n")
    rules = [{"when": {}, "load": {"lengths": [0.5, 1], **load}, **(rule or {})}]
    measured = {
        "format": SILICON_TABLE,
        "file": "table.csv",
        "systems": {"h": "H100"},
        "rules": rules,
    }
    return case(measured=measured, shown=["ttft_ms.mean", "tpot_ms.mean", "request_throughput"])


def intervals(case: Case, folder: Path, predict: Predictor) -> dict[str, Row]:
    return {row.figure: row for row in score(case, folder, predict).rows}


def test_a_clients_time_is_in_the_upper_end_of_its_latencies_only(tmp_path: Path) -> None:
    known = table_case(tmp_path)
    sure, late = (intervals(known, tmp_path, predictor(TRUE, (0.9, 1.1), ms)) for ms in (0.0, 25.0))
    assert late["ttft_ms.mean"].high == pytest.approx(sure["ttft_ms.mean"].high + 25)
    assert late["ttft_ms.mean"].low == sure["ttft_ms.mean"].low
    assert late["tpot_ms.mean"] == sure["tpot_ms.mean"]
    measure(tmp_path, TRUE)  # a server's own spans, in which no client is
    assert (
        score(case(), tmp_path, predictor(TRUE, (0.9, 1.1), 25.0)).rows
        == score(case(), tmp_path, predictor(TRUE, (0.9, 1.1))).rows
    )


def test_where_nobody_says_what_was_sent_the_interval_spans_both(tmp_path: Path) -> None:
    spread, equal = (intervals(table_case(tmp_path, lengths=x), tmp_path, predictor(TRUE)) for x in ([0.5, 1], [1, 1]))
    both = intervals(table_case(tmp_path, or_lengths=[1, 1]), tmp_path, predictor(TRUE))
    for figure in ("ttft_ms.mean", "tpot_ms.mean"):
        row, ends = both[figure], sorted((spread[figure].blind, equal[figure].blind))
        assert row.blind == spread[figure].blind
        assert [row.low, row.high] == pytest.approx(ends) and row.low < row.high


def test_where_nobody_says_which_deployment_ran_the_interval_spans_both(tmp_path: Path) -> None:
    few = {"scheduler": {"max_num_seqs": 2}}
    first, second = (intervals(table_case(tmp_path, {"deployment": of}), tmp_path, predictor(TRUE)) for of in ({}, few))
    both = intervals(table_case(tmp_path, {"or_deployment": few}), tmp_path, predictor(TRUE))
    row, alone, other = (rows["ttft_ms.mean"] for rows in (both, first, second))
    assert row.blind == alone.blind and row.others == [other.blind] and alone.others == []
    assert [row.low, row.high] == pytest.approx(sorted((alone.blind, other.blind))) and row.low < row.high
    nearest = min((alone, other), key=lambda one: abs(one.blind - one.measured))
    assert row.error_pct("nearest") == nearest.error_pct()


def test_what_a_step_takes_does_not_decide_is_known_to_one_request(tmp_path: Path) -> None:
    """Of an idle engine as many requests end as arrive, whatever a step takes: 25 of them, and so one in 25."""
    measure(tmp_path, TRUE)
    rows = score(case(shown=["request_throughput"]), tmp_path, predictor(TRUE)).rows
    (idle,) = (row for row in rows if row.run == "1 constant@9rps")
    assert (idle.low / idle.blind, idle.high / idle.blind) == pytest.approx((1 - 1 / 25, 1 + 1 / 25))


def test_replicas_share_the_load_by_the_router(tmp_path: Path) -> None:
    """Twenty at once: two engines serve them sooner than one, and twenty as if each were alone."""
    measure(tmp_path, TRUE)
    means = []
    for replicas in (1, 2, 20):
        result = score(case(replicas=replicas, router="least-tokens"), tmp_path, predictor(TRUE))
        means.append({(row.run, row.figure): row.blind for row in result.rows}["2 throughput", "ttft_ms.mean"])
    assert means[0] > means[1] > means[2]
    assert means[2] < 1e-6 * (BASE_NS + 120 * TOKEN_NS + 120**2 * PAIR_PS / 1000)


def test_a_wrong_zero_is_a_hundred_percent_off() -> None:
    row = Row("r", "saturated", 0.0, 1.0, 1.0, 1.0, 0.0, None)
    assert row.error_pct() == 100.0 and row.error_pct("anchored") == 0.0
    assert Row("r", "saturated", 1.0, 0.0, 0.0, 0.0, None, None).error_pct() == -100.0


def test_a_median_target_is_the_median_and_a_target_on_one_run_is_its_own(tmp_path: Path) -> None:
    measure(tmp_path, TRUE)
    doubled = TokenCost(2 * BASE_NS, 2 * TOKEN_NS, 2 * PAIR_PS)
    median, one, every = (
        Target(figure="ttft_ms.mean", within_pct=100.1, over="median"),
        Target(figure="ttft_ms.mean", within_pct=100.1, runs=("0 synchronous",)),
        Target(figure="ttft_ms.mean", within_pct=100.1),
    )
    result = score(case(targets=[t.model_dump() for t in (median, one, every)]), tmp_path, predictor(doubled))
    errors = {row.run: abs(row.error_pct() or 0.0) for row in result.rows if row.figure == "ttft_ms.mean"}
    assert result.verdicts[0].error_pct == sorted(errors.values())[1]
    assert result.verdicts[1].error_pct == pytest.approx(100, abs=1e-3) and result.verdicts[1].met
    assert result.verdicts[2].error_pct == max(errors.values()), "queueing makes it worse than 100 %"
    assert not result.verdicts[2].met


# The corrected cost model


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0), st.integers(0, 10**6), st.integers(1, 40))
def test_a_corrected_leap_costs_what_its_steps_do(decode: float, prefill: float, plan_ns: int, outputs: int) -> None:
    """A run with leaps and one without end at the same nanosecond."""
    cost = Corrected(TokenCost(BASE_NS, TOKEN_NS, PAIR_PS, plan_ns), Correction(decode, prefill))
    requests = [WorkloadRequest(i, i * 10**7, ((PRIVATE, 30 + i),), outputs + i) for i in range(3)]
    deployment = Deployment(scheduler=SchedulerConfig(num_blocks=500))
    ends = []
    for steps in (False, True):
        sink = TableSink()
        Cluster(deployment, cost, sink, shares_prefixes=False, steps=steps).run(Workload(requests))
        ends.append(sorted(sink.requests.column("finish_ns").to_pylist()))
    assert ends[0] == ends[1]


def test_equal_factors_scale_every_step_alike() -> None:
    cost = TokenCost(BASE_NS, TOKEN_NS, PAIR_PS, plan_ns=300_000)
    twice = Corrected(cost, Correction(decode=2.0, prefill=2.0))
    scheduler = VllmScheduler(SchedulerConfig(num_blocks=500))
    for id_ in range(3):
        scheduler.add(WorkloadRequest(id_, 0, ((PRIVATE, 20 + id_),), 4))
        plan = scheduler.schedule()
        assert twice.cpu_ns(plan) == 2 * cost.cpu_ns(plan) and twice.step_ns(plan) == 2 * cost.step_ns(plan)
        scheduler.commit(plan)


# Case files


def written(folder: Path, **over: Any) -> Path:
    path = folder / "ours.yaml"
    path.write_text(yaml.safe_dump(case_data(**over)))
    return path


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"gpus": "H100"}, r"ours.yaml.gpus: 'H100': is not a setting"),
        ({"name": "No Spaces"}, r"ours.yaml.name: 'No Spaces'"),
        ({"targets": [{"figure": "x"}]}, r"ours.yaml.targets.0.within_pct"),
        ({"targets": [{"figure": "x", "within_pct": 1, "column": "both"}]}, r"ours.yaml.targets.0.column: 'both'"),
        ({"measured": {"format": "excel"}}, r"ours.measured.format: 'excel': must be aiperf, bench-serve"),
        ({"measured": {"format": "guidellm-spans"}}, r"ours.measured.file"),
        ({"anchor": {"run": "a", "speed": "x"}}, r"ours.yaml.anchor.speed"),
    ],
)
def test_what_is_wrong_with_a_case_file_is_one_line(tmp_path: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_case(written(tmp_path, **over))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"deployment": {"modell": "x"}}, r"ours.deployment.modell"),
        ({"deployment": {"scheduler": 5}}, r"ours.deployment.scheduler"),
        (
            {"anchor": {"run": "9 none", "decode": "tpot_ms.mean"}},
            r"ours.anchor.run: '9 none': is not a run of this case; choose one of 0 synch",
        ),
        ({"anchor": {"run": "0 synchronous", "decode": "speed"}}, r"anchor.decode: 'speed': is not a figure"),
        (
            {"deployment": {"scheduler": {"max_model_len": 60}}},
            r"deployment of 0 synch.*rejects \d+ of the measured requests",
        ),
        ({"targets": [{"figure": "speed", "within_pct": 1}]}, r"ours.targets: 'speed': has no blind figure for every"),
        ({"targets": [{"figure": "ttft_ms.mean", "within_pct": 1, "runs": ["x"]}]}, r"no blind figure for x"),
        ({"targets": [{"figure": "ttft_ms.mean", "within_pct": 1, "column": "anchored"}]}, r"no anchored figure"),
    ],
)
def test_what_a_case_asks_of_a_run_that_has_it_not_is_one_line(tmp_path, over, message):
    measure(tmp_path, TRUE)
    with pytest.raises(UserError, match=message):
        score(case(**over), tmp_path, predictor(TRUE))


def test_a_stated_number_of_blocks_is_kept_and_a_missing_one_predicted(tmp_path: Path) -> None:
    measure(tmp_path, TRUE)
    run = case().format.read(tmp_path)[0]
    assert not case().deployment_of(run)[1]
    stated = case(deployment={"model": "m", "scheduler": {"num_blocks": 77}})
    deployment, has_blocks = stated.deployment_of(run)
    assert has_blocks and deployment.scheduler.num_blocks == 77 and deployment.device == "cuda"


def test_the_bundled_cases_are_valid_and_have_targets() -> None:
    cases = load_cases(FOLDER)
    assert len(cases) >= 4 and all(c.targets and c.source for c in cases)
    for c in cases:
        assert c.is_of_steps or not {t.figure for t in c.targets} - set(c.shown)


def test_an_empty_folder_of_cases_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no case files"):
        load_cases(tmp_path)
    written(tmp_path).rename(tmp_path / "a.yaml")
    written(tmp_path)
    with pytest.raises(UserError, match=r"is the name of another case"):
        load_cases(tmp_path)


# The report and the command


def test_the_page_lists_figures_and_targets(tmp_path: Path) -> None:
    measure(tmp_path, TRUE)
    anchor = {"run": "0 synchronous", "decode": "tpot_ms.mean", "prefill": "ttft_ms.mean"}
    targets = [{"figure": "ttft_ms.mean", "within_pct": 1}, {"figure": "tpot_ms.mean", "within_pct": 200}]
    slow = TokenCost(2 * BASE_NS, TOKEN_NS, PAIR_PS)
    result = score(case(anchor=anchor, targets=targets), tmp_path, predictor(slow, (0.9, 1.1)))
    page = markdown([result])
    assert "**missed**" in page and "| met |" in page and "Anchored on *0 synchronous*" in page
    assert "Step times are extrapolated: made up" in page
    assert page.count("\n| 2 throughput |") == 1 and page.count("\n| run | ttft_ms.mean | ") == 1
    covered = sum(row.covered for row in result.rows)
    assert f"{covered} of 9 figures ({100 * covered / 9:.0f} %) lie in their 90 % interval; {covered} of 9 " in page
    report = as_dict([result])
    assert json.loads(json.dumps(report)) == report and report["met"] is False


def test_many_runs_are_summed_up_and_doubts_counted(tmp_path: Path) -> None:
    header = "id,silicon_data_source,model_path,system,isl,osl,batch_size,tp_size,silicon_ttft_ms,silicon_tpot_ms"
    lines = [f"row{i},,{'ab'[i % 2]},h,64,8,{4 + i % 3},1,400,{6 + (i == 7) * 50}" for i in range(24)]
    (tmp_path / "table.csv").write_text("\n".join([header, *lines]) + "\n")
    measured = {"format": SILICON_TABLE, "file": "table.csv", "systems": {"h": "H100"}}
    shown = ["ttft_ms.mean", "tpot_ms.mean"]
    result = score(case(measured=measured, shown=shown), tmp_path, predictor(TRUE))
    assert len(result.rows) == 48
    page = markdown([result])
    assert "| model | a | 12 |" in page and "| concurrency | 4 | 8 |" in page
    assert "disagree" in page and "row7" not in page and "| trust | figures | median error |" in page
    assert [(cells[0], cells[1]) for cells in level_rows([result])] == [("extrapolated", "48")]


def invoke(monkeypatch: pytest.MonkeyPatch, cost: CostModel, *args: str) -> Any:
    monkeypatch.setattr("tokentwin.calibration.validation.external.predictor.blind", predictor(cost))
    return CliRunner().invoke(validate, ["external", *args])


def test_the_command_exits_0_met_3_missed_and_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path, TRUE)
    written(tmp_path, targets=[{"figure": "ttft_ms.mean", "within_pct": 1}])
    args = ("--data", str(tmp_path), "--cases", str(tmp_path))
    assert invoke(monkeypatch, TRUE, *args).exit_code == 0
    page = tmp_path / "external.md"
    slow = TokenCost(3 * BASE_NS, TOKEN_NS, PAIR_PS)
    missed = invoke(monkeypatch, slow, *args, "--format", "json", "--write", str(page), "--case", "ours")
    assert missed.exit_code == validate_external.TARGET_MISSED and "# Rung 4" in page.read_text()
    assert json.loads(missed.stdout.splitlines()[-1])["cases"][0]["targets"][0]["met"] is False


def test_a_bad_case_is_named_and_the_others_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path, TRUE)
    written(tmp_path).rename(tmp_path / "good.yaml")
    written(tmp_path, name="lost", measured={"format": "guidellm-spans", "file": "no.csv"}).rename(tmp_path / "l.yaml")
    (tmp_path / "odd.yaml").write_text("name: odd\n")
    args = ("--data", str(tmp_path), "--cases", str(tmp_path))
    page = tmp_path / "page.md"
    mixed = invoke(monkeypatch, TRUE, *args, "--format", "json", "--write", str(page))
    assert mixed.exit_code == 2
    report = json.loads(mixed.stdout.splitlines()[-1])
    assert [scored["name"] for scored in report["cases"]] == ["ours"] and report["cases"][0]["rows"]
    assert report["refused"].keys() == {"odd.yaml", "lost"} and report["met"] is False
    named = [line for line in mixed.stderr.splitlines() if "is not scored" in line]
    assert len(named) == 2 and "no.csv" in named[1] and page.read_text().count("## Not scored\n\n- *odd.yaml*: ") == 1
    assert invoke(monkeypatch, TRUE, *args, "--case", "ours").exit_code == 0  # nobody asked for the others


def test_the_command_writes_what_the_dashboard_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path, TRUE)
    written(tmp_path, targets=[{"figure": "ttft_ms.mean", "within_pct": 1}])
    args = ("--data", str(tmp_path), "--cases", str(tmp_path))
    assert invoke(monkeypatch, TRUE, *args, "--out", str(tmp_path / "runs" / "external")).exit_code == 0
    report = json.loads((tmp_path / "runs" / "external" / "external.json").read_text())
    assert report["created"] and report["met"] and len(report["cases"][0]["rows"]) == 9
    refused = invoke(monkeypatch, TRUE, *args, "--out", str(tmp_path / "spans.csv"))
    assert isinstance(refused.exception, UserError) and refused.exception.field == "out"


def test_a_missing_folder_and_an_unknown_case_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = invoke(monkeypatch, TRUE, "--data", str(tmp_path / "gone"))
    assert isinstance(gone.exception, UserError) and "is not a folder" in str(gone.exception)
    unknown = invoke(monkeypatch, TRUE, "--data", str(tmp_path), "--case", "nope")
    assert isinstance(unknown.exception, UserError) and "codellama-34b-h100" in str(unknown.exception)


# The measured runs themselves, by a plain roofline: loose bounds, so that what fails is the reading, not the model


class Roofline:
    """Kernel times by the datasheet: weights or FLOPs, whichever takes longer, then KV; all at a share of its rates."""

    def __init__(self, parameters: float, kv_bytes: float, bytes_per_s: float, flop_per_s: float) -> None:
        self._weights, self._flops = 2 * parameters / bytes_per_s, 2 * parameters / flop_per_s
        self._kv = kv_bytes / bytes_per_s

    def cpu_ns(self, plan: Any) -> int:
        return 0

    def step_ns(self, plan: Any) -> int:
        return self._ns(plan.tokens, plan.decode_rows + plan.decode_context)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [self._ns(rows, context + (i + 1) * rows) for i in range(steps)]

    def _ns(self, tokens: int, context: int) -> int:
        return round(1e9 * (max(self._weights, self._flops * tokens) + self._kv * context + 3e-4))


ROOFLINES = {
    "codellama-34b-h100": Roofline(33.7e9, 196_608, 2.6e12, 6e14),
    "llama-3.1-8b-h100": Roofline(8.0e9, 131_072, 2.6e12, 6e14),
    "llama-3.1-8b-rtx-pro-6000": Roofline(8.0e9, 131_072, 1.5e12, 3e14),
}


@needs_data
@pytest.mark.parametrize("name", ROOFLINES)
def test_a_measured_run_is_roughly_what_a_roofline_says(name: str) -> None:
    (measured,) = [c for c in load_cases(FOLDER) if c.name == name]
    cost = Sure(ROOFLINES[name])
    result = score(measured, SHARED, lambda case, run, deployment: Prediction(cost, 20_000))
    shown = {"codellama-34b-h100": "e2e_ms.mean", "llama-3.1-8b-h100": "request_throughput"}
    figure = shown.get(name, "makespan_s")
    errors = [abs(row.error_pct() or 0.0) for row in result.rows if row.figure == figure]
    assert errors and max(errors) < 30


@needs_data
def test_a_run_of_the_h100_table_is_roughly_what_a_roofline_says() -> None:
    (measured,) = [c for c in load_cases(FOLDER) if c.name == "silicon-h100"]
    runs = [r for r in measured.format.read(SHARED) if "qwen3_32b_h100_sxm_vllm_agg_1024x512_c32" in r.name]
    assert len(runs) == 3
    for run in runs:
        deployment, _ = measured.deployment_of(run)
        tp = deployment.tensor_parallel_size
        cost = Roofline(32.8e9 / tp, 262_144 / tp, 2.6e12, 6e14)
        tpot = run_metrics(run.workload, deployment, cost).distribution("tpot_ms").mean
        assert 0.3 < tpot / run.figures["tpot_ms.mean"] < 1.5


# Steps, and what a case teaches


def test_iterations_are_scored_by_regime(tmp_path: Path) -> None:
    lines = [f"0,0,0,{n},{n * 300},0,{6 + 0.05 * n}" for n in range(1, 33)] * 6
    lines += [f"{n},1,0,8,2400,0,{8 + 0.02 * n}" for n in range(16, 512, 8)]
    header = (
        "sum_prefill_tokens,num_prefill_requests,sum_prefill_kv_tokens,num_decode_requests,sum_decode_kv_tokens,"
        "var_decode_kv_tokens,latency_ms"
    )
    order = random.Random(1).sample(lines, len(lines))
    (tmp_path / "log.csv").write_text("\n".join([header, *order]) + "\n")
    case = Case.model_validate(
        {
            "name": "log",
            "title": "A log",
            "source": "made up",
            "engine": "none",
            "gpu": "H100",
            "deployment": {"model": "Llama-3.1-8B"},
            "measured": {"format": "iteration-log", "file": "log.csv"},
            "shown": (),
            "targets": [
                {"figure": "decode.median", "within_pct": 3, "column": "anchored"},
                {"figure": "mixed.p95", "within_pct": 0.0001},
            ],
        }
    )
    result = score_steps(case, tmp_path)
    assert [verdict.met for verdict in result.verdicts] == [True, False]
    totals = {row.run.split()[0]: row for row in result.rows if row.figure == "total_s"}
    assert set(totals) == {"decode", "mixed"}
    assert abs(totals["decode"].error_pct("anchored") or 0) < 2 < abs(totals["decode"].error_pct() or 0)
    wrong = case.model_copy(update={"targets": (Target(figure="prefill.median", within_pct=1),)})
    with pytest.raises(UserError, match=r"log\.targets"):
        score_steps(wrong, tmp_path)


def test_a_case_teaches_a_calibration_that_predicts_its_anchor(tmp_path: Path) -> None:
    """The whole way through the command, from another engine's spans to a simulation of its own deployment."""
    measure(tmp_path, TRUE)
    anchor = {"run": "0 synchronous", "decode": "tpot_ms.mean", "prefill": "ttft_ms.mean"}
    file = written(tmp_path, anchor=anchor)
    options = ["-o", str(tmp_path / "learnt"), "--from-case", str(file), "--data", str(tmp_path)]
    done = CliRunner().invoke(calibrate, options, standalone_mode=False, catch_exceptions=False)
    assert "A run of our own simulator" in done.output
    learnt = ExternalCalibration.load(tmp_path / "learnt" / "engine.json")
    assert learnt.gpu == "H100" and "0 synchronous" in learnt.source
    deployment = Deployment.model_validate_json(learnt.deployment)
    again = observed(learnt.cost(find_model(deployment.model), deployment, kernels("H100")))
    result = score(case(), tmp_path, lambda *_: Prediction(again, 500))
    row = next(r for r in result.rows if r.run == "0 synchronous" and r.figure == "tpot_ms.mean")
    assert abs(row.error_pct() or 0.0) < 3
    with pytest.raises(UserError, match="already holds a calibration"):
        CliRunner().invoke(calibrate, options, standalone_mode=False, catch_exceptions=False)
    file = written(tmp_path)
    options[1] = str(tmp_path / "other")
    with pytest.raises(UserError, match=r"ours\.anchor"):
        CliRunner().invoke(calibrate, options, standalone_mode=False, catch_exceptions=False)
    assert not (tmp_path / "other").exists()
