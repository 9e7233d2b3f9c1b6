"""Real runs that only count when they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planning.progress import counting
from serving.workload import Workload

if TYPE_CHECKING:
    from realengine.engine import Engine
    from realengine.replay import Replayed


def record_whole(workload: Workload, engine: Engine, out: Path, overwrite: bool) -> Replayed:
    """Replay and record; raises KeyboardInterrupt if Ctrl-C cut it short, after what there is was written."""
    from realengine.replay import record

    requests = sum(1 for _ in workload.requests)
    with counting(workload.name, requests) as advance:
        done = record(workload, engine, out, overwrite=overwrite, progress=advance)
    if done.status != "complete":
        raise KeyboardInterrupt
    return done
