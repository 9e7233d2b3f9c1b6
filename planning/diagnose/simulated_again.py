"""A check that a recorded run, simulated as it was, came out as it was: else its counterfactuals are about another run.

A simulated run must come out to the nanosecond, since the simulator is deterministic. A real one comes out as well as
the twin predicts it, and a run behind a real API server as well as the server is known.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from planning.diagnose.document import DiagnosisDocument
from serving.figures import shown_change
from serving.version import __version__
from traces.recording import Recording
from traces.recording_notes import notes_of

_FAR = 0.25  # share of a real run's p99: with a larger error, counterfactuals are about another run
_SAME = ("status", "replica", "scheduled_ns", "first_token_ns", "finish_ns")


def another_run(recording: Recording, calibration: str, again: pa.Table, diagnosis: DiagnosisDocument) -> str | None:
    """Return a warning if the counterfactuals are not about the recorded run; None if they are.

    `calibration` is the id of what timed the steps of `diagnosis`, and `again` the dataset `requests` of the run
    simulated as it was.
    """
    fitted = recording.filled("requests", ["received_ns"]) and notes_of(recording.run).get("front_door") is None
    if recording.run["clock"] == "virtual" and not fitted:
        return _simulated(recording, again, calibration)
    error = diagnosis.twin_error
    if error is None or abs(error) <= _FAR:
        return None
    what = "share of requests that come to nothing" if diagnosis.sheds else "p99"
    return f"the simulated {what} is {shown_change(100 * error, 0)} off the recorded one: these are causes in the twin"


def _simulated(recording: Recording, again: pa.Table, calibration: str) -> str | None:
    before = recording.table("requests", ["request_id", *_SAME]).sort_by("request_id")
    after = again.select(["request_id", *_SAME]).sort_by("request_id")
    if before["request_id"].combine_chunks() != after["request_id"].combine_chunks():
        differing = before.num_rows
    else:
        differing = int(np.logical_or.reduce([_differs(before[name], after[name]) for name in _SAME]).sum())
    if not differing:
        return None
    return (
        f"simulated again, {differing:,} of {before.num_rows:,} requests come out otherwise than recorded: "
        f"{_why(recording, calibration)}; these are causes in another run"
    )


def _differs(before: pa.ChunkedArray, after: pa.ChunkedArray) -> np.ndarray:
    same = pc.fill_null(pc.equal(before, after), False)
    neither = pc.and_(pc.is_null(before), pc.is_null(after))
    return ~pc.or_(same, neither).to_numpy()


def _why(recording: Recording, calibration: str) -> str:
    run = recording.run
    if run["calibration"] != calibration:
        return f"its steps were timed by {run['calibration'] or 'nothing that is known'}, here by {calibration}"
    if run["version"] != __version__:
        return f"tokentwin {run['version']} made it, and this is {__version__}"
    return "its router, policy or cost model was another"
