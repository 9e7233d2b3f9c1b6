"""What the tests of commands share."""

import pytest

from calibration.validation import same_weather


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A band of a validation is of 39 simulated runs, which `tests/calibration/test_weather.py` has; here of five."""
    monkeypatch.setattr(same_weather, "_DRAWS", 5)
