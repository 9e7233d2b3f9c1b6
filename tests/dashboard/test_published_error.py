"""How far off predictions of published engines are, beside the answer of a plan."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from tests.dashboard.badges import page_badges
from tests.dashboard.test_plan import plan, shown
from tokentwin.dashboard.bundled import EXTERNAL_SAMPLE
from tokentwin.dashboard.trust_page.results import EXTERNAL


@pytest.fixture
def content() -> dict[str, Any]:
    return json.loads((EXTERNAL_SAMPLE / EXTERNAL).read_text())


def test_ones_own_results_come_first_and_damaged_ones_are_left_to_the_trust_page(tmp_path: Path, content) -> None:
    for row in (row for case in content["cases"] for row in case["rows"]):
        row["blind_error_pct"] = -7.0
    (tmp_path / EXTERNAL).write_text(json.dumps(content))
    assert "TTFT error 7 %" in shown(plan(tmp_path))
    assert page_badges(plan(tmp_path))[0].level == "interpolated"
    for case in content["cases"]:
        case["gpu"] = "B300"
    (tmp_path / EXTERNAL).write_text(json.dumps(content))
    assert page_badges(plan(tmp_path))[0].level == "extrapolated", "no run on this GPU was measured"
    assert "Trust: No. There is no measured run on H100" in shown(plan(tmp_path))
    (tmp_path / EXTERNAL).write_text("{")
    assert "Trust: " not in shown(plan(tmp_path))
