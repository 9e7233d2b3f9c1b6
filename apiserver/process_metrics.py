"""The memory, CPU time and open files of this process, with the names that Prometheus' clients give them."""

from __future__ import annotations

import os
from pathlib import Path
from resource import RLIMIT_NOFILE, RUSAGE_SELF, getrlimit, getrusage
from time import time

from tokentwin.apiserver.exposition import Family, Series, exposition

_FAMILIES = (
    Family("process_cpu_seconds", "counter", "CPU time of the engine process in seconds"),
    Family("process_resident_memory_bytes", "gauge", "resident memory of the engine process"),
    Family("process_virtual_memory_bytes", "gauge", "virtual memory of the engine process"),
    Family("process_start_time_seconds", "gauge", "time at which the engine process started, since 1970"),
    Family("process_open_fds", "gauge", "open files of the engine process"),
    Family("process_max_fds", "gauge", "largest number of open files"),
)
_STATUS, _FILES = Path("/proc/self/statm"), Path("/proc/self/fd")


class ProcessMetrics:
    """The metrics of this process, which starts now."""

    def __init__(self) -> None:
        self._series = Series(_FAMILIES, {})
        self._series.set("process_start_time_seconds", time())

    def text(self) -> bytes:
        """Return the metrics in Prometheus' format; empty where the system has no `/proc`."""
        if not _STATUS.is_file():
            return b""
        virtual, resident = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in _STATUS.read_text().split()[:2])
        used = getrusage(RUSAGE_SELF)
        self._series.set("process_cpu_seconds", used.ru_utime + used.ru_stime)
        self._series.set("process_resident_memory_bytes", resident)
        self._series.set("process_virtual_memory_bytes", virtual)
        self._series.set("process_open_fds", len(list(_FILES.iterdir())))
        self._series.set("process_max_fds", getrlimit(RLIMIT_NOFILE)[0])
        return exposition(_FAMILIES, [self._series])
