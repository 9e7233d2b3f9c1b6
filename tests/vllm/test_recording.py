"""What vLLM itself decides, live, is recorded, and our simulator decides the same in every step."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.vllm.environment import PYTHON, ROOT, SEES, environment, needs_vllm
from tests.vllm.scenarios import scenarios
from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.serving.deployments.config import load_deployment
from tokentwin.traces.recording import Recording

pytestmark = [pytest.mark.deep, pytest.mark.vllm, needs_vllm]

ALL = {name: one for name, one in scenarios().items() if SEES or "pictures" not in name}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of recordings, by scenario. One process makes several, since vLLM takes long to import."""
    out = tmp_path_factory.mktemp("live")
    paths = []
    for name, scenario in ALL.items():
        path = out / f"{name}.json"
        path.write_text(json.dumps({**scenario, "out": str(out / name)}))
        paths.append(str(path))
    for first in range(0, len(paths), 7):  # no more: vLLM wraps its kernels once more for each engine of a process
        command = [str(PYTHON), "-m", "tests.vllm.live_run", *paths[first : first + 7]]
        done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("name", ALL)
@pytest.mark.timeout(3000)
def test_every_decision_is_made_again(recordings: Path, name: str) -> None:
    recording = Recording.load(recordings / name)
    result = replay_decisions(recording)
    assert recording.run["status"] == "complete"
    assert result.exact and result.steps > 50, result
    assert {one["status"] for one in recording.requests.to_pylist()} <= {"finished", "cancelled"}
    stated = load_deployment(recordings / name / "deployment.yaml")
    assert stated.model_dump_json() == recording.run["deployment"]
    assert stated.scheduler.async_scheduling == ("overlapped" in name)
    preempted = sum(recording.steps["preempted"].to_pylist())
    assert preempted > 0 or name.split(",")[0] not in ("tight", "priority")
