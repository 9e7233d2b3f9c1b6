"""The metrics of a running server, by the names, types and buckets of vLLM 0.33."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from apiserver.messages import Add


class LiveMetrics:
    """Counts what is served as `model`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        labels: dict[str, Any] = {"labelnames": ["model_name", "engine"], "registry": self.registry}
        self._running = Gauge("vllm:num_requests_running", "Requests in the batch.", **labels).labels(model, "0")
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests that wait.", **labels).labels(model, "0")
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens.", **labels).labels(model, "0")
        self._generated = Counter("vllm:generation_tokens", "Tokens generated.", **labels).labels(model, "0")

    def step(self, row: Mapping[str, Any]) -> None:
        """A row of `steps`."""
        self._running.set(row["running"])
        self._waiting.set(row["waiting"])
        self._generated.inc(row["sampled_rows"])

    def request(self, row: Mapping[str, Any], asked: Add) -> None:
        """A row of `requests`, which has ended."""
        self._prompt.inc(row["prompt_tokens"])

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
