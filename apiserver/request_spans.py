"""OpenTelemetry spans of requests and their phases in the server, sent by OTLP over HTTP.

Spans are made from a request's row after its end, so they cost nothing while tokens are generated. A thread of its own
sends them. Attributes follow the GenAI semantic conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from time import monotonic_ns, time_ns
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokentwin.apiserver.backend import Backend
from tokentwin.apiserver.messages import Add, finish_reason
from tokentwin.serving.version import __version__

# The phases of a request, each with the column of the time at which it ends; there are no gaps between phases.
PHASES = {
    "tokenise": "arrival_ns",
    "queue": "scheduled_ns",
    "prefill": "first_token_ns",
    "decode": "finish_ns",
    "detokenise": "last_text_ns",
    "stream": "last_sent_ns",
}
_SEND_S = 2.0  # time that the collector has to take spans; then they are lost
_FAILED = ("rejected", "timed_out", "aborted", "unfinished")


class RequestSpans:
    """A sender of the spans of requests to the collector at the URL `endpoint`; `clock` converts their times.

    `model` is the name of the served model. `/v1/traces` is added to the URL if it has no path.
    """

    def __init__(self, endpoint: str, model: str, clock: Backend) -> None:
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({"service.name": "tokentwin", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_SEND_S)))
        self._tracer = self._provider.get_tracer("tokentwin", __version__)
        self._parents = TraceContextTextMapPropagator()
        self._model = model
        self._clock = clock

    def request(self, row: Mapping[str, Any], asked: Add) -> None:
        """Send the spans of a request that has ended: one for the request, and in it one for each phase that took time.

        The request's span is a child of the client's span if the client sent one.
        """
        parent = self._parents.extract({"traceparent": asked.traceparent, "tracestate": asked.tracestate})
        epoch_ns = time_ns() - monotonic_ns()
        moments = [epoch_ns + self._clock.monotonic_ns(time) for time in _moments(row)]
        span = self._tracer.start_span(
            f"{asked.operation} {self._model}",
            parent,
            SpanKind.SERVER,
            self._attributes(row, asked),
            start_time=moments[0],
        )
        within = set_span_in_context(span)
        for name, (start_ns, end_ns) in zip(PHASES, pairwise(moments), strict=False):
            if end_ns > start_ns:
                self._tracer.start_span(name, within, start_time=start_ns).end(end_ns)
        _tell_failure(span, row)
        span.end(moments[-1])

    def _attributes(self, row: Mapping[str, Any], asked: Add) -> dict[str, Any]:
        attributes = {
            "gen_ai.operation.name": asked.operation,
            "gen_ai.provider.name": "tokentwin",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.temperature": asked.temperature,
            "gen_ai.request.top_p": asked.top_p,
            "gen_ai.request.top_k": asked.top_k or None,
            "gen_ai.request.seed": asked.seed,
            "gen_ai.response.id": asked.answer_id,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [reason] if (reason := finish_reason(row, asked)) else None,
            "gen_ai.usage.input_tokens": row["prompt_tokens"],
            "gen_ai.usage.output_tokens": row["output_tokens"],
            "gen_ai.usage.cache_read.input_tokens": row.get("prefix_hit_tokens"),
            "tokentwin.request_id": row["request_id"],
            "tokentwin.replica": row["replica"],
            "tokentwin.preemptions": row.get("preemptions"),
        }
        if row.get("first_sent_ns") is not None:
            first_ns = self._clock.monotonic_ns(row["first_sent_ns"]) - self._clock.monotonic_ns(row["received_ns"])
            attributes["gen_ai.response.time_to_first_chunk"] = first_ns / 1e9
        return {name: value for name, value in attributes.items() if value is not None}

    def close(self) -> None:
        """Send the spans that were not sent yet."""
        self._provider.shutdown()


def _moments(row: Mapping[str, Any]) -> list[int]:
    """Return the time at which the request arrived, and the end of each phase up to the one in which it ended.

    If the API process finds a stop string, the engine goes on until it learns of it, so the engine's phases can end
    late. Their ends are moved back, so that no phase ends later than the phase after it.
    """
    moments = [row["received_ns"]]
    for column in PHASES.values():
        if (moment := row.get(column)) is None:
            moments.append(moments[-1] if row.get("end_ns") is None else row["end_ns"])
            break
        moments.append(moment)
    for at in reversed(range(len(moments) - 1)):
        moments[at] = min(moments[at], moments[at + 1])
    return moments


def _tell_failure(span: Span, row: Mapping[str, Any]) -> None:
    if row["status"] in _FAILED:
        span.set_attribute("error.type", row["status"])
        span.set_status(Status(StatusCode.ERROR, row["reason"]))
