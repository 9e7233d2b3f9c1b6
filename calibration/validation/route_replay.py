"""Rung 1 of several engines: a check that the router chooses again as it chose.

The router gets what it knew then, in the order in which it learnt it: the requests, the tokens and the ends that it had
heard of when each request came.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from serving.deployments.config import Deployment
from serving.errors import UserError
from sim.replica_set import ReplicaSet
from sim.routed_replica import RoutedReplica
from sim.router import find_router
from traces.recording import Recording

_GOT, _LEFT, _SENT = range(3)  # order of messages with the same time
_Event = tuple[int, int, int, dict[str, Any]]  # time, kind, request id, and the request's row


@dataclass(frozen=True)
class RouteReplay:
    """Counts of requests and of those that went where they had gone; `first_difference` names the first other."""

    routes: int
    identical: int
    first_difference: str | None


def replay_routes(recording: Recording, deployment: Deployment) -> RouteReplay:
    """Choose again for every request; raise UserError if a recording does not say what its router knew."""
    fleet, run = deployment.fleet, recording.run
    events = _events(recording)
    if fleet is None or not events:
        remedy = "does not hold what its router knew; record it with bench --replicas"
        raise UserError("recording", run["run_id"], remedy)
    router = find_router(fleet.router.name, **fleet.router.settings)
    kv_tokens = run["num_blocks"] * run["block_size"]
    replicas, ready = [RoutedReplica(number, kv_tokens) for number in range(run["replicas"])], ReplicaSet()
    for replica in replicas:
        ready.join(replica.as_replica)
    requests = {request.id: request for request in recording.workload().requests}
    routes = identical = 0
    difference = None
    for _, what, id, row in sorted(events, key=lambda event: event[:3]):
        replica = replicas[row["replica"]]
        if what == _GOT:
            replica.got(id, 1)
        elif what == _LEFT:
            replica.loses(id)
        else:
            request = replace(requests[id], arrival_ns=row["arrival_ns"])
            chosen = cast(RoutedReplica, router.choose(request, ready))
            replica.takes(
                id, request.prompt_len, request.output_limit
            )  # whatever was chosen now, that is where it went
            routes += 1
            identical += chosen is replica
            if chosen is not replica and difference is None:
                difference = f"request {id}: simulated to replica {chosen.index}, real to replica {replica.index}"
    return RouteReplay(routes, identical, difference)


def _events(recording: Recording) -> list[_Event]:
    """Return everything the router learnt; nothing, if that was not recorded."""
    steps = recording.table("steps", ["replica", "end_ns", "heard_ns"]).to_pylist()
    heard_ns = {(row["replica"], row["end_ns"]): row["heard_ns"] for row in steps}
    columns = ["request_id", "replica", "arrival_ns", "send_ns", "heard_ns", "token_times_ns"]
    events: list[_Event] = []
    for row in recording.table("requests", columns).to_pylist():
        id = row["request_id"]
        events.append((row["send_ns"], _SENT, id, row))
        tokens_ns = [heard_ns.get((row["replica"], end_ns)) for end_ns in row["token_times_ns"] or ()]
        if None in (*tokens_ns, row["send_ns"]):
            return []
        events += ((time_ns, _GOT, id, row) for time_ns in tokens_ns if time_ns is not None)
        if row["heard_ns"] is not None:
            events.append((row["heard_ns"], _LEFT, id, row))
    return events
