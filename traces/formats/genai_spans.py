"""OpenTelemetry spans of generative AI: OTLP JSON lines, as the collector's file exporter writes them.

https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ and
https://github.com/open-telemetry/semantic-conventions-genai (attributes `gen_ai.*`). A span with token usage is a call
of a model. Its conversation is `gen_ai.conversation.id`, its own or that of a span around it; otherwise, the calls of a
trace are a session. A tool's span (`execute_tool`) lies between two calls, so its time is think time, and tools that
run in parallel count once. The conventions have no hashes of prompts: a turn is assumed to extend the previous one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokentwin.serving.workload import Workload
from tokentwin.traces.distributions import LONGEST
from tokentwin.traces.formats.rows import Row, json_objects
from tokentwin.traces.formats.sessions import Assumed, Call, Turn, recorded_sessions, workload_of_sessions

_INTEGER = re.compile(r"-?\d{1,19}", re.ASCII)
_CALLS = ("chat", "text_completion", "generate_content", "")  # operations; an agent's own span sums up its calls
_CONVERSATION = "gen_ai.conversation.id"
_LIMIT = "gen_ai.request.max_tokens"
# Attributes of token usage, with their names before version 1.27 of the conventions.
_USAGE = {
    "prompt": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
}

_IDS = ("traceId", "spanId", "parentSpanId")
_TIMES = ("startTimeUnixNano", "endTimeUnixNano")

_Key = tuple[str, str]  # trace id and span id


class _Span(NamedTuple):
    trace: str
    parent: _Key
    row: Row

    @property
    def is_call(self) -> bool:
        operation = self.row.fields.get("gen_ai.operation.name", "")
        return operation in _CALLS and all(self.usage(what) for what in _USAGE)

    def usage(self, what: str) -> str:
        """Return the name of the attribute with the tokens of the prompt or the output; empty if there is none."""
        return next((name for name in _USAGE[what] if name in self.row.fields), "")


def read(path: Path, assumed: Assumed) -> Workload:
    """Return the workload of a file. See `SessionTraceReader`."""
    spans = {key: span for row in json_objects(path) for key, span in _spans(row)}
    calls = []
    for span in spans.values():
        around = list(_around(span, spans))
        # A server's span inside a client's span is the same call.
        if span.is_call and not any(outer.is_call for outer in around):
            calls.append((span, next((s for s in (span, *around) if _CONVERSATION in s.row.fields), None)))
    in_trace = Counter(span.trace for span, _ in calls)
    recorded = []
    for span, named in calls:
        session = named.row.text(_CONVERSATION) if named else ""
        if not session and in_trace[span.trace] > 1:
            session = span.trace
        if (call := _call(span, session)) is not None:
            recorded.append(call)
    sessions, cautions = recorded_sessions(recorded)
    if empty := len(calls) - len(recorded):
        cautions.append(f"{empty} calls without prompt or answer are left out")
    return workload_of_sessions(path, sessions, assumed, cautions=cautions)


def _spans(row: Row) -> Iterator[tuple[_Key, _Span]]:
    """Yield the spans of a line with their keys; the fields of a span's row are its ids, times and attributes."""
    number = 0
    for resource in _objects(row, row.fields, "resourceSpans"):
        for scope in _objects(row, resource, "scopeSpans"):
            for span in _objects(row, scope, "spans"):
                number += 1
                fields = {name: span.get(name, "") for name in _IDS} | {n: _plain(span.get(n, "")) for n in _TIMES}
                for attribute in _objects(row, span, "attributes"):
                    fields[str(attribute.get("key"))] = _value(attribute.get("value"))
                inner = Row(row.path, row.line, fields, typed=True)
                trace, id_, parent = map(inner.text, _IDS)
                yield (trace, id_ or f"{row.line}.{number}"), _Span(trace, (trace, parent), inner)


def _value(value: Any) -> Any:
    """Return the value of an attribute, such as `{"intValue": "12"}`; empty if it has none."""
    if not isinstance(value, dict):
        return ""
    return _plain(value["intValue"]) if "intValue" in value else next(iter(value.values()), "")


def _objects(row: Row, holder: Mapping[str, Any], field: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of an array; an absent array is empty."""
    values = holder.get(field, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise row.error(field, values, "must be an array of objects")
    yield from values


def _plain(value: Any) -> Any:
    """Return a whole number for its text, because OTLP JSON writes 64-bit integers as text."""
    return int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else value


def _around(span: _Span, spans: Mapping[_Key, _Span]) -> Iterator[_Span]:
    """Yield the spans around a span, from the inside out."""
    seen = set()
    while (outer := spans.get(span.parent)) is not None and span.parent not in seen:
        seen.add(span.parent)
        yield outer
        span = outer


def _call(span: _Span, session: str) -> Call | None:
    """Return the call; None if it has no prompt or no answer, as after an error."""
    row = span.row
    prompt, output = (row.integer(span.usage(what), 0, most=LONGEST) for what in _USAGE)
    if not prompt or not output:
        return None
    begins_ns, ends_ns = (row.time_ns(name, 1) for name in _TIMES)
    if ends_ns < begins_ns:
        raise row.error("endTimeUnixNano", ends_ns, "must not be before startTimeUnixNano")
    limit = row.integer(_LIMIT, 1, most=LONGEST) if row.fields.get(_LIMIT) else None
    return Call(begins_ns, ends_ns, session, Turn(output, prompt, max_tokens=limit))
