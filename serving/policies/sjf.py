"""The `sjf` policy: shortest job first, by output length, known or predicted.

It has the least mean wait of all orders (Smith 1956, on one server) and starves long jobs while short ones keep coming.
A prediction is the true length times a log-normal error with median 1, drawn from a seed and the request's id: so it
does not depend on the order of arrival, and is the same on both clocks.
"""

from __future__ import annotations

from random import Random

from serving.policies.ranked import RankedScheduler
from serving.request import Request


class SjfScheduler(RankedScheduler):
    """A scheduler with the fewest output tokens first; `sjf_error` 0 knows them exactly."""

    def score(self, request: Request) -> int:
        return predicted_tokens(request.arrived.output_len, self.config.sjf_error, self.config.sjf_seed, request.id)


def predicted_tokens(output_len: int, error: float, seed: int, id: int) -> int:
    """Return `output_len` as a predictor sees it whose log error is normal with standard deviation `error`."""
    if not error:
        return output_len
    return max(round(output_len * Random(f"{seed}:{id}").lognormvariate(0.0, error)), 1)
