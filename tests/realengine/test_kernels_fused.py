"""The fused and sampling kernels against float64 in Triton's interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.interpret
def test_in_the_interpreter() -> None:
    """All checks in one process, most of which is imports; the traceback names the one that fails."""
    command = [sys.executable, "-m", "tests.realengine.kernels_fused_interpret"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
