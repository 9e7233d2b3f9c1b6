"""Calibrations from measured runs, kept in the directory of fetched files under a hash of their contents."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tokentwin.calibration.validation.external.own_runs import learnt_from_runs
from tokentwin.planning.home import home
from tokentwin.serving.deployments.config import Deployment


def kept_runs(paths: Sequence[Path], deployment: Deployment | None, gpu: str | None) -> Path:
    """Return the directory of the calibration from the measured runs in `paths`; see `own_runs.learnt_from_runs`."""
    learnt = learnt_from_runs(paths, deployment, gpu, datetime.now(UTC).isoformat(timespec="seconds"))
    directory = home() / "measured" / learnt.id
    learnt.save(directory)
    return directory
