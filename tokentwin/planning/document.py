"""A plan as it is saved: the answer, and what surrounds it, as one JSON document.

It is what `tokentwin plan --format json` prints, what a job of the Plan page keeps, and what `tokentwin export` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from serving.workload import Workload
from tokentwin import __version__
from tokentwin.planning.curves import fleet_curve, load_curve, mean_rate
from tokentwin.planning.engines import Engine
from tokentwin.planning.plan import Plan
from tokentwin.planning.report import as_json, why_not_fewer
from tokentwin.planning.workers import Workers

_BINS = 30
_AROUND = 0.7  # of the work of both curves, the first one's: it is simulated at both ends of the interval, too


def plan_document(
    workers: Workers,
    found: Plan,
    engines: Sequence[Engine],
    asked: Mapping[str, Any],
    tell: Callable[[str, float], None] = lambda stage, share: None,
) -> dict[str, Any]:
    """`as_json`, and

    why_not_fewer   in a sentence
    requests_per_s  the mean rate; None if all arrive at once
    candidates      the GPU and the deployment of each, by its name
    lengths         how long prompts and outputs are; see `length_histogram`
    by_replicas     attainment of the recommended engine with more and fewer replicas
    by_rate         latencies of the recommended fleet with more and less traffic
    version, asked  what tells how to get it again: `asked` is `{"command": ...}`, or the inputs of the page

    The two curves are simulated here: `tell` hears of them, with the share of this that is done.
    """
    best, rate = found.recommendation, mean_rate(found.question)
    document: dict[str, Any] = {
        **as_json(found),
        "why_not_fewer": why_not_fewer(found, best) if best else None,
        "requests_per_s": rate if math.isfinite(rate) else None,
        "candidates": {
            engine.name: {"gpu": engine.gpu, "deployment": engine.deployment.model_dump(mode="json")}
            for engine in engines
        },
        "lengths": workload_lengths(found.question.workload),
        "by_replicas": [],
        "by_rate": [],
        "version": __version__,
        "asked": dict(asked),
    }
    if best is not None:
        engine, replicas = best.offer.engine, best.offer.trial.replicas
        around = fleet_curve(
            workers,
            engine,
            replicas,
            found.limits.most,
            lambda share: tell("attainment with more and fewer replicas", _AROUND * share),
        )
        document["by_replicas"] = [asdict(p) for p in around]
        curve = load_curve(
            workers,
            engine,
            replicas,
            best.knee.headroom_percent,
            lambda share: tell("latency with more and less traffic", _AROUND + (1 - _AROUND) * share),
        )
        document["by_rate"] = [_finite(asdict(p)) for p in curve]
    return document


def workload_lengths(workload: Workload) -> dict[str, dict[str, list[float]]]:
    """`length_histogram` of the prompts and of the outputs."""
    requests = list(workload.requests)
    return {
        "prompt": length_histogram([request.prompt_len for request in requests]),
        "output": length_histogram([request.output_len for request in requests]),
    }


def length_histogram(tokens: Sequence[int]) -> dict[str, list[float]]:
    """The percentage of the requests between each of the `edges` (tokens, evenly spaced logarithms) and the next."""
    import numpy as np

    edges = np.geomspace(min(tokens), max(tokens) + 1, _BINS + 1)
    counts, _ = np.histogram(tokens, edges)
    return {"edges": [float(f"{edge:.6g}") for edge in edges], "percent": (100 * counts / len(tokens)).tolist()}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
