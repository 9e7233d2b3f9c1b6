"""Our Triton kernels in Triton's interpreter: against float64, as the GPU suite checks them, and under the engine."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("triton", reason="triton is not installed (Linux on x86_64 only)")


@pytest.mark.engine
@pytest.mark.interpret
@pytest.mark.statistical
def test_in_the_interpreter() -> None:
    profile = "long" if settings.get_current_profile_name() == "long" else "fast"  # an example takes seconds
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.realengine.interpreted", profile]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
