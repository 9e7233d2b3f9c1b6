"""A recording that is written while a server or its client runs, and its recovery if that process was killed.

`python -m tokentwin.traces.live_recording DIR` makes a recording from the journal of a killed process.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import STOPPED, Workload, WorkloadRequest
from tokentwin.traces.formats.parquet import WorkloadWriter
from tokentwin.traces.recording import JOURNAL
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.schema import DATASETS

_LOG = logging.getLogger("tokentwin")
_HEAD = 4  # bytes of an entry's length field
_PIECE = 1 << 20
_OF_A_REQUEST = [field.name for field in fields(WorkloadRequest) if field.init]
_MAPS = {column.name for dataset in DATASETS.values() for column in dataset if pa.types.is_map(column.type)}


class Journal:
    """A journal of the rows of a growing recording, so that no row is lost if the process is killed.

    A Parquet file cannot be read before it is complete. A journal can be read up to its last complete entry. The
    journal is compressed with Deflate, because a step has mostly the same rows as the previous step. Methods raise
    OSError if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._deflate = zlib.compressobj(1)
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, *entry: Any) -> None:
        """Write an entry. After this call the operating system has the entry, so a killed process does not lose it."""
        data = self._encode(entry)
        deflate = self._deflate
        packed = deflate.compress(len(data).to_bytes(_HEAD, "big") + data) + deflate.flush(zlib.Z_SYNC_FLUSH)
        if self._file.write(packed) != len(packed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


def entries(path: Path) -> Iterator[list[Any]]:
    """Yield the complete entries of a journal."""
    inflate, decode, rest = zlib.decompressobj(), msgspec.msgpack.Decoder().decode, b""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            rest += inflate.decompress(piece)
            begin = 0
            while len(rest) >= begin + _HEAD:
                end = begin + _HEAD + int.from_bytes(rest[begin : begin + _HEAD], "big")
                if end > len(rest):
                    break
                yield decode(rest[begin + _HEAD : end])
                begin = end
            rest = rest[begin:]


class Place(NamedTuple):
    """The directory `out` of a recording, or None for no recording.

    If `overwrite` is True, a new recording may replace an older one in `out`.

    If `again` is True, the process was restarted. It then records to a directory beside the older recording, because
    its engine has no state of the older run.
    """

    out: str | None
    overwrite: bool = False
    again: bool = False

    def open(self, run: Mapping[str, Any], workload: Workload | None = None) -> LiveRecording | None:
        """Open a recording of `run`, whose `workload` may be known at its start.

        Raises UserError on failure, or returns None if the process was restarted.
        """
        if self.out is None:
            return None
        try:
            path = self._path(Path(self.out))
            about = {**run, "run_id": path.name}
            writer = RecordingWriter(path, about, workload=workload, overwrite=self.overwrite)
            return LiveRecording(writer, about, writes_workload=workload is None)
        except UserError as error:
            if not self.again:
                raise
            _LOG.error("what is served from now on is not recorded: %s", error)
            return None

    def _path(self, path: Path) -> Path:
        recover(path)
        number = 1
        while self.again and path.exists():
            number += 1
            path = Path(f"{self.out}-{number}")
            with suppress(UserError):  # another process may be writing this journal
                recover(path)
        if number > 1:
            _LOG.warning("the recording goes on in %s", path)
        return path


def recover(path: Path) -> None:
    """Make a recording from the journal that a killed process left at `path`, if there is one.

    Requests that had not ended get the status `unfinished`, and their number of tokens is unknown. Raises UserError if
    the recording cannot be written; the journal is then kept.
    """
    journal = path / JOURNAL
    if not journal.is_file():
        return
    noted = entries(journal)
    _, run = next(noted, ("run", None))
    if run is None:  # the process was killed before it had written anything
        journal.unlink()
        return
    recording = LiveRecording(RecordingWriter(path, run, overwrite=True))
    for kind, row in noted:
        recording.repeat(kind, row)
    recording.leave("its process was killed")
    recording.close(status="interrupted")
    _LOG.warning("%s holds what a process that was killed had recorded", path)


class LiveRecording:
    """A recording that `writer` writes while requests are served. If writing fails, they are served on without it.

    If `writes_workload` is True, the workload is made of the requests that arrive; otherwise `writer` has it. If `run`
    (the columns of `runs` known at the start) is given, everything is also written to a journal. `recover` makes the
    recording from the journal if this process is killed.
    """

    def __init__(
        self, writer: RecordingWriter, run: Mapping[str, Any] | None = None, writes_workload: bool = True
    ) -> None:
        self._writer: RecordingWriter | None = writer
        self._journal: Journal | None = None
        self._workload: WorkloadWriter | None = None
        if writes_workload:
            self._workload = WorkloadWriter(writer.workload_path, "served", None, shares_prefixes=True)
        self._waiting: list[tuple[int, int]] = []  # a heap of arrivals and ids of requests not yet in the workload
        self._requests: dict[int, WorkloadRequest] = {}
        self._ended: dict[int, WorkloadRequest] = {}
        self._last_ns = 0
        self._run: dict[str, Any] = {}
        if run is not None:
            self._try(lambda writer: self._begin(writer.path / JOURNAL, run))

    def _begin(self, path: Path, run: Mapping[str, Any]) -> None:
        self._journal = Journal(path)
        self._journal.add("run", run)

    @property
    def goes_on(self) -> bool:
        """True while the recording is still being written."""
        return self._writer is not None

    def arrived(self, request: WorkloadRequest) -> None:
        """Note a request that has arrived.

        It is written to the workload when it and all earlier requests have ended, because all its fields are then
        known.
        """
        if self._workload is not None:
            heappush(self._waiting, (request.arrival_ns, request.id))
        self._requests[request.id] = request
        self._note("arrived", {name: getattr(request, name) for name in _OF_A_REQUEST})

    def add_request(self, row: Mapping[str, Any]) -> None:
        self._note("request", row)
        id = row["request_id"]
        request = replace(self._requests.pop(id), grammar_compile_ns=row.get("grammar_compile_ns") or 0)
        if row["status"] == "finished":
            if row["reason"] == STOPPED:
                request = replace(request, stop_ns=row["end_ns"])
            elif row["output_tokens"] < request.output_len:  # a stop token ended the answer early
                request = replace(request, output_len=row["output_tokens"], max_tokens=request.output_limit)
        elif row["reason"] and row["status"] not in ("rejected", "timed_out"):
            request = replace(request, cancel_ns=row["end_ns"])
        if self._workload is not None:
            self._ended[id] = request
            self._follow(self._workload)
        self._try(lambda writer: writer.add_request(**row))

    def add_run(self, **run: Any) -> None:
        """Set further columns of `runs`, which `close` may set again."""
        self._note("run", run)
        self._run |= run

    def add_step(self, row: Mapping[str, Any]) -> None:
        self._note("step", row)
        self._try(lambda writer: writer.add_step(**row))

    def close(self, **run: Any) -> None:
        """Close the recording; `run` has further columns of `runs`, which are known only now."""
        if (workload := self._workload) is not None:
            self._try(lambda writer: workload.close())
        self._try(lambda writer: writer.close(**{**self._run, **run}))
        self._writer = None
        if self._journal is not None:
            self._journal.close()

    def repeat(self, kind: str, row: dict[str, Any]) -> None:
        """Add an entry from another recording's journal."""
        if kind == "run":
            self.add_run(**row)
            return
        if kind == "arrived":
            self.arrived(WorkloadRequest(**{**row, "prompt": tuple(map(tuple, row["prompt"]))}))
            return
        for name in _MAPS & row.keys():
            row[name] = None if row[name] is None else [tuple(pair) for pair in row[name]]
        self._last_ns = max(self._last_ns, row["end_ns"] or 0)
        if kind == "request":
            self.add_request(row)
        else:
            self.add_step(row)

    def leave(self, why: str) -> None:
        """Record the requests that have not ended as unfinished, with the reason `why`."""
        for request in list(self._requests.values()):
            times = {"arrival_ns": request.arrival_ns, "send_ns": request.arrival_ns, "end_ns": self._last_ns}
            status = {"status": "unfinished", "reason": why, "prompt_tokens": request.prompt_len}
            self.add_request({**request.labels, **status, **times})

    def _follow(self, workload: WorkloadWriter) -> None:
        while self._waiting and self._waiting[0][1] in self._ended:
            request = self._ended.pop(heappop(self._waiting)[1])
            self._try(lambda writer, request=request: workload.add(request))

    def _note(self, kind: str, row: Mapping[str, Any]) -> None:
        if (journal := self._journal) is not None:
            self._try(lambda writer: journal.add(kind, row))

    def _try(self, write: Callable[..., None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except (UserError, OSError) as error:
            _LOG.error("the recording ends here: %s", error)
            with suppress(OSError):
                if self._workload is not None:
                    self._workload.close()
            self._writer.discard()
            self._writer = None


if __name__ == "__main__":
    try:
        recover(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
