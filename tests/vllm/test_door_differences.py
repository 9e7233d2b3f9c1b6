"""What our server answers differently from vLLM's is in the docs, row by row, and nothing else is."""

import re
from pathlib import Path

from tests.vllm.door_cases import CASES, METRICS

PAGE = Path(__file__).parents[2] / "docs" / "serving-api.md"


def test_every_difference_has_its_row_and_every_row_a_case() -> None:
    _, section = PAGE.read_text(encoding="utf-8").split("### Where we differ from vLLM's server\n")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", section.split("\n#")[0], re.MULTILINE)
    assert sorted(rows) == sorted({METRICS, *(name for case in CASES for name in case.differs)})


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
