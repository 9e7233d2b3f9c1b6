"""Files that pages read, kept between reruns until they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pyarrow as pa
import streamlit as st
from numpy.typing import NDArray

from tokentwin.dashboard.library import stamp
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

# The gaps between tokens of a longer run are those of this many requests at the beginning of this many row groups. They
# are a few million gaps; reading all gaps would take half a minute.
_GROUPS, _OF_EACH = 12, 2048
_DRAWN = (  # columns of steps that both the metrics and the timeline of a run need
    "replica", "start_ns", "end_ns", "prefill_tokens", "decode_rows", "running", "waiting", "used_blocks",
    "waiting_blocks",
)  # fmt: skip


class _KeptRecording(Recording):
    """A recording that keeps columns of numbers once read, because metrics, timeline and tables need the same ones."""

    def __init__(self, path: str | Path) -> None:
        self._kept: dict[tuple[str, str], pa.ChunkedArray] = {}
        super().__init__(path)

    def table(
        self, dataset: str, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
    ) -> pa.Table:
        if columns is None or groups is not None:
            return super().table(dataset, columns, groups)
        missing = [name for name in columns if (dataset, name) not in self._kept]
        read = super().table(dataset, missing) if missing else pa.table({})
        all_columns = {name: read[name] if name in missing else self._kept[dataset, name] for name in columns}
        small = (name for name in missing if not pa.types.is_nested(all_columns[name].type))  # lists fill the memory
        self._kept.update({(dataset, name): all_columns[name] for name in small})
        return pa.table(all_columns)

    def pieces(self, dataset: str, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        if any((dataset, name) not in self._kept for name in columns):
            return super().pieces(dataset, columns, rows)
        table = self.table(dataset, columns)
        return (table.slice(at, rows) for at in range(0, table.num_rows, rows))


def _written(directory: Path) -> tuple[str, int]:
    return str(directory), stamp(directory) if directory.is_dir() else 0


# The keys by which a cache recognises directories and open recordings: their path, and the time of the last write.
BY_FILES: dict[str | type[Any], Callable[[Any], Any]] = {
    type(Path()): _written,
    _KeptRecording: lambda recording: _written(recording.path),
}


@st.cache_resource(max_entries=4, show_spinner="Reading the recording", hash_funcs=BY_FILES)
def open_run(directory: Path) -> tuple[Recording, RunMetrics]:
    """Return a recording and its metrics. Raises UserError if it is damaged."""
    recording = _KeptRecording(directory)
    recording.table("steps", [*_DRAWN, *recording.filled("steps", ["draft_tokens"])])
    metrics = RunMetrics.from_recording(recording)
    for name in ("e2e_ms", "mfu", "mbu"):  # the page draws mfu and mbu, and the metrics keep them
        metrics.values(name)
    return recording, metrics


class Gaps(NamedTuple):
    """Times between tokens in milliseconds, and the share of the requests from which they come."""

    values: NDArray[Any]
    share: float


def token_gaps(recording: Recording) -> Gaps:
    """Return the ITL of all requests or, in a long run, of an evenly spaced sample; empty if it is not recorded."""
    rows, columns = recording.group_rows("requests"), ["status", "token_times_ns"]
    if len(rows) <= _GROUPS:
        requests = recording.table("requests", columns)
    else:
        groups = [round(at * (len(rows) - 1) / (_GROUPS - 1)) for at in range(_GROUPS)]
        requests = recording.beginnings("requests", columns, groups, _OF_EACH)
    return Gaps(RunMetrics(requests).values("itl_ms"), requests.num_rows / max(sum(rows), 1))


def prefetch(*works: Callable[[], object]) -> None:
    """Call functions one after another on another thread, to fill the caches of the page.

    In a run of millions of steps each takes a second or more. numpy and pyarrow compute without Python's lock, so the
    thread uses the second core. Errors are ignored here, because the page gets them when it calls the same functions.
    """

    def call() -> None:
        for work in works:
            with suppress(Exception):
                work()

    Thread(target=call, daemon=True).start()
