"""A fleet's throughput in steady operation, from a simulation that begins and ends with an empty fleet.

A fleet that keeps up serves the offered traffic: its throughput is that of the arrivals, however long the last answers
take after them. Requests that pile up before their first step are not served. If they are many, the throughput is
measured while requests arrive, over the second half of that time. More traffic of the same kind gives the same figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from traces.metrics.saturation import FEWEST, PILING_UP, growth

Floats = NDArray[np.float64]
_COLUMNS = ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Steady:
    """Tokens per second in steady operation, and whether the fleet keeps up: under a tenth of what arrives piles up.

    Attributes:
        piling_up_per_s: growth of the number of requests that wait for their first step, per second; 0 unless the 95 %
            interval of the growth lies above zero
    """

    output_throughput: float
    input_throughput: float
    keeps_up: bool = True
    piling_up_per_s: float = 0.0


def steady(requests: pa.Table) -> Steady:
    """Return the figures of a run's table of requests, unfinished ones included.

    If there are too few requests to tell, the fleet counts as keeping up.
    """
    finished = np.asarray(pc.fill_null(pc.equal(requests.column("status"), "finished"), False))
    arrival, scheduled, first_token, finish, prompt, output = (_column(requests, name) for name in _COLUMNS)
    begin, end = float(arrival.min()), float(arrival.max())
    if end <= begin:  # all at once: the only rate is the rate at which they are done
        spent_s = (float(finish[finished].max(initial=begin)) - begin) / 1e9
        out_s, in_s = (_over(float(tokens[finished].sum()), spent_s) for tokens in (output, prompt))
        return Steady(out_s, in_s)
    rate = (len(arrival) - 1) / ((end - begin) / 1e9)
    piling_up = _queue_growth(arrival, scheduled)
    out_s, in_s = ((rate - piling_up) * float(tokens[finished].sum()) / len(arrival) for tokens in (output, prompt))
    if piling_up < PILING_UP * rate:
        return Steady(out_s, in_s, keeps_up=True, piling_up_per_s=piling_up)
    half = (begin + end) / 2, end
    out_s = min(out_s, _tokens_within(half, first_token[finished], finish[finished], output[finished]))
    in_s = min(in_s, _tokens_within(half, scheduled[finished], first_token[finished], prompt[finished]))
    return Steady(out_s, in_s, keeps_up=False, piling_up_per_s=piling_up)


def _queue_growth(arrival: Floats, scheduled: Floats) -> float:
    """Return the growth per second of the number of requests waiting for their first step, if it is certain.

    Requests that never had a first step were turned away, and wait for nothing.
    """
    admitted = np.isfinite(scheduled)
    if admitted.sum() < FEWEST:
        return 0.0
    trend = growth(np.sort(arrival[admitted]), np.sort(scheduled[admitted]))
    return trend.slope if trend.rises else 0.0


def _tokens_within(window: tuple[float, float], begin: Floats, end: Floats, tokens: Floats) -> float:
    """Return tokens per second of the window; a request's tokens are spread evenly from its `begin` to its `end`."""
    first, last = window
    inside = np.clip(np.minimum(end, last) - np.maximum(begin, first), 0.0, None)
    lasting = end > begin
    share = np.where(lasting, inside / np.where(lasting, end - begin, 1.0), (begin >= first) & (begin < last))
    return float((share * tokens).sum()) / ((last - first) / 1e9)


def _column(table: pa.Table, name: str) -> Floats:
    values: Floats = pc.cast(table.column(name), pa.float64(), safe=False).to_numpy()
    return values


def _over(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
