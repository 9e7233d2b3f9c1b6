"""What a published run served, and how: the facts by which a reader's own plan is compared with it.

A precision is the number format that publishers name: `bf16` (any 16 bits), `fp8`, `fp4`, `int4`, `int8`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokentwin.calibration.validation.external.case import Case
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.weight_types import weights_dtype
from tokentwin.traces.measured.run import MeasuredRun

_PRECISION = {"bfloat16": "bf16", "float16": "bf16", "fp8_block": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}


@dataclass(frozen=True)
class Served:
    """One run. Its settings are those of its case file, which says where the publisher does not state them.

    Attributes:
        weights, kv_cache: precision
        shards: tensor parallel size
        closed: True if a fixed number of requests was in flight, False if they came at a rate; None for a log of steps
        at_a_time: number of requests at a time in one replica; None if unknown
    """

    model: str
    weights: str
    kv_cache: str
    shards: int
    closed: bool | None = None
    at_a_time: float | None = None


def precisions(deployment: Deployment) -> tuple[str, str]:
    """Return the precision of the weights and of the KV cache. Raises UserError for an unknown model."""
    weights = weights_dtype(find_model(deployment.model), deployment)
    kv_cache = deployment.dtype if deployment.kv_cache_dtype == "auto" else deployment.kv_cache_dtype
    return _PRECISION.get(weights, weights), _PRECISION.get(kv_cache, kv_cache)


def served(case: Case, run: MeasuredRun) -> Served:
    """Return what a run of the case served. Without a fixed concurrency, Little's law gives the requests at a time."""
    deployment, _ = case.deployment_of(run)
    facts = deployment.model, *precisions(deployment), deployment.tensor_parallel_size
    if case.is_of_steps:
        return Served(*facts)
    slots = run.workload.concurrency  # of one data-parallel rank
    if slots is not None and run.offered_per_s is None:
        return Served(*facts, True, float(slots * deployment.data_parallel_size))
    rate, e2e_ms = (run.figures.get(name) for name in ("request_throughput", "e2e_ms.mean"))
    at_a_time = rate * e2e_ms / 1000 / case.replicas if rate and e2e_ms else None
    return Served(*facts, False, at_a_time)
