"""A deployment that was made ill on purpose: its symptom shows, and the layer of the illness is named first."""

from pathlib import Path

import pytest

from tests.budget import soaked
from tests.planning.planted_illnesses import SEEDS, diagnosed, kind_of, planted
from tokentwin.planning.diagnose.document import AREAS

OFTEN = (
    "static batches", "short limit", "needless GPUs", "experts over nodes", "launches", "reserved KV", "KV transfers",
    "slow front door", "few adapter slots", "slow encoder",
)  # fmt: skip


@pytest.mark.parametrize("kind", OFTEN)
def test_the_planted_layer_is_named_first(kind: str, tmp_path: Path) -> None:
    illness = planted(kind, 1)
    found = diagnosed(illness, tmp_path / "run")
    assert found.blamed is not None and found.blamed.lifecycle == illness.layer and found.cause in illness.lifts
    assert illness.symptom in [symptom.name for symptom in found.symptoms]
    assert {lift.area for lift in found.counterfactuals} == set(AREAS)


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_nine_layers_of_ten_are_named_first(tmp_path: Path) -> None:
    named, shown, count = 0, 0, round(soaked(SEEDS))
    for seed in range(count):
        illness = planted(kind_of(seed), seed)
        found = diagnosed(illness, tmp_path / str(seed))
        named += found.blamed is not None and found.blamed.lifecycle == illness.layer
        shown += illness.symptom in [symptom.name for symptom in found.symptoms]
    assert min(named, shown) >= 0.9 * count > 0
