"""How hard the tests look: three hypothesis profiles, which a run chooses by `--hypothesis-profile`.

`fast` is a glance at every save, `default` what must hold before a merge, and `long` the deep search, which draws anew
each time and prints how to have a failure again. A test never states a number of its own, only a share of these.
"""

from hypothesis import HealthCheck, settings

# No deadline: what takes a millisecond takes a second on a machine that does twenty things at once.
_COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
settings.register_profile("fast", _COMMON, max_examples=10, derandomize=True)
settings.register_profile("default", _COMMON, max_examples=30, derandomize=True)
settings.register_profile("long", _COMMON, max_examples=2000, derandomize=False, print_blob=True)
settings.load_profile("default")


def examples(share: float) -> settings:
    """The budget of a test whose examples cost more, or find more, than most: so many times the profile's."""
    return settings(max_examples=max(1, round(share * settings.default.max_examples)))


def simulated(requests: int) -> int:
    """How many of so many requests a statistical test simulates: all of them in `long`, a quarter otherwise."""
    return requests if _long() else requests // 4


def within(precision: float) -> float:
    """The interval that goes with `simulated`: twice as wide for a quarter of the requests."""
    return precision if _long() else 2 * precision


def soaked(seconds: float) -> float:
    """How long a soak is: all of it in `long`, a hundredth otherwise."""
    return seconds if _long() else seconds / 100


def _long() -> bool:
    return settings.get_current_profile_name() == "long"
