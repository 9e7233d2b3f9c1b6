"""An OpenTelemetry collector on loopback that keeps the spans it receives."""

from collections.abc import Iterator
from contextlib import contextmanager
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """A collector: `spans` in order of arrival, the URL `paths` they were sent to, and their `resource`."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        self.resource: dict[str, Any] = {}
        self._came = Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        """Take the body of one request."""
        self.paths.add(path)
        for spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes(spans.resource)
            self.spans += [span for scope in spans.scope_spans for span in scope.spans]
        self._came.set()

    def wait(self, roots: int) -> list[Any]:
        """Return the spans, once those of `roots` requests have arrived."""
        while sum(span.kind == span.SPAN_KIND_SERVER for span in self.spans) < roots:
            assert self._came.wait(30), self.spans
            self._came.clear()
        return self.spans


def attributes(described: Any) -> dict[str, Any]:
    """Attributes of a span or a resource as plain values."""
    return {pair.key: _plain(pair.value) for pair in described.attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector in a thread until the context is left."""
    made = Collector()
    thread = Thread(target=made._server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made._server.shutdown()
        made._server.server_close()
        thread.join()


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(self.path, decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    return Handler
