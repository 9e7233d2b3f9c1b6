"""The proof of a twin: traffic that taught it nothing is predicted, sent, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tokentwin.calibration.steps.interval import Factors
from tokentwin.planning.learn.answers import Answer, simulated
from tokentwin.planning.learn.questions import Bounds, Question, closed_loop
from tokentwin.planning.learn.twin import Twin
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest

_BUSY = 0.6  # share of the capacity at which made-up traffic arrives
_REQUESTS = 120
_FEWEST = 40  # requests to a slow server
_HELD_BACK = 32  # clients
_LONGEST_S = 90.0  # time of made-up traffic, unless the server is so slow that the fewest requests take longer
_STATISTICS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p99": lambda values: float(np.percentile(values, 99)),
}

Figures = dict[tuple[str, str], float]
"""Milliseconds by metric and statistic."""


def figures(sent_ns: dict[int, int], tokens_ns: dict[int, np.ndarray], ids: Sequence[int]) -> Figures:
    """Return the latencies of the requests `ids`."""
    first = np.array([tokens_ns[id][0] - sent_ns[id] for id in ids]) / 1e6
    last = np.array([tokens_ns[id][-1] - sent_ns[id] for id in ids]) / 1e6
    more = np.array([len(tokens_ns[id]) - 1 for id in ids])
    metrics = {"ttft_ms": first, "tpot_ms": ((last - first) / np.maximum(more, 1))[more > 0], "e2e_ms": last}
    return {
        (metric, name): statistic(values)
        for metric, values in metrics.items()
        if len(values)
        for name, statistic in _STATISTICS.items()
    }


def predicted(twin: Twin, answer: Answer, factor: float = 1.0) -> Figures:
    """Return the twin's latencies for the answered requests, with step times multiplied by `factor`."""
    slowed = twin if factor == 1.0 else replace(twin, times=twin.times.scaled(factor))
    (said,) = slowed.answers([answer])
    return figures(said.sent_ns, said.tokens_ns, [id for id in answer.tokens_ns if id in said.tokens_ns])


def proof_rows(
    twin: Twin, answer: Answer, interval: Factors, late_ms: float
) -> list[tuple[str, str, float, float, float, float]]:
    """Return metric, statistic, and the measured, the predicted, the least and the greatest likely milliseconds.

    The likely milliseconds follow from step times at both ends of `interval`, and from an API server that takes up to
    `late_ms` more or less for the first token.
    """
    seen = figures(answer.sent_ns, answer.tokens_ns, list(answer.tokens_ns))
    said, fast, slow = predicted(twin, answer), *(predicted(twin, answer, factor) for factor in interval)
    rows = []
    for name, measured in seen.items():
        late = 0.0 if name[0] == "tpot_ms" else late_ms
        ends = said[name], fast[name], slow[name]
        below, above = np.hypot(said[name] - min(ends), late), np.hypot(max(ends) - said[name], late)
        rows.append((*name, measured, said[name], max(float(said[name] - below), 0.0), float(said[name] + above)))
    return rows


def spread_pct(one: Answer, again: Answer) -> dict[tuple[str, str], float]:
    """Return the difference between two answers to the same traffic, in percent of their mean."""
    first, second = (figures(answer.sent_ns, answer.tokens_ns, list(answer.tokens_ns)) for answer in (one, again))
    return {name: 200 * abs(first[name] - second[name]) / (first[name] + second[name]) for name in first}


def made_up_traffic(twin: Twin, bounds: Bounds) -> list[Question]:
    """Return two kinds of traffic with random lengths at a share of the twin's capacity: chats, and long prompts."""
    return [
        _traffic("chats", 400, 150, twin, bounds, seed=1),
        _traffic("long-prompts", 2000, 60, twin, bounds, seed=2),
    ]


def held_back(bounds: Bounds) -> Question:
    """Return a question that taught nothing: a closed loop with another number of clients than those that teach."""
    loop = closed_loop(min(_HELD_BACK, bounds.concurrency), bounds)
    return replace(loop, name=f"proof-{loop.name}")


def _traffic(name: str, prompt: int, output: int, twin: Twin, bounds: Bounds, seed: int) -> Question:
    """Return traffic with these mean lengths, or shorter ones if it would take a slow server too long."""
    second = _capacity_s(_requests(prompt, output, bounds, seed), twin, bounds) / _BUSY
    count = int(np.clip(_LONGEST_S / second, _FEWEST, _REQUESTS))
    if (shorter := _LONGEST_S / second / count) < 1:
        prompt, output, second = round(shorter * prompt), round(shorter * output), shorter * second
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1e9 * second, count)).astype(int).tolist()
    full = _requests(prompt, output, bounds, seed)
    requests = [replace(one, arrival_ns=at) for one, at in zip(full, arrivals, strict=False)]
    # the limit of clients only acts if the server is far slower than predicted
    workload = Workload(requests, name, concurrency=bounds.concurrency, shares_prefixes=False)
    return Question(f"proof-{name}", "how far the twin is off on traffic that taught it nothing", workload)


def _requests(prompt: int, output: int, bounds: Bounds, seed: int) -> list[WorkloadRequest]:
    """Return requests with lognormal lengths of about these means."""
    draw = np.random.default_rng(seed)
    outputs = np.clip(draw.lognormal(np.log(output), 0.6, _REQUESTS), 2, 8 * output).astype(int)
    longest = max(bounds.longest - 8 * output - 1, 9)
    prompts = np.clip(draw.lognormal(np.log(prompt), 0.8, _REQUESTS), 8, longest).astype(int)
    lengths = zip(prompts.tolist(), outputs.tolist(), strict=True)
    return [WorkloadRequest(n, 0, ((PRIVATE, p),), o) for n, (p, o) in enumerate(lengths)]


def _capacity_s(requests: Sequence[WorkloadRequest], twin: Twin, bounds: Bounds) -> float:
    """Return the seconds per request at which the twin serves a closed loop of many clients."""
    loop = Workload(requests, "loop", concurrency=min(64, bounds.concurrency), shares_prefixes=False)
    said = simulated(loop, twin.deployment, twin.times.cost(twin.deployment), twin.front_door)
    return max(int(times[-1]) for times in said.tokens_ns.values()) / 1e9 / len(requests)
