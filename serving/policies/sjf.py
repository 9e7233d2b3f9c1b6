"""The `sjf` policy: shortest job first, by known or predicted output length.

On one server this order has the smallest mean waiting time of all orders (Smith 1956), but long jobs starve while short
jobs keep coming. A prediction is the true length times a log-normal error with median 1. The error depends only on a
seed and the request's id, so the order of arrival does not change it, and it is equal in the engine and the simulator.
"""

from __future__ import annotations

from random import Random

from tokentwin.serving.policies.ranked import RankedScheduler
from tokentwin.serving.request import Request


class SjfScheduler(RankedScheduler):
    """A scheduler with the smallest predicted output first; with `sjf_error` 0 predictions are exact."""

    def score(self, request: Request) -> int:
        return predicted_tokens(request.arrived.output_len, self.config.sjf_error, self.config.sjf_seed, request.id)


def predicted_tokens(output_len: int, error: float, seed: int, id: int) -> int:
    """Return a prediction of `output_len`: its log error is normal with standard deviation `error`."""
    if not error:
        return output_len
    return max(round(output_len * Random(f"{seed}:{id}").lognormvariate(0.0, error)), 1)
