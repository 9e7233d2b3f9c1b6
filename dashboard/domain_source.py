"""Which calibration a run is held against."""

from __future__ import annotations

from pathlib import Path

from calibration.decision_replay import recorded_deployment
from calibration.engine_calibration import FILE
from dashboard.bundled import DEMO
from dashboard.library import find
from tokentwin.repricing import Source, fitting_sources, source_of
from traces.recording import Recording

_OWN = "calibration.json"


def timed_by(recording: Recording, runs: Path, calibration: str) -> Source | None:
    """What timed a simulated run; for a real one the calibration of this id, or any of its engine.

    Looked for under `runs` and among what is bundled; None if it is not there.
    """
    calibrations = [*find(runs, _OWN).values(), *find(runs, FILE).values(), DEMO / "calibration"]
    if recording.run["clock"] == "virtual":
        return source_of(recording.run, calibrations)
    fitting = fitting_sources(recorded_deployment(recording), calibrations)
    named = source_of({**recording.run, "calibration": calibration}, calibrations)
    return named if named in fitting else next(iter(fitting), None)
