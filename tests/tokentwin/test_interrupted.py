"""A command that is ended leaves nothing half-written, by Ctrl-C and by the SIGTERM of a container alike."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import tokentwin
from tokentwin.__main__ import run

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


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(monkeypatch, capsys) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "tokentwin.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tokentwin.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130 and capsys.readouterr().err == "tokentwin: interrupted\n"
