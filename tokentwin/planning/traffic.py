"""The traffic that a fleet is sized for: the busiest stretch of a trace, arriving as in the trace or faster.

A fleet that holds its objectives over the busiest hour holds them over the day; over the day alone, a bad hour could
hide behind quiet ones. The stretch with the most tokens, prompt and output, is the busiest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from serving.errors import UserError
from serving.workload import Workload

if TYPE_CHECKING:
    from traces.synth import SynthSpec

BUSIEST_S = 3600.0  # the stretch of a trace that is planned for, unless another is asked for


def specified_traffic(spec: SynthSpec, limit: int | None = None) -> Workload:
    """The requests of a specification, or the first `limit` of them, at the very rate that it names.

    What is drawn has a mean gap of its own: a thousand bursty ones may come out twice as fast as asked. Of sessions
    and of a ramp no single rate is named; their requests are as drawn.
    """
    from traces.reshape import at_rate, reshaped
    from traces.synth import synthesise

    made = reshaped(synthesise(spec), limit=limit)
    rate = getattr(spec.arrivals, "rate", None) if spec.sessions is None else None
    return at_rate(made, rate) if rate else made


def planned_traffic(workload: Workload, window_s: float, rate_scale: float | None) -> Workload:
    """The busiest `window_s` seconds of `workload`, its requests in a list, arriving `rate_scale` times as fast.

    Raises UserError for a workload that has no rate, or no requests.
    """
    from traces.reshape import reshaped

    if workload.concurrency is not None:
        raise UserError("trace", workload.name, "is a closed loop, which waits for any fleet; give one with arrivals")
    requests = list(workload.requests)
    if len(requests) < 2:
        raise UserError("trace", workload.name, f"holds {len(requests)} requests, too few to plan for")
    first, end = _busiest([r.arrival_ns for r in requests], [r.prompt_len + r.output_len for r in requests], window_s)
    if end - first < 2:
        raise UserError("window-s", window_s, "holds one request; take a longer stretch")
    if requests[first].arrival_ns == requests[end - 1].arrival_ns:
        remedy = "holds requests of one instant, which have no rate; give a trace with arrivals over some time"
        raise UserError("trace", workload.name, remedy)
    return reshaped(replace(workload, requests=requests[first:end]), rate_scale=rate_scale)


def _busiest(arrivals_ns: list[int], tokens: list[int], window_s: float) -> tuple[int, int]:
    """The first and the end index of the window, beginning with an arrival, that has the most tokens."""
    length_ns = round(window_s * 1e9)
    best, found, held, end = -1, (0, 0), 0, 0
    for begin, arrival in enumerate(arrivals_ns):
        while end < len(arrivals_ns) and arrivals_ns[end] < arrival + length_ns:
            held += tokens[end]
            end += 1
        if held > best:
            best, found = held, (begin, end)
        held -= tokens[begin]
    return found
