"""The process in which a query runs: DuckDB over one table, with nothing else within reach.

DuckDB's own limits have gaps (it does not count a long string as memory). So the process is also limited in address
space and CPU time, and cannot write to files. The dashboard starts this script in Python's isolated mode; it imports
none of our modules.
"""

import json
import resource
import signal
import sys
from bisect import bisect_right

import duckdb
import pyarrow as pa

TABLE = "runs"
_ALLOWED = {"SELECT", "EXPLAIN", "MULTI"}  # MULTI is a PIVOT
_MIB = 1 << 20
_DUCKDB_MIB = 512


class _TooLarge(Exception):
    pass


def main() -> int:
    """Run a query from standard input: a line of JSON, then the table as an Arrow stream.

    The JSON has `sql`, `rows`, `bytes`, `seconds` and `memory_mib`. The first rows of the answer are written to
    standard output as an Arrow stream, with at most `rows` rows and `bytes` bytes. If the exit status is 1, standard
    error has one line.
    """
    limits = json.loads(sys.stdin.buffer.readline())
    given = pa.ipc.open_stream(sys.stdin.buffer).read_all()
    for limit, most in (
        (resource.RLIMIT_AS, limits["memory_mib"] * _MIB),
        (resource.RLIMIT_CPU, 2 * limits["seconds"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    signal.setitimer(signal.ITIMER_REAL, limits["seconds"])  # ends the process; the time of its start does not count
    try:
        answer = _first(_answer(given, limits["sql"], limits["rows"]), limits["bytes"])
    except MemoryError:
        print("needs too much memory", file=sys.stderr)
        return 1
    except (duckdb.Error, pa.ArrowException, _TooLarge) as error:
        print(str(error).partition("\n")[0], file=sys.stderr)
        return 1
    with pa.ipc.new_stream(sys.stdout.buffer, answer.schema) as out:
        out.write_table(answer)
    return 0


def _answer(given: pa.Table, sql: str, rows: int) -> pa.Table:
    """Return the first `rows` rows of the answer to `sql`."""
    connection = duckdb.connect(":memory:", config={"python_enable_replacements": "false", "temp_directory": ""})
    connection.register("given", given)
    connection.execute(f"create table {TABLE} as select * from given")
    connection.unregister("given")
    for setting in (
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        "allow_community_extensions = false",
        f"memory_limit = '{_DUCKDB_MIB}MiB'",
        "threads = 1",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"set {setting}")
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type.name not in _ALLOWED:
        raise duckdb.NotSupportedError("give one SELECT that reads the table runs")
    relation = connection.sql(sql)
    if relation is None:
        raise duckdb.NotSupportedError("has no rows to show")
    return relation.limit(rows).to_arrow_table()


def _first(answer: pa.Table, most_bytes: int) -> pa.Table:
    """Return as many of the first rows as fit into `most_bytes`; the metadata says if rows were left out."""
    if answer.nbytes <= most_bytes:
        return answer
    rows = bisect_right(range(1, answer.num_rows + 1), most_bytes, key=lambda rows: answer.slice(0, rows).nbytes)
    if not rows:
        raise _TooLarge(f"one row is larger than {most_bytes / 1e6:g} MB")
    return answer.slice(0, rows).replace_schema_metadata({b"cut": b"1"})


if __name__ == "__main__":
    sys.exit(main())
