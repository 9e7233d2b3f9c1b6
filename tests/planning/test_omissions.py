"""Parts around a known answer: one that fails is left out, and one that is interrupted leaves the answer."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.command import tokentwin
from tokentwin.planning.plan.planner import plan
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.traces.synth import parse_spec

SLO = "ttft_ms p95<=300"
_PARTS = (
    "planner.first_answer", "plan._robustness", "planner.with_energy", "planner.next_measurement",
    "planner.with_mixed_fleets", "answer.fleet_curve", "answer.load_curve", "answer.engine_curves",
)  # fmt: skip


def failing(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def test_a_part_that_fails_is_left_out_and_the_answer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"requests": 30, "arrivals": {"kind": "poisson", "rate": 40}, "prompt": 600, "output": 20}
    asked = {"traffic": parse_spec(spec), "slos": (SLO,), "gpus": ("L40S",), "energy": True, "mix": ("search",)}
    request = parse(PlanRequest, asked | {"max_replicas": 8, "mix": None}, where="plan")
    whole = plan(request, jobs=1, surroundings=False)
    assert whole.recommendation is not None and not whole.omitted
    for at, part in enumerate(_PARTS):
        error = UserError(f"part {at}", None, "cannot be\nmade") if at % 2 else ValueError(f"part {at}")
        monkeypatch.setattr(f"tokentwin.planning.plan.{part}", failing(error))
    monkeypatch.setattr("tokentwin.planning.plan.planner.lengths_to_try", lambda *_: None)
    request = request.model_copy(update={"mix": ("search",)})
    bare = plan(request, jobs=1, say=lambda line: None)
    assert bare.recommendation is not None and bare.recommendation.engine == whole.recommendation.engine
    assert bare.recommendation.replicas == whole.recommendation.replicas
    assert bare.recommendation.holds == whole.recommendation.holds and bare.recommendation.energy is None
    assert [line.partition(": ")[2].partition(":")[0] for line in bare.omitted] == [
        f"part {at}" if at % 2 else "ValueError" for at in range(len(_PARTS))
    ]
    shown = [str(line) for line in bare.report()]
    assert whole.answer.startswith(bare.answer) and shown[0] == bare.answer
    assert "left out: what to measure next: part 3: cannot be made" in shown


@pytest.mark.parametrize("part", ["plan._robustness", "answer.fleet_curve"])
def test_a_plan_that_is_interrupted_leaves_what_is_known(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tokentwin.planning.plan.{part}", failing(KeyboardInterrupt()))
    words = ("--prompt", 600, "--output", 20, "--rate", 40, "--limit", 30, "--gpu", "L40S", "--slo", SLO, "--jobs", 1)
    done = tokentwin("plan", *words, "--save", tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert done.returncode == 130 and saved["recommendation"]["engine"] == "TP1 L40S"
    assert saved["inputs"]["command"].startswith("tokentwin plan --prompt 600 ")
    assert done.stdout.startswith(saved["answer"]) == (part == "answer.fleet_curve")
    assert tokentwin("export", tmp_path / "plan.json", "--to", "html", "-o", tmp_path / "plan.html").returncode == 0
