"""What the Live page makes of two scrapes, and of what a server tells of one request."""

import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tokentwin.apiserver.families import of_an_engine
from tokentwin.dashboard.live_page.charts import latencies, latency_rows, over_time, waterfall
from tokentwin.dashboard.live_page.server import Server
from tokentwin.dashboard.live_page.snapshot import Quantile, Snapshot, quantile, tokens_per_second
from tokentwin.planning.exports.vllm_buckets import TTFT_S
from tokentwin.serving.errors import UserError


class Scraped:
    """A server with two replicas, scraped once a second."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = {"labelnames": ["model_name", "engine"], "registry": self.registry}
        self.running = Gauge("vllm:num_requests_running", "", **labels)
        self.tokens = Counter("vllm:generation_tokens", "", **labels)
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "", buckets=(0.1, 0.2, 0.4, math.inf), **labels)
        self.seconds = 0.0

    def step(self, *observed: tuple[str, float, int]) -> Snapshot:
        for replica, ttft_s, tokens in observed:
            self.ttft.labels("m", replica).observe(ttft_s)
            self.tokens.labels("m", replica).inc(tokens)
            self.running.labels("m", replica).set(1)
        self.seconds += 1
        text = generate_latest(self.registry).decode()
        return Snapshot.from_families(self.seconds, text_string_to_metric_families(text))


def test_what_happened_between_two_scrapes_is_of_all_replicas() -> None:
    server = Scraped()
    history = [server.step(("0", 9.0, 5)), server.step(("0", 0.15, 10), ("1", 0.15, 30)), server.step()]
    assert history[-1].replicas == ["0", "1"]
    assert tokens_per_second(history) == ([2.0, 3.0], [40.0, 0.0])
    assert quantile(*history[:2], "time_to_first_token_seconds", 0.5) == Quantile(200, "at most")
    assert quantile(*history[1:], "time_to_first_token_seconds", 0.5) is None
    assert len(over_time(history).data) == 2 * 3 + 1
    ttft, _, itl, _ = latency_rows(history)  # two requests within 0.1 to 0.2 s
    most = "at most 200 ms"
    assert ttft == {"latency": "TTFT", "values": "2", "mean": "150 ms", "p50": most, "p90": most, "p99": most}
    assert itl == {"latency": "ITL", "values": "0", "mean": "", "p50": "", "p90": "", "p99": ""}
    late = [*history, server.step(("0", 9.0, 1))]
    assert latency_rows(late)[0]["p99"] == "over 400 ms"
    drawn = latencies(late, {"ttft_ms": {300.0: "SLO p99"}})  # only TTFT has values
    assert {(trace.y[0], trace.text[0]) for trace in drawn.data} == {(200, f"p{at} {most}") for at in (50, 99)}
    (bound,), (label,) = drawn.layout.shapes, drawn.layout.annotations
    assert (bound.y0, bound.y1, label.text) == (300, 300, "SLO p99")
    assert latencies(history[:1], {}) is None


def test_a_server_that_was_started_again_counts_anew() -> None:
    server = Scraped()
    before = server.step(("0", 0.1, 50))
    after = Scraped().step(("0", 0.1, 3))
    assert tokens_per_second([before, Snapshot(2.0, after.values, after.buckets)]) == ([], [])
    assert quantile(before, Scraped().step(), "time_to_first_token_seconds", 0.5) is None


@given(st.lists(st.floats(0.0011, 9.0), min_size=1, max_size=50), st.sampled_from((0.5, 0.9, 0.99)))
def test_a_quantile_is_near_on_our_server_and_a_bound_on_others(values: list[float], share: float) -> None:
    """Oracle: the quantile of the values themselves."""
    truth = 1e3 * float(np.quantile(values, share, method="inverted_cdf"))
    name = "vllm:time_to_first_token_seconds"
    ours = next(family.bounds for family in of_an_engine(1000, 0) if family.name == name)
    for bounds, fine in ((ours, True), (TTFT_S, False)):
        registry = CollectorRegistry()
        seen = Histogram(name, "", buckets=bounds, registry=registry)

        def scraped(seconds: float, registry: CollectorRegistry = registry) -> Snapshot:
            text = generate_latest(registry).decode()
            return Snapshot.from_families(seconds, text_string_to_metric_families(text))

        before = scraped(0)
        for value in values:
            seen.observe(value)
        said = quantile(before, scraped(1), name.removeprefix("vllm:"), share)
        assert said is not None
        if said.how == "at most":
            assert not fine and said.ms >= truth * (1 - 1e-9)
        else:
            assert not said.how and abs(said.ms / truth - 1) <= (0.16 if fine else 0.2)


def test_a_request_under_way_is_drawn_as_far_as_it_is_known() -> None:
    times = {"received_ns": 0, "arrival_ns": 2_000_000, "scheduled_ns": 5_000_000}
    step = {"step": 7, "start_ns": 5_000_000, "end_ns": 9_000_000, "rows": 3, "tokens": 12, "blocks": 1}
    drawn = {bar.name: (bar.base[0], bar.x[0]) for bar in waterfall({"times": times, "steps": [step]}).data}
    assert drawn == {"tokenise": (0, 2), "queue": (2, 3), "steps": (5, 4)}


@pytest.mark.parametrize("url", ["ftp://here", "http://127.0.0.1:1", "http://[", "http://a b"])
def test_a_server_that_cannot_be_asked_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match=r"^server: "):
        Server(url).model()


class Odd(BaseHTTPRequestHandler):
    """A server that answers like another kind of server, and whose stream breaks off."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>[]{")

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'data: {"choices": []}\n\n')

    def log_message(self, *args: object) -> None:
        pass


def test_a_server_of_another_kind_or_that_breaks_off_is_one_line() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as odd:
        Thread(target=odd.serve_forever).start()
        server = Server(f"http://127.0.0.1:{odd.server_port}")
        for ask in (server.model, server.kind, lambda: server.snapshot(0.0), lambda: server.journey("a")):
            with pytest.raises(UserError, match="does not speak OpenAI's API"):
                ask()
        with pytest.raises(UserError, match="too early"):
            list(server.answer("a", "Hello", 5))
        odd.shutdown()
