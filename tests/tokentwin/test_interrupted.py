"""A command that is ended leaves nothing half-written, by Ctrl-C and by the SIGTERM of a container alike."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import tokentwin

SPEC = """
requests: 20000
arrivals: {kind: poisson, rate: 50}
prompt: {kind: lognormal, mean: 300, sigma: 1}
output: {kind: lognormal, mean: 300, sigma: 1}
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_simulation_leaves_no_recording(tmp_path: Path, how: signal.Signals) -> None:
    trace, out = tmp_path / "trace.parquet", tmp_path / "run"
    (tmp_path / "spec.yaml").write_text(SPEC)
    assert tokentwin("trace", "synth", trace, "--spec", tmp_path / "spec.yaml").returncode == 0
    simulate = ["simulate", trace, "--gpu", "H100", "--replicas", "4", "-o", out]
    process = subprocess.Popen([sys.executable, "-m", "tokentwin.cli", *simulate], stderr=subprocess.PIPE, text=True)
    while not (out / ".steps.parquet.partial").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(how)
    _, said = process.communicate()
    assert (process.returncode, said.strip()) == (130, "tokentwin: interrupted")
    assert not out.exists()
