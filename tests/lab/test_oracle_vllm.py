"""Random scenarios, decided by the vLLM of `.venv-vllm` and by our scheduler."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab.oracles.__main__ import oracles
from lab.oracles.live_conformance import FAMILIES, conform_live, scenario
from lab.oracles.live_engines import find_engine
from tests.vllm.environment import PYTHON, needs_vllm
from tokentwin.serving.errors import UserError

SCENARIOS = int(os.environ.get("TOKENTWIN_VLLM_SCENARIOS", "10"))


@pytest.mark.deep
@pytest.mark.vllm
@needs_vllm
def test_vllm_decides_random_scenarios_alike() -> None:
    assert PYTHON is not None
    live = conform_live(find_engine(str(PYTHON.parents[1]), None), SCENARIOS)
    assert [family.family for family in live.families] == [*FAMILIES]
    for family in live.families:
        assert family.identical == len(family.decided) > SCENARIOS / 4, str(family)


# A stand-in for vLLM's Python, which decides as the recording beside it says, or fails.
_STAND_IN = """#!/usr/bin/env python3
import gzip, json, pathlib, sys
for path in map(pathlib.Path, sys.argv[3:]):
    asked = json.loads(path.read_text())
    number = int(path.stem.rsplit("_", 1)[1])
    if ANSWER == "fails":
        sys.exit("ModuleNotFoundError: no torch")
    told = {"vllm": "0.31.1"} | asked | ({"lacks": "watermark"} if number else {"stuck": "no end"})
    if number == 2:
        told = {"vllm": "0.31.1", "steps": [], "results": [], **asked}
        told["requests"] = [{"id": 0, "arrival_ns": 0, "prompt": [["a", 2]], "output_len": 1}]
        told["steps"] = [{"t": 0, "dt": DT, "n": {"0": 2}, "pre": []}]
        told["results"] = [{"id": 0, "first_token_ns": DT, "finish_ns": DT, "prefix_hit_tokens": 0}]
        told["config"] = {"max_num_batched_tokens": 2}
        told["cost"] = {"base_ns": 5, "per_token_ns": 1, "per_pair_ps": 0}
    path.with_suffix(".rec.json.gz").write_bytes(gzip.compress(json.dumps(told).encode()))
"""


def stand_in(folder: Path, answer: str = "decides", dt: int = 7) -> str:
    program = folder / "bin" / "python"
    program.parent.mkdir()
    program.write_text(_STAND_IN.replace("DT", str(dt)).replace("ANSWER", repr(answer)))
    program.chmod(0o755)
    return str(folder)


def test_the_command_says_how_each_family_went(tmp_path: Path) -> None:
    done = CliRunner().invoke(oracles, [stand_in(tmp_path), "--scenarios", "3"])
    assert done.exit_code == 0
    first, *families, total = done.output.splitlines()
    assert first == "vLLM 0.31.1"
    assert total.startswith(f"total: recordings {len(FAMILIES)}/{len(FAMILIES)} identical")
    for family, said in zip(FAMILIES, families, strict=True):
        assert said.startswith(f"{family}: recordings 1/1 identical, steps 1/1, requests 1/1; 1 not asked")
        assert said.endswith("; 1 that vLLM refused or did not end: no end")


def test_one_difference_is_the_exit_status(tmp_path: Path) -> None:
    done = CliRunner().invoke(oracles, [stand_in(tmp_path, dt=8), "--scenarios", "3"])
    assert done.exit_code == 1
    assert "recordings 0/1 identical, steps 0/1" in done.output and "first difference at step 0" in done.output


def test_what_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    engine = find_engine(stand_in(tmp_path, "fails"), None)
    with pytest.raises(UserError, match=r"^engine: .*: vLLM cannot be run there: ModuleNotFoundError: no torch$"):
        conform_live(engine, 1)
    with pytest.raises(UserError, match=r"^engine: '0\.0\.1': is no environment or unpacked wheel"):
        find_engine("0.0.1", None)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_unpacked_wheel_is_looked_in_first(tmp_path: Path, engine: str) -> None:
    (tmp_path / engine).mkdir()
    (tmp_path / engine / "__init__.py").touch()
    live = find_engine(str(tmp_path), "some/python")
    assert live.engine.name == engine
    assert live.environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert live.command("x")[0].endswith("some/python")


def test_scenarios_are_the_same_for_the_same_number() -> None:
    for family in FAMILIES:
        assert scenario(family, 3) == scenario(family, 3) != scenario(family, 4)
