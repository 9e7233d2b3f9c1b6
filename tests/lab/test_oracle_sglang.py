"""Random scenarios, decided by the SGLang of `.venv-sglang` and by our scheduler."""

import os
from pathlib import Path

import pytest

from lab.oracles.live_conformance import conform_live
from lab.oracles.live_engines import find_engine
from lab.oracles.sglang_scenarios import FAMILIES, scenario

ENVIRONMENT = Path(__file__).parents[2] / ".venv-sglang"
SCENARIOS = int(os.environ.get("TOKENTWIN_SGLANG_SCENARIOS", "5"))


@pytest.mark.deep
@pytest.mark.sglang
@pytest.mark.skipif(not (ENVIRONMENT / "bin" / "python").exists(), reason="make sglang")
@pytest.mark.timeout(7200)
def test_sglang_decides_random_scenarios_alike() -> None:
    live = conform_live(find_engine(str(ENVIRONMENT), None), SCENARIOS)
    assert [family.family for family in live.families] == [*FAMILIES]
    for family in live.families:
        assert family.identical == len(family.decided) == SCENARIOS, str(family)
    assert sum(result.steps for family in live.families for result in family.decided) > 100 * SCENARIOS


def test_scenarios_are_the_same_for_the_same_number() -> None:
    for family in FAMILIES:
        assert scenario(family, 3) == scenario(family, 3) != scenario(family, 4)
