"""Predictions of output lengths, for policies that are not clairvoyant.

A prediction is the true length times a log-normal error with median 1. The error depends only on a seed and the
request's id, so the order of arrival does not change it, and it is equal in the engine and the simulator.
"""

from __future__ import annotations

from random import Random


def predicted_tokens(output_len: int, error: float, seed: int, id: int) -> int:
    """Return a prediction of `output_len`: its log error is normal with standard deviation `error`."""
    if not error:
        return output_len
    return max(round(output_len * Random(f"{seed}:{id}").lognormvariate(0.0, error)), 1)
