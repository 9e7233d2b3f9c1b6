"""Recordings on a machine that others may use, too: they wait until it is calm, and the most disturbed are made again.

Calm is judged by the canary alone, the fixed step that is timed before and after each recording. What a recording
holds, and how well it is predicted, is never looked at, so that what is set aside cannot flatter.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serving.canary import CALM_DRIFT

if TYPE_CHECKING:
    from realengine.replay import Replayed
    from serving.workload import Workload

_PAUSE_S = 1.0
_LONGEST_WAIT_S = 20.0  # before one recording, so that patience is left for the others


@dataclass(frozen=True)
class _Made:
    """One recording: where it lies, what its canary took at best and at worst (ns), and how long it all took."""

    workload: Workload
    out: Path
    best_ns: int
    worst_ns: int
    seconds: float


class CalmRecordings:
    """Makes recordings, waits before each, and in the end makes those again during which the canary was slow.

    record        makes the recording of a workload at a path, where there is none
    canary        times the fixed step, in ns
    patience_s    how long to wait, and to record again, in all
    say           is called with what is waited for, and what is made again
    """

    def __init__(
        self,
        record: Callable[[Workload, Path], Replayed],
        canary: Callable[[], int],
        patience_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._record, self._canary, self._say, self._clock, self._sleep = record, canary, say, clock, sleep
        self._left_s = patience_s
        self._to_repeat_s = patience_s / 2  # of it, kept from waiting
        self._calmest_ns = min(canary() for _ in range(3))
        self._kept: dict[Path, _Made] = {}
        self._set_aside: list[_Made] = []

    def record(self, workload: Workload, out: Path) -> Replayed:
        """Record `workload` at `out` once the machine is calm, or patience for that has run out."""
        self._wait()
        began = self._clock()
        done = self._record(workload, out)
        canaries = (done.canary_before_ns, done.canary_after_ns)
        self._calmest_ns = min(self._calmest_ns, *canaries)
        self._kept[out] = _Made(workload, out, min(canaries), max(canaries), self._clock() - began)
        return done

    def repeat_disturbed(self) -> None:
        """Record again what was disturbed, the worst first, and keep the calmer one, while there is time for it."""
        while (worst := self._worst()) is not None:
            self._say(
                f"again {worst.out.name}: its canary step took {worst.worst_ns / 1e6:.1f} ms, "
                f"{self._calmest_kept() / 1e6:.1f} at the best"
            )
            self._left_s -= worst.seconds
            self._again(worst)

    def set_aside(self) -> str:
        """How many recordings are not used and why, as a clause; empty when all are."""
        if not self._set_aside:
            return ""
        count, worst = len(self._set_aside), max(run.worst_ns for run in self._set_aside)
        used = max(run.worst_ns for run in self._kept.values())
        were = "was" if count == 1 else "were"
        return (
            f"{count} of {count + len(self._kept)} recordings {were} set aside: the canary step took up to "
            f"{worst / 1e6:.1f} ms there, and up to {used / 1e6:.1f} ms in those that are used"
        )

    def _wait(self) -> None:
        """Return when the canary is calm, or the patience for waiting has run out."""
        began = self._clock()
        most_s = min(self._left_s - self._to_repeat_s, _LONGEST_WAIT_S)
        reported = False
        while self._clock() < began + most_s:
            took = self._canary()
            self._calmest_ns = min(self._calmest_ns, took)
            if took <= (1 + CALM_DRIFT) * self._calmest_ns:
                break
            if not reported:
                self._say(
                    f"the machine is busy (the canary step takes {took / 1e6:.1f} ms, {self._calmest_ns / 1e6:.1f} at "
                    f"the best): waiting for it, at most {most_s:.0f} s"
                )
                reported = True
            self._sleep(_PAUSE_S)
        self._left_s -= self._clock() - began

    def _worst(self) -> _Made | None:
        """The most disturbed of the recordings for which there is still time."""
        limit = (1 + CALM_DRIFT) * self._calmest_kept()
        disturbed = [run for run in self._kept.values() if run.worst_ns > limit and run.seconds <= self._left_s]
        return max(disturbed, key=lambda run: run.worst_ns, default=None)

    def _calmest_kept(self) -> int:
        return min(run.best_ns for run in self._kept.values())

    def _again(self, before: _Made) -> None:
        """Record once more and keep the calmer; the earlier one when this is cut short."""
        aside = before.out.with_name(f"{before.out.name}-before")
        shutil.rmtree(aside, ignore_errors=True)
        before.out.rename(aside)
        try:
            self.record(before.workload, before.out)
        except BaseException:
            self._put_back(before, aside)
            raise
        again = self._kept[before.out]
        if again.worst_ns < before.worst_ns:
            self._set_aside.append(before)
            shutil.rmtree(aside)
        else:
            self._set_aside.append(again)
            self._put_back(before, aside)

    def _put_back(self, before: _Made, aside: Path) -> None:
        shutil.rmtree(before.out, ignore_errors=True)
        aside.rename(before.out)
        self._kept[before.out] = before
