"""Which calibration a run is held against."""

from __future__ import annotations

from pathlib import Path

from calibration.validation.decision_replay import recorded_deployment
from dashboard.bundled import DEMO
from dashboard.library import calibrations
from planning.repricing import Source, fitting_sources, source_of
from traces.recording import Recording


def timed_by(recording: Recording, runs: Path, calibration: str) -> Source | None:
    """What timed a simulated run; for a real one the calibration of this id, or any of its engine.

    Looked for under `runs` and among what is bundled; None if it is not there.
    """
    known = [*calibrations(runs).values(), DEMO / "calibration"]
    if recording.run["clock"] == "virtual":
        return source_of(recording.run, known)
    fitting = fitting_sources(recorded_deployment(recording), known)
    named = source_of({**recording.run, "calibration": calibration}, known)
    return named if named in fitting else next(iter(fitting), None)
