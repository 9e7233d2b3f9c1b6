"""What `/metrics` says on the port of one replica: what a server of its own would say."""

from __future__ import annotations

import re

_ENGINE = re.compile(rb'(?<=[{,])engine="(\d+)"')


def of_one_replica(text: bytes, replica: int) -> bytes:
    """Metrics in Prometheus' text format without the samples of other replicas; this one is engine 0."""
    lines = []
    for line in text.splitlines(keepends=True):
        found = None if line.startswith(b"#") else _ENGINE.search(line)
        if found is None:
            lines.append(line)
        elif int(found[1]) == replica:
            lines.append(_ENGINE.sub(b'engine="0"', line, count=1))
    return b"".join(lines)
