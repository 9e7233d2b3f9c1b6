"""Random scenarios, decided by the SGLang of `.venv-sglang` and by our scheduler."""

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest

from sim.checks.conformance import conform
from tests.sim.sglang_scenarios import FAMILIES, scenario

PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
SCENARIOS = int(os.environ.get("TOKENTWIN_SGLANG_SCENARIOS", "5"))
pytestmark = [
    pytest.mark.deep,
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.exists(), reason="make sglang"),
    pytest.mark.timeout(7200),
]


def test_sglang_decides_random_scenarios_alike(tmp_path: Path) -> None:
    paths = [tmp_path / f"{family} {seed}.json" for family in FAMILIES for seed in range(SCENARIOS)]
    for path in paths:
        family, _, seed = path.stem.rpartition(" ")
        path.write_text(json.dumps(scenario(family, int(seed))))
    program = Path(__file__).with_name("live_sglang.py")
    command = [str(PYTHON), "-P", str(program), *map(str, paths)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    retracted = steps = 0
    for path in paths:
        recorded = path.with_suffix(".rec.json.gz")
        recording = json.loads(gzip.decompress(recorded.read_bytes()))
        assert "stuck" not in recording, (path.stem, recording["stuck"])
        result = conform(recorded)
        assert result.identical, str(result)
        steps += result.steps
        retracted += sum(len(step["pre"]) for step in recording["steps"])
    assert steps > 100 * SCENARIOS and retracted
