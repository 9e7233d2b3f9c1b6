"""What the tests of commands share."""

import pytest

from tokentwin.calibration.validation import known_speed


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a validation's bands from five simulated runs; `tests/calibration/test_machine_slowdown.py` uses all 39."""
    monkeypatch.setattr(known_speed, "_DRAWS", 5)
