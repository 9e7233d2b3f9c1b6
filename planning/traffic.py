"""The traffic of a request: a trace or a synthesised workload, unchanged, shortened, or at another rate.

A fleet is sized for the busiest period of the traffic. A fleet that meets its objectives over the busiest hour also
meets them over the day, while quiet hours can hide a bad hour if only the day is checked. The busiest period is the one
with the most prompt and output tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from tokentwin.planning.request import Request
from tokentwin.serving.answers.figures import counted
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces import synth
from tokentwin.traces.distributions import Closed, Users
from tokentwin.traces.reshape import at_rate, only, reshaped
from tokentwin.traces.synth import SynthSpec, read_spec

BUSIEST_S = 3600.0  # default length of the period that is planned for, in seconds
WHOLE_S = 1e9  # a period longer than any traffic, in seconds


class Offered(Request):
    """The offered traffic. The requests of several specifications are merged by arrival, and share no prompts."""

    traffic: str | SynthSpec | tuple[SynthSpec, ...] = Field(
        description="a trace file, a recording, or a YAML specification for `tokentwin trace synth`"
    )
    limit: int | None = Field(None, ge=1, description="use only the first N requests")
    rate_scale: float | None = Field(None, gt=0, description="multiply the arrival rate by this factor")
    window_s: float | None = Field(
        None, gt=0, le=WHOLE_S, description="use only the busiest period of N seconds, the one with the most tokens"
    )

    @field_validator("traffic", mode="before")
    @classmethod
    def _specified(cls, traffic: Any) -> Any:
        """Read a YAML specification when the request is made, so that it is read only once."""
        if isinstance(traffic, str | Path):
            return read_spec(traffic) if is_specification(traffic) else str(traffic)
        return parse(SynthSpec, traffic, "traffic") if isinstance(traffic, dict) else traffic

    @property
    def recorded(self) -> bool:
        """True for a trace, which cannot be generated again with another seed."""
        return isinstance(self.traffic, str)

    @property
    def expected_requests(self) -> float | None:
        """Expected number of requests of a specification (of a ramp, the maximum); None for a trace, not read here."""
        if isinstance(self.traffic, str):
            return None
        expected = sum(spec.expected_requests for spec in self._specs)
        return expected if self.limit is None else min(expected, self.limit)

    @property
    def loop(self) -> SynthSpec | None:
        """The specification of clients who wait for answers, so that the rate depends on the fleet; None for others."""
        spec = self.traffic if isinstance(self.traffic, SynthSpec) else None
        return spec if spec is not None and isinstance(spec.arrivals, Users | Closed) else None

    @property
    def _specs(self) -> tuple[SynthSpec, ...]:
        assert not isinstance(self.traffic, str)
        return self.traffic if isinstance(self.traffic, tuple) else (self.traffic,)

    def workload(self, draw: int = 0, at_named_rate: bool = False) -> Workload:
        """Return the workload, with its requests in a list; `draw` is added to the seed of a specification.

        If `at_named_rate` is set, requests are scaled to exactly the rate that a specification states. Raises UserError
        for a trace that cannot be read, and if the period of `window_s` has too few requests to plan for.
        """
        if at_named_rate and (loop := self.loop) is not None:
            if self.rate_scale is not None:
                raise UserError(
                    "rate-scale", self.rate_scale, "needs a rate, but these clients wait; change their number"
                )
            return looped(loop, draw=draw, limit=self.limit)
        if isinstance(self.traffic, str):
            from tokentwin.traces.formats.trace_file import read_workload

            made = read_workload(self.traffic)
        elif isinstance(self.traffic, tuple):
            made = mixed([_reseeded(spec, draw) for spec in self.traffic])
        else:
            made = synth.synthesise(_reseeded(self.traffic, draw))
        made = reshaped(made, limit=self.limit)
        if at_named_rate and isinstance(self.traffic, SynthSpec):
            made = _at_named_rate(made, self.traffic)
        if self.window_s is not None:
            return planned_traffic(made, self.window_s, self.rate_scale)
        scaled = reshaped(made, rate_scale=self.rate_scale)
        return replace(scaled, requests=list(scaled.requests))


_WARM_UP = 3  # rounds of a closed loop that are not counted, because all its clients begin at once


def clients_of(loop: SynthSpec) -> int:
    """Return the number of clients who wait for answers."""
    assert isinstance(loop.arrivals, Users | Closed)
    return loop.arrivals.users if isinstance(loop.arrivals, Users) else loop.arrivals.concurrency


def with_clients(loop: SynthSpec, clients: int) -> SynthSpec:
    """Return the specification with another number of clients, each of whom sends as many requests as before."""
    if isinstance(loop.arrivals, Users):
        return loop.model_copy(update={"arrivals": loop.arrivals.model_copy(update={"users": clients})})
    arrivals = loop.arrivals.model_copy(update={"concurrency": clients})
    sizes = {
        name: max(round(number * clients / clients_of(loop)), 1)
        for name in ("requests", "warm_up_requests")
        if (number := getattr(loop, name)) is not None
    }
    return loop.model_copy(update={"arrivals": arrivals, **sizes})


def looped(loop: SynthSpec, draw: int = 0, limit: int | None = None) -> Workload:
    """Return the workload of clients who wait for answers, with its requests in a list.

    The start of a closed loop, with all prompts at once, is its warm-up unless the specification states another.
    Raises UserError if fewer than two requests would count.
    """
    made = synth.synthesise(_reseeded(loop, draw))
    every = list(made.requests)
    requests = every[:limit]
    made = replace(made, requests=requests)
    if isinstance(loop.arrivals, Closed) and loop.warm_up_requests is None and loop.warm_up_s is None:
        made = replace(made, warm_up_requests=min(_WARM_UP * loop.arrivals.concurrency, len(requests) // 2))
    cold = sum(r.arrival_ns < made.warm_up_ns for r in every) if made.until_ns else made.warm_up_requests
    if len(every) < cold + 2:
        raise UserError("trace", loop.name, "has no requests after its warm-up; make it longer")
    if len(requests) < cold + 2:
        remedy = f"ends in the warm-up, which has {counted(cold, 'request')}; give at least {cold + 2:,}"
        raise UserError("limit", limit, remedy)
    return made


def is_specification(path: str | Path) -> bool:
    """Return True if the name is that of a YAML file, which is a specification and not a trace."""
    return Path(path).suffix in (".yaml", ".yml")


def waits_for_answers(workload: Workload) -> bool:
    return workload.concurrency is not None or any(request.think_ns is not None for request in workload.requests)


def mean_rate(workload: Workload) -> float:
    """Return the mean requests per second from the first arrival to the last; infinite if all arrive at once."""
    arrivals = [request.arrival_ns for request in workload.requests]
    span_ns = arrivals[-1] - arrivals[0]
    return (len(arrivals) - 1) / span_ns * 1e9 if span_ns else math.inf


def mixed(specs: Sequence[SynthSpec]) -> Workload:
    """Return the requests of all `specs` in order of arrival; no prompt is shared between two specs."""
    if any(isinstance(spec.arrivals, Users | Closed) for spec in specs):
        raise UserError("traffic", specs[0].name, "mixes clients who wait for answers; give one specification only")
    workloads = [synth.synthesise(spec) for spec in specs]
    streams = [_renamed(workload, number) for number, workload in enumerate(workloads)]
    ordered = heapq.merge(*streams, key=lambda request: request.arrival_ns)
    requests = [replace(request, id=number) for number, request in enumerate(ordered)]
    return Workload(requests, specs[0].name, shares_prefixes=any(w.shares_prefixes for w in workloads))


def _renamed(workload: Workload, part: int) -> Iterator[WorkloadRequest]:
    """Yield the requests of a workload, with segment names that no other part uses."""
    for request in workload.requests:
        prompt = tuple((name if name == PRIVATE else f"{part}.{name}", tokens) for name, tokens in request.prompt)
        items = tuple(item._replace(content=item.content and f"{part}.{item.content}") for item in request.items)
        yield replace(request, prompt=prompt, items=items)


def _reseeded(spec: SynthSpec, draw: int) -> SynthSpec:
    return spec.model_copy(update={"seed": spec.seed + draw}) if draw else spec


def _at_named_rate(made: Workload, spec: SynthSpec) -> Workload:
    """Return the requests of a specification at exactly the rate that it states.

    The random arrivals of a workload have a different mean rate: a thousand bursty requests may arrive twice as fast as
    specified. Sessions and ramps state no single rate, so their requests stay as drawn.
    """
    rate = getattr(spec.arrivals, "rate", None) if spec.sessions is None else None
    return at_rate(made, rate) if rate else made


def planned_traffic(workload: Workload, window_s: float, rate_scale: float | None) -> Workload:
    """Return the busiest `window_s` seconds of `workload`, with requests that arrive `rate_scale` times as fast.

    Raises UserError for a workload that has no rate, or no requests.
    """
    if workload.concurrency is not None:
        remedy = "is a recorded closed loop; give a specification, or --prompt and --output with --concurrency"
        raise UserError("trace", workload.name, remedy)
    requests = list(workload.requests)
    if len(requests) < 2:
        raise UserError("trace", workload.name, f"has {len(requests)} requests; planning needs at least 2")
    first, end = _busiest([r.arrival_ns for r in requests], [r.prompt_len + r.output_len for r in requests], window_s)
    if end - first < 2:
        raise UserError("window-s", window_s, "covers a single request; give a longer period")
    if requests[first].arrival_ns == requests[end - 1].arrival_ns:
        remedy = "has all arrivals at one instant, and therefore no rate; give a trace with arrivals over some time"
        raise UserError("trace", workload.name, remedy)
    planned = reshaped(only(workload, requests[first:end]), rate_scale=rate_scale)
    planned = replace(planned, requests=list(planned.requests))
    if math.isinf(mean_rate(planned)):
        raise UserError("rate-scale", rate_scale, "is so high that all requests arrive at one instant; lower it")
    return planned


def _busiest(arrivals_ns: list[int], tokens: list[int], window_s: float) -> tuple[int, int]:
    """Return the first and the end index of the window with the most tokens; a window begins with an arrival."""
    begins = np.array(arrivals_ns)
    ends = np.searchsorted(begins, begins + round(window_s * 1e9))
    before = np.cumsum([0, *tokens])
    begin = int(np.argmax(before[ends] - before[:-1]))
    return begin, int(ends[begin])
