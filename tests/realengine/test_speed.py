"""How fast the machine is: looked at rarely enough, in units of the engine's own work, or of a GPU's clock."""

import sys
import threading
import time
from types import ModuleType

import pytest

pytest.importorskip("torch")

from tokentwin.realengine.devices import machine, speed
from tokentwin.realengine.devices.speed import GpuClock, SpeedProbe
from tokentwin.serving.deployments.config import Deployment


class Clock:
    """A wall clock and a thread clock that advance by the work that is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.thread = 0
        monkeypatch.setattr(speed, "perf_counter_ns", lambda: self.wall)
        monkeypatch.setattr(speed, "thread_time_ns", lambda: self.thread)


def test_the_probe_takes_little_time_and_is_blind_to_what_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, probed = Clock(monkeypatch), []

    def work() -> None:
        probed.append(clock.wall)
        clock.wall += 900_000  # of which others took most
        clock.thread += 500_000

    probe = SpeedProbe(work)
    for _ in range(1000):
        clock.wall += 10_000_000
        assert probe() == pytest.approx(2.0)
    assert 0.01 < len(probed) * 900_000 / clock.wall < 0.025


def test_a_gpus_clock_is_a_share_of_its_highest_and_absent_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = ModuleType("pynvml")
    nvml.NVML_CLOCK_SM = 1  # type: ignore[attr-defined]
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetMaxClockInfo = lambda gpu, kind: 1980  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetClockInfo = lambda gpu, kind: 1485  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert GpuClock(0)() == 0.75
    clock = GpuClock(0)
    (thread,) = [t for t in threading.enumerate() if t.name == "nvml" and t.is_alive()][-1:]
    asked = []
    nvml.nvmlDeviceGetClockInfo = lambda gpu, kind: asked.append(threading.current_thread()) or 990  # type: ignore[attr-defined]
    while not asked:
        time.sleep(0.01)
    while clock() != 0.5:  # the mean of what was read since the call before
        time.sleep(0.01)
    assert set(asked) <= set(threading.enumerate()) - {threading.current_thread()}  # no caller ever waits for NVML
    del clock
    thread.join(10)
    assert not thread.is_alive()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuClock(0)() is None


@pytest.mark.parametrize(
    ("stated", "bfloat16_ns", "chosen"),
    [({}, 100, "bfloat16"), ({}, 600, "float32"), ({"dtype": "bfloat16"}, 600, "bfloat16")],
)
def test_the_faster_type_where_none_is_stated(monkeypatch, stated, bfloat16_ns, chosen):
    times = {"torch.bfloat16": bfloat16_ns, "torch.float32": 100}
    monkeypatch.setattr(machine, "_time_ns", lambda dtype: times[str(dtype)])
    deployment, reason = machine.with_fast_dtype(Deployment.model_validate(stated))
    assert deployment.dtype == chosen
    assert ("6.0 times" in reason) == (chosen == "float32")
