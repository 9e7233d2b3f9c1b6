"""The `sjf` policy: shortest job first, by true or predicted output length.

On one server this order has the smallest mean waiting time of all orders (Smith 1956), but long jobs starve while short
jobs keep coming. With `sjf_error` 0 the policy is clairvoyant: no server knows true lengths. Otherwise it reads the
predictions of `tokentwin.serving.predictions`.
"""

from __future__ import annotations

from tokentwin.serving.policies.ranked import RankedScheduler
from tokentwin.serving.predictions import predicted_tokens
from tokentwin.serving.request import Request


class SjfScheduler(RankedScheduler):
    """A scheduler with the smallest predicted output first; with `sjf_error` 0 it is clairvoyant.

    As a class of one's own, which sees what a server sees, it then ranks by `max_tokens`.
    """

    def score(self, request: Request) -> int:
        if (predicted := request.arrived.predicted_len) is not None:
            return predicted
        return predicted_tokens(request.truth.output_len, self.config.sjf_error, self.config.sjf_seed, request.id)
