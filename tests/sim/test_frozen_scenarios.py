"""Small scenarios of every pair of capabilities record what they recorded, on either core."""

import json
from pathlib import Path

import pytest

from tests.sim.frozen_scenarios import FILE, TABLES, digest, pairs, tables

FROZEN = json.loads(FILE.read_text())
NAMES = list(pairs())


def _holds(names: tuple[str, ...], folder: Path) -> None:
    run = tables(names, folder)
    now = run if isinstance(run, str) else [digest(run[name], FROZEN["columns"][name]) for name in TABLES]
    assert now == FROZEN["scenarios"][" + ".join(names)], "`python -m tests.sim.frozen_scenarios` lists all that differ"


@pytest.mark.parametrize("names", NAMES[::6], ids=" + ".join)
def test_some_scenarios_record_what_they_did(names: tuple[str, ...], tmp_path: Path) -> None:
    _holds(names, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("names", NAMES, ids=" + ".join)
def test_every_scenario_records_what_it_did(names: tuple[str, ...], tmp_path: Path) -> None:
    _holds(names, tmp_path)


def test_the_scenarios_are_of_every_pair_and_few_are_refused() -> None:
    assert list(FROZEN["scenarios"]) == [" + ".join(names) for names in NAMES] and len(NAMES) >= 200
    assert sum(isinstance(outcome, str) for outcome in FROZEN["scenarios"].values()) < len(NAMES) / 4
