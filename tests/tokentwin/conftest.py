"""What the tests of commands share."""

import pytest

from calibration.validation import same_weather


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a validation's bands from five simulated runs; `tests/calibration/test_weather.py` uses all 39."""
    monkeypatch.setattr(same_weather, "_DRAWS", 5)
