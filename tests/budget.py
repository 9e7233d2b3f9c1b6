"""The effort of the tests: three hypothesis profiles, one of which a run chooses by `--hypothesis-profile`.

`fast` is a quick check at every save. `default` must pass before a merge. `long` is a deep search, which draws new
examples each time and prints how to reproduce a failure. A test states no number of its own, only a share of these.
"""

from hypothesis import HealthCheck, settings

# No deadline: a test that takes a millisecond takes a second on a busy machine.
_COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
settings.register_profile("fast", _COMMON, max_examples=10, derandomize=True)
settings.register_profile("default", _COMMON, max_examples=20, derandomize=True)
settings.register_profile("long", _COMMON, max_examples=2000, derandomize=False, print_blob=True)
settings.load_profile("default")


def examples(share: float) -> settings:
    """Return `share` times the profile's number of examples, for tests whose examples cost or find more than usual."""
    return settings(max_examples=max(1, round(share * settings.default.max_examples)))


def simulated(requests: int) -> int:
    """Return the number of requests that a statistical test simulates: all in `long`, a quarter otherwise."""
    return requests if _long() else requests // 4


def within(precision: float) -> float:
    """Return the tolerance that belongs to `simulated`: twice as wide for a quarter of the requests."""
    return precision if _long() else 2 * precision


def soaked(seconds: float) -> float:
    """Return the seconds of a soak test: all in `long`, a hundredth otherwise."""
    return seconds if _long() else seconds / 100


def _long() -> bool:
    return settings.get_current_profile_name() == "long"
