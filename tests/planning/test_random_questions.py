"""Random plausible questions end with an answer, "infeasible", or one line before anything is simulated."""

from pathlib import Path

import pytest

from tests.planning.random_questions import faults


@pytest.mark.parametrize("seed", range(60))
def test_a_plausible_question_has_an_answer(seed: int, tmp_path: Path) -> None:
    assert not faults(seed, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(60, 660))
def test_more_plausible_questions_have_answers(seed: int, tmp_path: Path) -> None:
    assert not faults(seed, tmp_path)
