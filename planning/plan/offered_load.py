"""The traffic of a plan over time, and what clients who wait for answers send.

Requests that wait for an earlier answer have their times as if answers took no time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokentwin.planning.traffic import clients_of
from tokentwin.serving.answers.document import Part, fact
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.distributions import Users
from tokentwin.traces.synth import SynthSpec

_BUCKETS = 60
_TURNS = 40  # largest number of turns that are shown


class OverTime(Part):
    """The traffic in equal periods from the first arrival to the last."""

    period_s: float = fact("length of each period", "s")
    requests_per_s: tuple[float, ...] = fact("requests that arrive in each period", "requests/s")
    prompt_tokens_per_s: tuple[float, ...] = fact("tokens of their prompts", "tokens/s")
    output_tokens_per_s: tuple[float, ...] = fact("tokens of their outputs", "tokens/s")
    sessions: tuple[int, ...] = fact(
        "sessions between their first and last turn in each period; empty without sessions", default=()
    )
    prompt_tokens_of_turn: tuple[float, ...] = fact(
        "mean length of the prompt of the first turn, the second, and so on; empty without sessions",
        "tokens",
        default=(),
    )


class ClientsLoad(Part):
    """Clients who wait for answers: each thinks before its next request."""

    clients: int = fact("number of clients")
    think_s: float = fact("mean time from an answer to the client's next request", "s")

    def requests_per_s(self, answer_s: float) -> float:
        """Return the requests per second if an answer takes `answer_s` on average.

        It is the law of response times of a closed system (Lazowska et al. 1984, chapter 3): clients over the time of
        a cycle.
        """
        return self.clients / (answer_s + self.think_s)

    def in_flight(self, answer_s: float) -> float:
        """Return the mean number of clients who wait for an answer, by Little's law."""
        return self.requests_per_s(answer_s) * answer_s


def over_time(requests: Sequence[WorkloadRequest]) -> OverTime | None:
    """Return the traffic over time of requests in order of arrival; None if all arrive at one instant."""
    first_ns = requests[0].arrival_ns
    span_ns = requests[-1].arrival_ns - first_ns
    if not span_ns:
        return None
    buckets = min(_BUCKETS, max(len(requests) // 4, 1))
    period_s = span_ns / buckets / 1e9
    # in Python's integers: the products of years in nanoseconds exceed 64 bits
    at = np.array([min((r.arrival_ns - first_ns) * buckets // span_ns, buckets - 1) for r in requests], dtype=np.int64)

    def rate(amounts: Sequence[int] | None) -> tuple[float, ...]:
        sums = np.bincount(at, amounts, minlength=buckets)
        return tuple(float(f"{value:.6g}") for value in sums / period_s)

    sessions, turns = _sessions(requests, at, buckets)
    return OverTime(
        period_s=period_s,
        requests_per_s=rate(None),
        prompt_tokens_per_s=rate([request.prompt_len for request in requests]),
        output_tokens_per_s=rate([request.output_len for request in requests]),
        sessions=sessions,
        prompt_tokens_of_turn=turns,
    )


def _sessions(
    requests: Sequence[WorkloadRequest], at: NDArray[np.int64], buckets: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the sessions that are under way in each period, and the mean prompt of each turn; empty without any."""
    ends: dict[str, tuple[int, int]] = {}
    by_turn: dict[int, list[int]] = {}
    for request, bucket in zip(requests, at.tolist(), strict=True):
        if request.session:
            first, _ = ends.get(request.session, (bucket, bucket))
            ends[request.session] = first, bucket
            by_turn.setdefault(request.turn, []).append(request.prompt_len)
    if len(by_turn) < 2:
        return (), ()
    changes = np.zeros(buckets + 1, dtype=np.int64)
    for first, last in ends.values():
        changes[first] += 1
        changes[last + 1] -= 1
    means = (float(f"{np.mean(by_turn[turn]):.6g}") for turn in sorted(by_turn)[:_TURNS])
    return tuple(np.cumsum(changes[:-1]).tolist()), tuple(means)


def clients_load(loop: SynthSpec) -> ClientsLoad:
    """Return what the clients of a specification send; think times are the means before any clipping."""
    clients = clients_of(loop)
    think_s = loop.arrivals.think_ms.expected / 1e3 if isinstance(loop.arrivals, Users) else 0.0
    if loop.sessions is not None:
        turns = loop.sessions.turns.expected
        think_s = (think_s + (turns - 1) * loop.sessions.think_ms.expected / 1e3) / turns
    return ClientsLoad(clients=clients, think_s=think_s)
