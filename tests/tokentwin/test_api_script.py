"""The Python API in a script that has no `if __name__ == "__main__"`: nothing of it runs twice."""

import subprocess
import sys
from pathlib import Path

import pytest

import tokentwin
from tokentwin.serving.errors import UserError

TRAFFIC = {
    "requests": 3,
    "arrivals": {"kind": "poisson", "rate": 8},
    "prompt": {"kind": "fixed", "tokens": 20},
    "output": {"kind": "fixed", "tokens": 3},
}
MODEL = {"model": "Llama-3.1-8B", "device": "cuda"}
SWEEP = {
    "base": {"deployment": MODEL, "gpu": "H100", "workload": TRAFFIC},
    "grid": {"deployment.scheduler.max_num_seqs": [16, 64]},
}
SCRIPT = f"""
import tokentwin
print("this runs")
print(tokentwin.sweep({SWEEP}, "swept", jobs=2).runs["status"].to_pylist())
"""
OWN_POLICY = f"""
import tokentwin
from tokentwin.serving.policies.vllm import VllmScheduler
class Mine(VllmScheduler): pass
settings = {SWEEP}
settings["base"]["deployment"]["policy"] = __file__ + ":Mine"
tokentwin.sweep(settings, "swept", jobs=2)
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(script)
    return subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_script_runs_once(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["this runs", "['complete', 'complete']"]


def test_a_script_whose_own_policy_is_in_it_needs_a_guard(tmp_path: Path) -> None:
    done = run(OWN_POLICY, tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "UserError: file: " in last and "put what it runs below if __name__ == '__main__'" in last


def test_one_job_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(common: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("tokentwin.planning.workers._started", refused)
    assert tokentwin.sweep(SWEEP, tmp_path / "swept", jobs=1).runs.num_rows == 2


def test_a_sweep_of_which_every_run_failed_is_an_error(tmp_path: Path) -> None:
    policy = tmp_path / "broken.py"
    policy.write_text(
        "from tokentwin.serving.policies.vllm import VllmScheduler\n"
        "class Broken(VllmScheduler):\n"
        "    def schedule(self):\n"
        "        raise ValueError('no plan')\n"
    )
    base = {**SWEEP["base"], "deployment": {**MODEL, "policy": f"{policy}:Broken"}}
    with pytest.raises(UserError, match=r"all 2 runs failed; the first: .*no plan"):
        tokentwin.sweep({**SWEEP, "base": base}, tmp_path / "swept", jobs=1)
