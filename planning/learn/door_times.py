"""The times of the API server in front of an engine, from the answers of its clients."""

from __future__ import annotations

from collections.abc import Sequence

from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.seen_steps import chunk_ns
from tokentwin.planning.learn.twin import Twin

_AFTER = (0.0, 0.25, 0.5, 0.75)  # shares of the time outside of the engine that come after it, which are tried
# Work of an API server on a request that is tried. With 0, requests that are sent together are in one step.
_REQUEST_NS = (0.0, 2e4, 1e5, 2e5, 3e5, 4e5, 7e5, 1e6, 1.5e6, 2e6, 3e6)


def through_door(twin: Twin, asked: Sequence[Answer]) -> Twin:
    """Return the twin with the API server's times that explain the answers best.

    The time of a lone request outside of the engine is known. Its parts are the work on a request, which delays the
    others; the transfer of tokens, which comes after the engine; and the rest, which comes before.
    """
    door = twin.front_door
    outside = door.client_ns + door.request_ns + door.outputs_ns
    twin = twin.with_front_door(chunk_ns=chunk_ns(asked), client_ns=outside, request_ns=0.0, outputs_ns=0.0)
    for name, times in (("outputs_ns", [share * outside for share in _AFTER]), ("request_ns", _REQUEST_NS)):
        left = twin.front_door.client_ns
        doors = [twin.with_front_door(**{name: ns, "client_ns": left - ns}) for ns in times if ns <= left]
        twin = max(doors, key=lambda one: one.likelihood(asked))
    return twin
