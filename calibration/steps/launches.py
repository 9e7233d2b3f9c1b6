"""Kernel launches by the host in steps without a CUDA graph: their number, and the host time of each.

Engines capture decode steps as graphs, and steps with prompts only up to a size. While the device runs one kernel, the
host launches the next, so launches add no time as long as the device is slower than the host. A step with little work
takes as long as its launches. A CUDA graph has one launch for all kernels, and measured step times include it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.calibration.latent_attention import LatentDecode, SparsePrefill
from tokentwin.calibration.linear_attention import LinearDecode, LinearPrefill
from tokentwin.calibration.operations import DecodeAttention, Operation, PrefillAttention, StepSizes
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.calibration_file import Price
from tokentwin.calibration.steps.features import recorded_sizes
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engines import captures_prompts
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError
from tokentwin.traces.tables import has_value, numbers

_ATTENTION = (PrefillAttention, DecodeAttention, LinearPrefill, LinearDecode, LatentDecode, SparsePrefill)
_FEW_TOKENS = 64  # maximum number of tokens in a step that may be limited by its launches
_FEWEST = 10  # minimum number of eager steps and of graph steps
_SLOWER = 1.1  # minimum ratio of eager to graph times; with a smaller one the host was not the limit
_QUIET = 10  # percentile of step times that stands for undisturbed steps


@dataclass(frozen=True)
class LaunchCost:
    """Host time per kernel, including all work of the engine around a launch; `ns` is None if it is not known.

    Attributes:
        sigma: standard error of the logarithm of the time
        source: description of the measurement, or the reason why there is none
    """

    ns: Price | None
    sigma: Price
    source: str

    def scaled(self, factor: float) -> LaunchCost:
        """Return the cost multiplied by `factor`; an unknown cost is unchanged."""
        return self if self.ns is None else replace(self, ns=self.ns * factor)

    def __str__(self) -> str:
        price = "not measured" if self.ns is None else f"{self.ns / 1e3:,.1f} µs a kernel"
        return f"{price} ({self.source})"


FITTED = "measured runs of other engines"
"""The source of a launch cost that was fitted to runs whose prompts are beyond the captured graphs."""

UNKNOWN = LaunchCost(None, 0.0, "nobody looked at its launches")


def launches(operations: Iterable[Operation]) -> Any:
    """Return the number of kernels that a step of `operations` launches."""
    return sum(
        np.where(np.asarray(operation.size) > 0, operation.count * getattr(operation, "launches", 1), 0)
        for operation in operations
    )


def outside_graphs(model: ModelSpec, deployment: Deployment, sizes: StepSizes, captured: float) -> Any:
    """Return the number of kernels that the host launches in steps of `sizes`, outside of CUDA graphs.

    Steps with prompts are graphs up to `captured` tokens (`engines.captured_tokens`). Attention lies between these
    graphs, of which a layer has one. A step without prompts is one graph; only engines that capture prompts run it
    without a graph if it has more tokens.
    """
    operations = step_operations(model, deployment, sizes)
    every = launches(operations)
    if deployment.enforce_eager:
        return every
    prompts, over = np.asarray(sizes.prefill_tokens) > 0, np.asarray(sizes.tokens) > captured
    if not captures_prompts(deployment.engine_name):
        over = over & prompts
    attention = launches(one for one in operations if isinstance(one, _ATTENTION)) + model.num_layers
    return np.where(over, every, np.where(prompts, attention, 0))


LaunchingPs = dict[tuple[bool, bool, bool], int]
"""The picoseconds of a step's launches; the keys say if it has decode rows, prompts and sampled rows."""


def launching_ps(launching_ns: Callable[[StepSizes], Any]) -> LaunchingPs:
    """Tabulate `launching_ns`, which returns the nanoseconds of the launches of a step."""
    table = {}
    for decodes, prompts, samples in product((False, True), repeat=3):
        rows, chunk = float(decodes), float(prompts)
        one = StepSizes(decode_rows=rows, prefill_rows=chunk, prefill_tokens=chunk, sampled_rows=float(samples))
        table[decodes, prompts, samples] = round(1000 * float(launching_ns(one)))
    return table


def measured_launches(steps: pa.Table, deployment: Deployment, where: str) -> LaunchCost:
    """Return the launch cost from the `steps` table of our own engine, which marks eager steps and CUDA graphs.

    Eager steps with few tokens are limited by their launches if graphs with as many kernels took less time. The time
    per kernel is then the 10th percentile of step time divided by the number of kernels. `where` names the machine.
    """
    if deployment.device != "cuda":
        return LaunchCost(None, 0.0, "a CPU launches no kernels")
    if deployment.scheduler.speculative is not None:
        return LaunchCost(None, 0.0, "steps that draft have kernels that are not counted")
    if has_value(steps, "adapters"):  # steps with LoRA adapters launch more kernels than are counted
        steps = steps.filter(pc.is_null(steps["adapters"]))
    sizes, graph = recorded_sizes(steps), numbers(steps, "graph")
    try:
        kernels = launches(step_operations(find_model(deployment.model), deployment, sizes))
    except UserError:
        return LaunchCost(None, 0.0, f"{deployment.model} is not a known model, so its kernels cannot be counted")
    each_ns = (numbers(steps, "end_ns") - numbers(steps, "start_ns")) / np.maximum(kernels, 1)
    few = (sizes.tokens > 0) & (sizes.tokens <= _FEW_TOKENS)
    eager, graphs = each_ns[few & (graph == 0)], each_ns[few & (graph == 1)]
    if min(len(eager), len(graphs)) < _FEWEST:
        counts = f"{len(eager)} eager steps and {len(graphs)} graphs of up to {_FEW_TOKENS} tokens were recorded"
        return LaunchCost(None, 0.0, f"{counts}, and {_FEWEST} of each are needed")
    quiet, usual = np.percentile(eager, (_QUIET, 50))
    if quiet < _SLOWER * np.median(graphs):
        return LaunchCost(None, 0.0, "eager steps took no longer than graphs, so that the device was the slower")
    return LaunchCost(float(quiet), float(np.log(usual / quiet)), f"{len(eager)} eager steps on {where}")
