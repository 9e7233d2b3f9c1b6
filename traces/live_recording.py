"""A recording that grows while requests come, and its recovery after its process was killed.

`python -m traces.live_recording DIR` makes a recording from the journal of such a process.
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

from serving.errors import UserError
from serving.workload import WorkloadRequest
from traces.formats.parquet import WorkloadWriter
from traces.recording import JOURNAL
from traces.recording_writer import RecordingWriter
from traces.schema import DATASETS

_LOG = logging.getLogger("tokentwin")
_HEAD = 4  # bytes of an entry's length field
_PIECE = 1 << 20
_OF_A_REQUEST = [field.name for field in fields(WorkloadRequest) if field.init]
_MAPS = {column.name for dataset in DATASETS.values() for column in dataset if pa.types.is_map(column.type)}


class Journal:
    """A journal of the rows of a growing recording at `path`, so that a process that is killed loses none of them.

    A Parquet file cannot be read before it is complete. A journal can: entry by entry, up to the entry that was being
    written. It is deflated, since a step has mostly the rows of the step before. Methods raise OSError when there is no
    more room.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._deflate = zlib.compressobj(1)
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, *entry: Any) -> None:
        """Write an entry; the operating system has it when this returns."""
        data = self._encode(entry)
        deflate = self._deflate
        packed = deflate.compress(len(data).to_bytes(_HEAD, "big") + data) + deflate.flush(zlib.Z_SYNC_FLUSH)
        if self._file.write(packed) != len(packed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


def entries(path: Path) -> Iterator[list[Any]]:
    """Yield the entries of a journal, without an entry that was not written to its end."""
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

    `overwrite` allows it to replace an older recording.

    A process that was started `again` records in a directory beside the older recording: its engine has forgotten
    everything, so its run is another.
    """

    out: str | None
    overwrite: bool = False
    again: bool = False

    def open(self, run: Mapping[str, Any]) -> LiveRecording | None:
        """Open a recording of `run`. Raises UserError if that fails; a process started `again` then has none."""
        if self.out is None:
            return None
        try:
            path = self._path(Path(self.out))
            about = {**run, "run_id": path.name}
            writer = RecordingWriter(path, about, overwrite=self.overwrite)
            return LiveRecording(writer, about)
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
            with suppress(UserError):  # the journal of another process
                recover(path)
        if number > 1:
            _LOG.warning("the recording goes on in %s", path)
        return path


def recover(path: Path) -> None:
    """Make a recording from the journal that a killed process left at `path`, if there is one.

    Requests that were under way become `unfinished`, and their number of tokens is not known. Raises UserError if the
    recording cannot be written; nothing is lost then.
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
    """A recording that `writer` writes while a server runs. If writing fails, serving goes on without it.

    With `run`, the columns of `runs` known at the start, everything is also written to a journal. `recover` makes the
    recording from the journal if this process is killed.
    """

    def __init__(self, writer: RecordingWriter, run: Mapping[str, Any] | None = None) -> None:
        self._writer: RecordingWriter | None = writer
        self._journal: Journal | None = None
        self._workload = WorkloadWriter(writer.workload_path, "served", None, shares_prefixes=True)
        self._waiting: list[tuple[int, int]] = []  # a heap of arrivals and ids of requests not yet in the workload
        self._requests: dict[int, WorkloadRequest] = {}
        self._ended: dict[int, WorkloadRequest] = {}
        self._last_ns = 0
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
        """Take in a request that has arrived.

        It enters the workload once it and all earlier requests have ended, because only then are all its fields known.
        """
        heappush(self._waiting, (request.arrival_ns, request.id))
        self._requests[request.id] = request
        self._note("arrived", {name: getattr(request, name) for name in _OF_A_REQUEST})

    def add_request(self, row: Mapping[str, Any]) -> None:
        self._note("request", row)
        id = row["request_id"]
        request = replace(self._requests.pop(id), grammar_compile_ns=row.get("grammar_compile_ns") or 0)
        if row["status"] == "finished":
            if row["reason"]:
                request = replace(request, stop_ns=row["end_ns"])
            elif row["output_tokens"] < request.output_len:  # a stop token ended it
                request = replace(request, output_len=row["output_tokens"], max_tokens=request.output_limit)
        elif row["reason"] and row["status"] not in ("rejected", "timed_out"):
            request = replace(request, cancel_ns=row["end_ns"])
        self._ended[id] = request
        self._follow()
        self._try(lambda writer: writer.add_request(**row))

    def add_step(self, row: Mapping[str, Any]) -> None:
        self._note("step", row)
        self._try(lambda writer: writer.add_step(**row))

    def close(self, **run: Any) -> None:
        """End the recording; `run` are columns of `runs` that are known only now."""
        self._try(lambda writer: self._workload.close())
        self._try(lambda writer: writer.close(**run))
        self._writer = None
        if self._journal is not None:
            self._journal.close()

    def repeat(self, kind: str, row: dict[str, Any]) -> None:
        """Take in an entry from another recording's journal."""
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
        """Record the requests that have arrived and not ended as unfinished, for the reason `why`."""
        for request in list(self._requests.values()):
            times = {"arrival_ns": request.arrival_ns, "send_ns": request.arrival_ns, "end_ns": self._last_ns}
            status = {"status": "unfinished", "reason": why, "prompt_tokens": request.prompt_len}
            self.add_request({**request.labels, **status, **times})

    def _follow(self) -> None:
        while self._waiting and self._waiting[0][1] in self._ended:
            request = self._ended.pop(heappop(self._waiting)[1])
            self._try(lambda writer, request=request: self._workload.add(request))

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
                self._workload.close()
            self._writer.discard()
            self._writer = None


if __name__ == "__main__":
    try:
        recover(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
