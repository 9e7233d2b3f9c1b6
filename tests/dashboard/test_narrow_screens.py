"""On 80 columns every number is shown in full: a table drops columns or takes another line before it cuts a digit."""

from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.dashboard.bundled_samples import comparison_request
from tokentwin.calibration.validation.report import ValidationReport
from tokentwin.cli import cli
from tokentwin.dashboard.bundled import bundled_answer
from tokentwin.planning.compare.document import ComparisonDocument
from tokentwin.run_table import print_metrics
from tokentwin.serving.answers.document import Document
from tokentwin.serving.answers.terminal import print_report

STATS = ("mean", "p50", "p90", "p95", "p99", "max")


def metrics_of(size: float) -> Any:
    spread = {stat: size + number for number, stat in enumerate(STATS)}
    distribution = SimpleNamespace(count=1, as_dict=lambda: spread)
    names = ("ttft_ms", "tok_s_user", "kv_pressure", "tpot_inclusive_ms")
    return SimpleNamespace(
        distributions=lambda: dict.fromkeys(names, distribution),
        scalars=lambda: {"total_throughput": size, "saturation": "OVERLOADED"},
        statuses=lambda: {"finished": 9},
    )


def report_of(size: float) -> Document:
    numbers: dict[str, Any] = {"real": size, "simulated": size + 1, "error_pct": -123.4, "floor_pct": 12.3}
    numbers |= {"weather_error_pct": -123.4, "weather_floor_pct": 12.3}
    ends = {"low": size - 2, "high": size + 3}
    stats = (("request_throughput", "value"), ("tpot_inclusive_ms", "mean"))
    regime = {"steps": 9, "median_error_pct": 1.0, "p95_error_pct": 2.0, "bias_pct": -1.0}
    rungs = {
        "replay": {"identical": 9, "steps": 9, "identical_requests": 9, "requests": 9},
        "step": {"regimes": {"mixed": regime}, "same_weather": {"mixed": regime}},
        "run": {
            "rows": [{"metric": metric, "stat": stat, **numbers, **ends} for metric, stat in stats],
            "covered": 0.9,
        },
    }
    return ValidationReport.read({"verdict": "fine", "rungs": rungs, "recordings": {"real": ["a"]}})


def comparison_of(size: float) -> Document:
    numbers = {"a": size, "b": size + 1234, "percent": -100.1, "low": -size - 2, "high": -size - 3, "better": "B"}
    tally = {"gain": 1234, "lose": 1234, "same": 1234, "mean_a": size, "mean_b": size}
    changed = {
        "rows": [{"metric": m, "stat": "p99", **numbers} for m in ("output_throughput", "ttft_ms")],
        "tallies": [{"by": "tenant", "group": "of-a-long-name", "metric": "request_throughput", **tally}],
        "verdict": "fine",
    }
    return ComparisonDocument.read((bundled_answer(comparison_request().as_json()) or {}) | changed)


@pytest.mark.parametrize("size", [1.234, 12_345.0, 345_678.0])
@pytest.mark.parametrize("shown", [report_of, comparison_of])
def test_reports_cut_nothing(shown, size, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_report(shown(size).report())
    out = capsys.readouterr().out
    assert "…" not in out
    assert out.count(f"{size:,.0f}" if size > 1000 else "1.23") >= 2
    prose = ("defaults of", "A: ", "B: ")
    tables = [line for line in out.splitlines() if "resampled" not in line and not line.startswith(prose)]
    assert max(map(len, tables)) <= 80


@pytest.mark.parametrize(("size", "columns", "left"), [(12_345.0, 80, STATS), (123_456_789_012.0, 70, ("p50", "p99"))])
def test_a_run_cuts_no_number_and_drops_statistics_rather(size, columns, left, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    bands = {"ttft_ms": dict.fromkeys(STATS[:-1], (size - 1000, size + 1000))}
    print_metrics(metrics_of(size), "table", bands)
    out = capsys.readouterr().out
    assert "…" not in out
    heading = out.splitlines()[0].split()
    assert set(left) <= set(heading)
    rows = [line.split() for line in out.splitlines() if line.startswith(("  from", "  to"))]
    banded = [stat for stat in heading if stat in bands["ttft_ms"]]
    assert rows == [["from", *[f"{size - 1000:,.0f}"] * len(banded)], ["to", *[f"{size + 1000:,.0f}"] * len(banded)]]


def test_the_catalogue_of_gpus_fits() -> None:
    lines = CliRunner().invoke(cli, ["gpus"]).output.splitlines()
    assert len(lines) > 10
    assert max(map(len, lines)) <= 80


def test_a_step_with_drafts_is_explained_in_full(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    drafts = "{method: draft_model, num_speculative_tokens: 4, acceptance_rate: 0.7, model: Llama-3.2-1B}"
    path = tmp_path / "drafts.yaml"
    path.write_text(f"model: Llama-3.1-8B\ndevice: cuda\nscheduler: {{speculative: {drafts}}}\n")
    done = CliRunner().invoke(cli, ["explain", "-d", str(path), "--prompts", "1"])
    assert done.exit_code == 0, done.output
    assert "…" not in done.output
    assert "draft" in done.output
