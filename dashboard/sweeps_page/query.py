"""SQL of untrusted users over a table: read-only, without files or network, and with limits.

The query runs in a separate process (`query_process`), which ends when its time is up.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from tokentwin.serving.errors import UserError

ROWS = 1000
MOST_MB = 5  # maximum size of an answer in MB; a browser freezes at a hundred
SECONDS = 5
MEMORY_MIB = 3072  # address space, most of which is never used
LONGEST = 10_000  # maximum number of characters of a query
_START_S = 60  # time that a busy machine may take before the query begins

_PROCESS = Path(__file__).with_name("query_process.py")


def query(table: pa.Table, sql: str, seconds: int = SECONDS, rows: int = ROWS) -> pa.Table:
    """Return the first `rows` rows, up to `MOST_MB`, of the answer to `sql`, which reads `table` as `runs`.

    Raises UserError, one line, for a query that is wrong, does more than read, or exceeds its limits.
    """
    if not sql.strip():
        raise UserError("query", sql, "is empty; for example: select * from runs")
    if len(sql) > LONGEST:
        raise UserError("query", sql, f"is longer than {LONGEST:,} characters")
    limits = {"sql": sql, "rows": rows, "bytes": MOST_MB * 10**6, "seconds": seconds, "memory_mib": MEMORY_MIB}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    given = json.dumps(limits).encode() + b"\n" + sink.getvalue().to_pybytes()
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_PROCESS)],
            input=given,
            capture_output=True,
            timeout=_START_S + seconds,
            env={},
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise UserError("query", sql, "could not begin: this machine is too busy; ask again later") from None
    if done.returncode == -signal.SIGALRM:
        raise UserError("query", sql, f"took longer than {seconds} s and was stopped")
    if done.returncode < 0:
        raise UserError("query", sql, "was stopped: it needs too much memory or time")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or ["failed"]
        raise UserError("query", sql, lines[-1])
    answer: pa.Table = pa.ipc.open_stream(done.stdout).read_all()
    return answer


def cut_short(answer: pa.Table) -> bool:
    """Return whether the answer had more rows than fit into `MOST_MB`."""
    return b"cut" in (answer.schema.metadata or {})
