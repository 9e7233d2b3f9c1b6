"""Without a checkout, commands that need the lab report this in a line, and all others work."""

import json
from pathlib import Path

import pytest

from tests.command import tokentwin
from tokentwin.planning import checkout


@pytest.fixture
def no_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "_ROOT", tmp_path)


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("validate external --data .", "cases"),
        ("validate external --data . --cases . --leave-out gpu", "leave-out"),
        ("validate external --recording none --gpu H100 --write page.md", "write"),
    ],
)
@pytest.mark.usefixtures("no_lab")
def test_what_needs_the_lab_says_so(tmp_path: Path, command: str, field: str) -> None:
    done = tokentwin(*command.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"tokentwin: {field}: needs the folder lab, which only a checkout of the repository has"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_lab")
def test_a_case_of_ones_own_needs_no_lab(tmp_path: Path) -> None:
    case = {"name": "mine", "title": "mine", "source": "made up", "engine": "vLLM 0.19.0", "gpu": "H100",
            "deployment": {"model": "Llama-3.1-8B", "gpu_memory_utilization": 0.9}, "shown": ["tpot_ms.mean"],
            "measured": {"format": "guidellm-spans", "file": "spans.csv"}}  # fmt: skip
    header = "arrival_s,prompt_tokens,output_tokens,max_tokens,ttft_s,e2e_s,phase,phase_kind"
    (tmp_path / "spans.csv").write_text(f"{header}\n0.0,30,3,3,0.5,0.7,0,synchronous\n")
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "mine.yaml").write_text(json.dumps(case))
    done = tokentwin("validate", "external", "--data", ".", "--cases", "cases", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["measured"] for row in json.loads(done.stdout)["cases"][0]["rows"]] == [pytest.approx(100.0)]
