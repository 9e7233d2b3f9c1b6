"""`import tokentwin`: its page and its notebook are executed, importing it is light, and bad input is one line."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tokentwin
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest

DOCS = Path(__file__).parents[2] / "docs"
REQUESTS = Workload([WorkloadRequest(at, at * 10**8, (("", 100 + at),), 8) for at in range(8)])


def executed(cells: list[str]) -> list[object]:
    """Return the value of each cell's last expression, if it ends with one; all cells share a namespace."""
    space: dict[str, object] = {}
    shown = []
    for cell in cells:
        *statements, last = ast.parse(cell).body
        ends_shown = isinstance(last, ast.Expr)
        exec(compile(ast.Module(statements if ends_shown else [*statements, last], []), "cell", "exec"), space)
        shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), space) if ends_shown else None)
    return shown


def test_the_page_does_what_it_says(capsys):
    executed(re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(encoding="utf-8"), re.DOTALL))
    printed = capsys.readouterr().out
    assert re.search(r"finished\s+60", printed) and "replica" in printed and "max_num_seqs" in printed


@pytest.mark.deep  # it asks what the page asks
def test_the_notebook_runs_and_its_answers_show_themselves():
    cells = json.loads((DOCS / "python.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = executed(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"])
    answers = [answer for answer in shown if answer is not None]
    assert len(answers) == 6 and all("<" in answer._repr_html_() for answer in answers)


def test_importing_it_loads_nothing_heavy():
    heavy = {"torch", "simpy", "pandas", "pyarrow", "numpy", "pydantic", "streamlit", "scipy", "rich"}
    code = f"import sys, tokentwin; sys.exit(', '.join({heavy} & sys.modules.keys()) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_workload_is_simulated_and_its_recording_read(tmp_path):
    run = tokentwin.simulate(REQUESTS, gpu="H100", out=tmp_path / "run", band=False)
    assert run.to_arrow().num_rows == 8 and run.bands is None
    assert run.to_arrow("steps").equals(tokentwin.read_recording(tmp_path / "run").steps)
    again = tokentwin.compare(tmp_path / "run", tmp_path / "run")
    assert not again.difference
    assert tokentwin.diagnose(tmp_path / "run").to_pandas("symptoms").columns[0] == "name"


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (lambda: tokentwin.simulate(REQUESTS), "give gpu or calibration"),
        (lambda: tokentwin.simulate(REQUESTS, gpu="H101"), "gpu: 'H101'"),
        (lambda: tokentwin.simulate("nothing.csv", gpu="H100"), "nothing.csv"),
        (lambda: tokentwin.plan(REQUESTS, ["ttft_ms p99<=500"], gpu="H100"), "did you mean gpus"),
        (lambda: tokentwin.compare("a", "b", REQUESTS, gpu="H100"), "leave traffic out"),
        (lambda: tokentwin.compare({}, {"polcy": "fair"}, REQUESTS, gpu="H100"), "polcy"),
        (lambda: tokentwin.sweep({}, "out"), "sweep"),
        (lambda: tokentwin.validate([], "nothing"), "give either recordings, or --trace"),
        (lambda: tokentwin.validate(["nothing"], "nothing", limit=3), "limit: 3: needs --trace"),
        (lambda: tokentwin.validate(["nothing"]), "calibration: is missing"),
        (lambda: tokentwin.validate(["nothing"], "no calibration here"), "no calibration here"),
        (lambda: tokentwin.calibrate(out="out", gpu="H100"), "needs --from-iterations"),
        (lambda: tokentwin.calibrate(out="out", case="a.yaml", recordings=["b"]), "give only one of"),
        (
            lambda: tokentwin.calibrate({"model": "smollm2"}, "out", case="a.yaml"),
            "cannot be combined with --from-case",
        ),
        (lambda: tokentwin.calibrate(out="out", iterations="log.csv", gpu="H100"), "log.csv"),
    ],
)
def test_bad_input_is_one_line(ask, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        ask()
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
