"""How far off predictions of published engines are, beside the answer of a plan."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("streamlit")

from tests.dashboard.badges import page_badges
from tests.dashboard.test_plan import plan, shown
from tokentwin.dashboard.bundled import EXTERNAL_SAMPLE
from tokentwin.dashboard.trust_page.results import EXTERNAL, error_line, load_external


@pytest.fixture
def content() -> dict[str, Any]:
    return json.loads((EXTERNAL_SAMPLE / EXTERNAL).read_text())


def test_the_plan_says_how_far_off_predictions_of_published_engines_are(tmp_path: Path, content) -> None:
    rows = [row for case in content["cases"] if case["gpu"] == "H100" for row in case["rows"]]
    ttft, tpot = (
        median(abs(row["blind_error_pct"]) for row in rows if row["figure"].startswith(name))
        for name in ("ttft_ms", "tpot_ms")
    )
    covered = sum(row["covered"] for row in rows) / len(rows)
    page = shown(plan(tmp_path)).replace("\N{NO-BREAK SPACE}", " ")
    assert "published runs on H100" in page and f"is {ttft:.1f} % for TTFT and {tpot:.1f} % for TPOT" in page
    assert f"{100 * covered:.0f} % of the measured values" in page and "(trust?plan=example)" in page


def test_ones_own_results_come_first_and_damaged_ones_are_left_to_the_trust_page(tmp_path: Path, content) -> None:
    for row in (row for case in content["cases"] for row in case["rows"]):
        row["blind_error_pct"] = -7.0
    (tmp_path / EXTERNAL).write_text(json.dumps(content))
    assert "7.0\N{NO-BREAK SPACE}% for TTFT" in shown(plan(tmp_path))
    assert page_badges(plan(tmp_path))[0].level == "interpolated"
    for case in content["cases"]:
        case["gpu"] = "B300"
    (tmp_path / EXTERNAL).write_text(json.dumps(content))
    assert page_badges(plan(tmp_path))[0].level == "extrapolated", "no run on this GPU was measured"
    (tmp_path / EXTERNAL).write_text("{")
    assert "published runs" not in shown(plan(tmp_path))


def test_of_a_gpu_on_which_nothing_was_published_all_are_taken() -> None:
    external = load_external(EXTERNAL_SAMPLE)
    assert "on other GPUs (there is none on L4)" in error_line(external, "L4")
    without = external.model_copy(update={"cases": [case for case in external.cases if case.gpu == "B300"]})
    assert error_line(without, "B300") == "", "which has iterations, and no requests"
