"""Recordings that wait for a calm machine: a machine of which every load is known, and time that only it makes pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from planning.measure.calm_recordings import CalmRecordings
from serving.workload import Workload

CALM = 50_000_000
RUN_S = 10.0


class Machine:
    """Its canary takes `CALM` ns times the load at that time; a recording takes 10 s, and says when it began."""

    def __init__(self, *loads: tuple[float, float]) -> None:
        self.loads, self.now, self.said = loads, 0.0, []
        self.interrupt_at = float("inf")

    def canary(self) -> int:
        return int(CALM * next((load for until, load in self.loads if self.now < until), 1.0))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def record(self, workload: Workload, out: Path) -> SimpleNamespace:
        out.mkdir()
        (out / "began").write_text(f"{self.now:g}")
        before = self.canary()
        self.now += RUN_S
        if self.now > self.interrupt_at:
            raise KeyboardInterrupt
        return SimpleNamespace(canary_before_ns=before, canary_after_ns=self.canary())

    def recordings(self, patience_s: float) -> CalmRecordings:
        return CalmRecordings(self.record, self.canary, patience_s, self.said.append, lambda: self.now, self.sleep)


def made(folder: Path) -> dict[str, float]:
    """When each recording in `folder` began."""
    return {path.name: float((path / "began").read_text()) for path in sorted(folder.iterdir())}


def all_of_them(calm: CalmRecordings, folder: Path, count: int = 3) -> None:
    for number in range(count):
        calm.record(Workload([]), folder / f"run-{number}")
    calm.repeat_disturbed()


def test_on_a_calm_machine_nothing_is_waited_for_or_made_again(tmp_path: Path) -> None:
    machine = Machine()
    calm = machine.recordings(120)
    all_of_them(calm, tmp_path)
    assert made(tmp_path) == {"run-0": 0, "run-1": 10, "run-2": 20} and machine.now == 30
    assert not machine.said and calm.set_aside() == ""


def test_a_recording_waits_until_the_load_is_gone(tmp_path: Path) -> None:
    machine = Machine((8, 1.0), (20, 1.04), (28, 1.5))  # 1.04 still is calm
    calm = machine.recordings(120)
    for name in "abc":
        calm.record(Workload([]), tmp_path / name)
    assert made(tmp_path) == {"a": 0, "b": 10, "c": 28}
    (said,) = machine.said
    assert said.startswith("the machine is busy (the canary step takes 75.0 ms, 50.0 at the best)")


def test_what_was_disturbed_is_made_again_the_worst_first(tmp_path: Path) -> None:
    machine = Machine((8, 1.0), (12, 1.3), (18, 1.0), (23, 1.6))  # at the end of run 0, and at that of run 1
    calm = machine.recordings(120)
    all_of_them(calm, tmp_path)
    assert made(tmp_path) == {"run-0": 43, "run-1": 33, "run-2": 23}
    assert calm.set_aside() == (
        "2 of 5 recordings were set aside: the canary step took up to 80.0 ms there, and up to 50.0 ms in those "
        "that are used"
    )


def test_patience_ends(tmp_path: Path) -> None:
    machine = Machine((5, 1.0), (1e9, 1.5))
    calm = machine.recordings(60)
    all_of_them(calm, tmp_path)
    assert made(tmp_path) == {"run-0": 0, "run-1": 30, "run-2": 50}, "half of it is for waiting: 20 s, then 10"
    assert machine.now == 3 * RUN_S + 60 and calm.set_aside().startswith("3 of 6 recordings were set aside")


def test_the_calmer_of_two_is_kept(tmp_path: Path) -> None:
    machine = Machine((8, 1.0), (12, 1.2), (20, 1.0), (1e9, 1.5))
    calm = machine.recordings(15)
    all_of_them(calm, tmp_path, count=1)
    assert made(tmp_path) == {"run-0": 0}
    assert calm.set_aside() == (
        "1 of 2 recordings was set aside: the canary step took up to 75.0 ms there, and up to 60.0 ms in those "
        "that are used"
    )


def test_ctrl_c_while_one_is_made_again_leaves_the_first(tmp_path: Path) -> None:
    machine = Machine((8, 1.0), (12, 1.2))
    machine.interrupt_at = 15
    with pytest.raises(KeyboardInterrupt):
        all_of_them(machine.recordings(60), tmp_path, count=1)
    assert made(tmp_path) == {"run-0": 0}
