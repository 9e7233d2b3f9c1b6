"""A recording that cannot go on ends with one line, and nothing else happens."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event as Signal
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllmside.stand_in import request
from tokentwin.vllmside.engine_events import Arrived, Event
from tokentwin.vllmside.engine_recorder import EngineRecorder, open_recorder
from tokentwin.vllmside.record_settings import RecordSettings
from tokentwin.vllmside.writer_thread import WriterThread

CAME = Arrived(0, "a", 0, 0, 3, 4, 0, False, False, ())


class Run:
    """A run that takes events, unless it is told to fail or to wait."""

    def __init__(self, fails: bool = False) -> None:
        self.goes_on = True
        self.may_go_on = Signal()
        self.may_go_on.set()
        self.taken: list[Event] = []
        self.closed = ""
        self._fails = fails

    def take(self, event: Event) -> None:
        self.may_go_on.wait()
        if self._fails:
            raise OSError(28, "No space left on device")
        self.taken.append(event)


def test_events_arrive_in_order_and_finish_comes_last() -> None:
    run, finished = Run(), []
    thread = WriterThread(run, 100)
    for id in range(50):
        thread.put(CAME._replace(id=id))
    thread.close(lambda: finished.append(len(run.taken)), 60)
    assert [event.id for event in run.taken if isinstance(event, Arrived)] == list(range(50))
    assert finished == [50]


def test_an_error_ends_the_recording_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(fails=True)
    thread = WriterThread(run, 100)
    for _ in range(9):
        thread.put(CAME)
    thread.close(lambda: None, 60)
    assert not thread.goes_on
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "No space left on device" in line.message and "\n" not in line.message


def test_what_waits_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.may_go_on.clear()
    thread = WriterThread(run, 10)
    for _ in range(50):
        thread.put(CAME)
    run.may_go_on.set()
    thread.close(lambda: None, 60)
    assert not thread.goes_on and len(run.taken) <= 10
    assert "10 rows wait to be written" in caplog.text


def test_a_place_that_cannot_be_written_leaves_the_engine_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = SimpleNamespace(model_config=SimpleNamespace(runner_type="draft"), parallel_config=None)
    scheduler = SimpleNamespace(vllm_config=config, kv_cache_config=None)
    recorder = open_recorder(scheduler, RecordSettings(record=str(tmp_path / "file" / "x")), "0.32.0")
    assert "nothing is recorded: runner_type: 'draft': cannot be recorded" in caplog.text
    use(recorder)


def use(recorder: EngineRecorder) -> None:
    """Call everything that a scheduler calls; none of it may raise."""
    one: Any = request("a", 3, 4)
    recorder.arriving(one)
    assert recorder.now() == 0
    recorder.planned(None, None, 0)
    recorder.returned(recorder.returning(None, None), None)
    recorder.left(recorder.leaving(None))
    recorder.close()
