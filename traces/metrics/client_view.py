"""Tables with the times of a server and of its clients, so that the phases of a request add up to its whole time.

Only durations are used from the client's recording, so the two recordings need no common clock.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.serving.errors import UserError
from tokentwin.traces.recording import Recording, notes_of


def as_clients_saw(requests: pa.Table) -> pa.Table:
    """Return `requests` with times as seen by clients, in rows with times of an API server.

    A request's arrival is then the time when the API server received it, and its first and last token times are the
    times when the server had detokenised these tokens. For the other tokens the times of detokenising are not recorded,
    so `token_times_ns` has the engine's times.
    """
    for name, seen in (("arrival", "received"), ("first_token", "first_text"), ("finish", "last_text")):
        at = requests.schema.get_field_index(f"{name}_ns")
        times = pc.coalesce(requests.column(f"{seen}_ns"), requests.column(at))
        requests = requests.set_column(at, requests.schema.field(at), times)
    return requests


def seen_from_outside(served: pa.Table, sent: pa.Table, steps: pa.Table) -> pa.Table:
    """Return `served`, recorded by vLLM's scheduler, with times of the API server as far as they are known.

    `sent` has the clients' rows of the same requests, and `steps` has the engine's steps. The API server received a
    request at vLLM's `arrival_ns`. The engine looks for new requests between steps. `queued_ns` is therefore the time
    when the engine got the request only if no step was running; otherwise the new `arrival_ns` is null. The time of a
    token as text is the time when the client got it. To relate the two clocks, the fastest first token is assumed to
    take no time to its client.
    """
    received_ns = served.column("arrival_ns")
    ends_ns, plans_ns = (steps.column(name).to_numpy() for name in ("end_ns", "plan_ns"))
    next_end = np.searchsorted(ends_ns, received_ns.to_numpy(), side="right")
    next_plan_ns = np.append(plans_ns, np.iinfo(np.int64).max)[next_end]
    at_once = pa.array(next_plan_ns >= served.column("queued_ns").to_numpy())
    begin_ns = pc.max(pc.subtract(served.column("first_token_ns"), sent.column("first_token_ns"))).as_py()
    first_ns, last_ns = (pc.add(sent.column(name), begin_ns) for name in ("first_token_ns", "finish_ns"))
    known = {
        "received_ns": received_ns,
        "arrival_ns": pc.if_else(at_once, served.column("queued_ns"), None),
        **dict.fromkeys(("first_text_ns", "first_sent_ns"), first_ns),
        **dict.fromkeys(("last_text_ns", "last_sent_ns"), last_ns),
    }
    for name, times in known.items():
        at = served.schema.get_field_index(name)
        served = served.set_column(at, served.schema.field(at), times)
    return served


def matched(server: Recording, client: Recording) -> tuple[pa.Table, pa.Table]:
    """Return the rows of `server` and of `client` for the requests that both recorded, in the order of the server.

    Raises UserError if they have no request in common, or if the server is a simulated engine that did not run at speed
    1.
    """
    speed = (notes_of(server.run).get("served") or {}).get("speed", 1.0)
    if speed != 1.0:
        raise UserError("recording", str(server.path), f"is of a twin at speed {speed:g}; serve with speed 1")
    served, sent = server.requests, client.requests
    rows = pc.index_in(served.column("client_id"), value_set=sent.column("client_id").combine_chunks())
    if rows.null_count == len(rows):
        remedy = f"has no request that {client.path} sent; give the recordings of one run"
        raise UserError("recording", str(server.path), remedy)
    common = pc.is_valid(rows)
    return served.filter(common), sent.take(rows.filter(common))
