"""Checks that traffic, model and objectives go together for pooling requests, which get no tokens.

The answer to a pooling request is an embedding or a score of its prompt. Its E2E is the only latency that clients see;
TTFT, TPOT and the times derived from them are undefined. A model without an LM head answers pooling requests only.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokentwin.serving.deployments.model_catalogue import pooling_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload

_WITHOUT_TOKENS = ("e2e_ms", "queue_ms")  # latencies of requests without tokens that can have a bound


def refuse_pooling(workload: Workload, sender: str) -> None:
    """Raise UserError if the workload has a pooling request; `sender` is what can send only others."""
    if any(request.pools for request in workload.requests):
        remedy = f"has requests with 0 output tokens (pooling), which {sender} cannot send; leave them out"
        raise UserError("trace", workload.name, remedy)


def check_pooling(workload: Workload, models: Iterable[str], bounds: Iterable[str] = ()) -> None:
    """Raise UserError if a model has no LM head for the tokens, or if no request has a latency with a bound.

    `bounds` are the metrics with a bound. Models that are not known are not checked.
    """
    for name in dict.fromkeys(models):
        if pooling_model(name) is not None and any(not request.pools for request in workload.requests):
            remedy = f"wants output tokens, and {name} has no LM head; set its outputs to 0 (--output 0)"
            raise UserError("trace", workload.name, remedy)
    undefined = [metric for metric in bounds if metric not in _WITHOUT_TOKENS]
    if undefined and all(request.pools for request in workload.requests):
        raise UserError("slo", undefined[0], "is undefined for pooling requests, which get no tokens; bound e2e_ms")
