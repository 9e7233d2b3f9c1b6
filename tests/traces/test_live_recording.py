"""Where a recording goes: a process that was started again records beside what was recorded before it."""

from pathlib import Path

import pytest

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.live_recording import LiveRecording, Place
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter

RUN = {"clock": "virtual", "workload": "served", "deployment": "{}", "replicas": 1, "seed": 0, "num_blocks": 1}
STEP = {"replica": 0, "step": 0, "plan_ns": 0, "start_ns": 0, "end_ns": 9, "row_ids": [7], "op_ns": [("gemm", 4)]}


def opened(place: Place) -> LiveRecording:
    recording = place.open(RUN)
    assert recording is not None
    recording.arrived(WorkloadRequest(7, 5, (("a", 3), ("", 2)), 4, 1, "tenant"))
    recording.add_step(STEP)
    return recording


def killed(recording: LiveRecording) -> None:
    """Release what the system releases when a process is killed."""
    assert recording._writer is not None
    recording._writer._lock.close()


def test_each_life_has_its_own_recording_and_a_killed_one_is_recovered(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    killed(opened(Place(out)))
    killed(opened(Place(out, again=True)))
    (tmp_path / "out-3").mkdir()
    (tmp_path / "out-3" / "mine.txt").touch()
    opened(Place(out, again=True)).close(duration_ns=11)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out-2", "out-3", "out-4"}
    for name, status in (("out", "interrupted"), ("out-2", "interrupted"), ("out-4", "complete")):
        recording = Recording.load(tmp_path / name)
        assert (recording.run["status"], recording.run["run_id"]) == (status, name)
        assert recording.steps.select(list(STEP)).to_pylist() == [STEP]
    (row,) = Recording.load(out).requests.to_pylist()
    assert (row["status"], row["tenant"], row["output_tokens"]) == ("unfinished", "tenant", None)
    (request,) = Recording.load(out).workload().requests
    assert request == WorkloadRequest(7, 5, (("a", 3), ("", 2)), 4, 1, "tenant", cancel_ns=9)


def test_what_a_killed_server_left_is_recovered_before_anything_takes_its_place(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    killed(opened(Place(out)))
    with pytest.raises(UserError, match="holds what a killed"):
        RecordingWriter(out, RUN)
    with pytest.raises(UserError, match="exists"):
        Place(out).open(RUN)
    assert Recording.load(out).run["status"] == "interrupted"
    opened(Place(out, overwrite=True)).close()
    assert Recording.load(out).run["status"] == "complete"


def test_a_process_started_again_that_cannot_record_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    out.touch()
    with pytest.raises(UserError):
        Place(str(out)).open(RUN)
    (tmp_path / "out-2").symlink_to(tmp_path / "nowhere" / "at all")
    assert Place(str(out), again=True).open(RUN) is None and "is not recorded" in caplog.text
