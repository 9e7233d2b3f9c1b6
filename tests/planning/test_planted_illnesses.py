"""A deployment that was made ill on purpose: the layer of the illness is named first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.budget import soaked
from tests.planning.planted_illnesses import PLANTED, diagnosed, kind_of, planted

SEEDS = 3 * len(PLANTED)  # as `benchmarks/planted_illnesses.py` counts them


@pytest.mark.parametrize("kind", ["communication", "launches", "fragmentation", "small batches", "slow front door"])
def test_the_planted_layer_is_named_first(kind: str, tmp_path: Path) -> None:
    illness = planted(kind, 1)
    found = diagnosed(illness, tmp_path / "run")
    assert found.cause is not None and found.cause.lifecycle == illness.layer and found.cause.name in illness.lifts
    of = {"communication": "communication", "launches": "launch-bound steps", "fragmentation": "KV fragmentation"}
    assert of.get(kind, kind) in [symptom.name for symptom in found.symptoms]
    assert len(found.questions) == 5 and any(question.lift for question in found.questions)


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_nine_layers_of_ten_are_named_first(tmp_path: Path) -> None:
    named, count = 0, round(soaked(SEEDS))
    for seed in range(count):
        illness = planted(kind_of(seed), seed)
        cause = diagnosed(illness, tmp_path / str(seed)).cause
        named += cause is not None and cause.lifecycle == illness.layer
    assert named >= 0.9 * count > 0
