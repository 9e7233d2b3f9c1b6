"""The fused and sampling kernels against float64 in Triton's interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

REPOSITORY = Path(__file__).parent.parent


@pytest.mark.interpret
@pytest.mark.parametrize("check", ["norms", "silu", "rope", "greedy", "limits", "shares", "ties"])
def test_in_the_interpreter(check: str) -> None:
    command = [sys.executable, "-m", "tests.kernels_fused_interpret", check]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
