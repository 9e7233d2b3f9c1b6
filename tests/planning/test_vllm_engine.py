"""vLLM as the real engine, as far as it can be tested without vLLM: what is refused, and with which words it starts.

`tests/vllm/test_real_runs.py` and `tests/vllm/test_fleet.py` run it.
"""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.realengine.tiny_chat_model import save_tokenizer
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.dashboard.bundled import DEMO
from tokentwin.planning.costs import priced
from tokentwin.planning.deployments import on_engine
from tokentwin.planning.measure.real_engine import load_engines, runs_on_vllm
from tokentwin.planning.measure.vllm_engine import VllmEngine, _put
from tokentwin.planning.measure.vllm_process import vllm_python
from tokentwin.planning.resolution import base_deployment
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError

TINY = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 40, "block_size": 32}


def deployment(model: Path | str, **stated: Any) -> Deployment:
    scheduler = {**TINY, **stated.pop("scheduler", {})}
    return parse(Deployment, {"model": str(model), "engine": "vllm", "scheduler": scheduler, **stated}, where="test")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    return folder


def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make an environment whose Python is a shell script."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TOKENTWIN_VLLM", str(tmp_path / "environment"))


def test_the_engine_of_a_deployment_says_where_it_runs() -> None:
    assert not runs_on_vllm(Deployment())
    assert runs_on_vllm(on_engine(Deployment(), "vllm"))
    assert not runs_on_vllm(on_engine(Deployment(engine="vllm 0.32"), "tokentwin"))
    assert runs_on_vllm(on_engine(Deployment(engine="vllm 0.32"), None))


def test_without_the_environment_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENTWIN_VLLM", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"TOKENTWIN_VLLM: .*nowhere.*: has no bin/python; run `make vllm`"):
        vllm_python()


def test_why_vllm_ended_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    environment(tmp_path, monkeypatch, "echo starting; echo 'ValueError: no such model' >&2; echo at rest")
    with pytest.raises(UserError, match=r"vllm: 'ValueError: no such model': is why vLLM ended"):
        load_engines(deployment(model), lambda line: None)


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"scheduler": {"block_size": 16}}, "scheduler.block_size: 16: must be a multiple of 32 for vLLM on a CPU"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_before_it_starts(
    stated: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    environment(tmp_path, monkeypatch, "echo it was started; exit 1")
    with pytest.raises(UserError) as refused:
        VllmEngine(deployment(model, **stated))
    assert str(refused.value).startswith(says)


def test_a_model_needs_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(UserError, match=r"model: 'random:llama': has no config.json for vLLM"):
        VllmEngine(deployment("random:llama"))


def test_a_recording_takes_its_place_and_other_files_there_stay(tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    for folder in (made, out):
        folder.mkdir()
        (folder / "runs.parquet").write_text(folder.name)
    (out / "notes.md").write_text("mine")
    _put(made, out)
    assert {file.name: file.read_text() for file in out.iterdir()} == {"runs.parquet": "made", "notes.md": "mine"}


def test_what_was_calibrated_on_vllm_is_compared_on_vllm(tmp_path: Path) -> None:
    measured = Calibration.load(DEMO / "calibration")
    known = deployment("smollm2").model_copy(update={"engine": "vllm 0.32.0"})
    replace(measured, deployment=known.model_dump_json()).save(tmp_path / "calibration")
    base = base_deployment(str(tmp_path / "calibration"))
    assert base == known and runs_on_vllm(base)
    assert (
        priced(str(tmp_path / "calibration"), None, known.model_copy(update={"engine": "vllm"})).calibration
        == measured.id
    )
