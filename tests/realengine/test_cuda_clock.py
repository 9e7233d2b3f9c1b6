"""Event times on the host's clock, with events that are made up: no GPU is needed to get the arithmetic right."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tokentwin.realengine.devices.cuda_device import EventClock  # noqa: E402

pytestmark = pytest.mark.engine


class Event:
    """An event at `ns` of the host's clock, on a GPU whose clock runs fast by `drift`."""

    def __init__(self, ns: int, drift: float) -> None:
        self.ns, self.gpu_ms = ns, ns * (1 + drift) / 1e6

    def elapsed_time(self, other: Event) -> float:
        return float(torch.tensor(other.gpu_ms - self.gpu_ms, dtype=torch.float32))


@pytest.mark.parametrize("drift", [0.0, 30e-6, -30e-6])
def test_events_stay_on_the_hosts_clock_for_an_hour(drift: float) -> None:
    draw = random.Random(1)
    start = 10**15
    clock = EventClock(Event(start, drift), start)
    now, worst = start, 0.0
    while now < start + 3600 * 10**9:
        now += draw.randrange(10_000_000, 200_000_000)
        event = Event(now, drift)
        worst = max(worst, abs(clock.ns(event) - now))
        waited = draw.random() < 0.7
        delay = draw.randrange(2_000, 30_000) if waited else draw.randrange(0, 50_000_000)
        clock.seen(event, now + delay, waited)
    assert worst < 80_000  # a host that looks up to 30 µs late, and a second's drift between anchors


def test_an_event_is_never_put_after_the_host_saw_it_for_long() -> None:
    start = 10**12
    clock = EventClock(Event(start, 0.0), start + 5_000_000)  # an anchor that was read late
    for second in range(1, 4):
        event = Event(start + second * 1_100_000_000, 0.0)
        clock.seen(event, event.ns + 3_000, False)
    event = Event(start + 4 * 10**9, 0.0)
    assert abs(clock.ns(event) - event.ns) < 10_000
