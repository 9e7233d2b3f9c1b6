"""The host's launches in a step that runs kernel by kernel: their number, and the least time of each.

While the device works on one kernel, the host launches the next, so launches cost nothing as long as the device is the
slower of the two. A step of little work waits for the host: it takes as long as its launches do. A CUDA graph has one
launch for all kernels, and measured steps include it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa

from calibration.operations import Operation, StepSizes
from calibration.step_operations import step_operations
from calibration.steps.calibration_file import Price
from calibration.steps.features import recorded_sizes
from serving.deployments.config import Deployment
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError
from traces.tables import numbers

_FEW_TOKENS = 64  # tokens of a step that can be waiting for its launches
_FEWEST = 10  # steps of each kind, eager and graph, that are needed
_SLOWER = 1.1  # eager steps over graphs; with a smaller ratio the host was not the limit
_QUIET = 10  # percentile of the steps that nothing else held up


@dataclass(frozen=True)
class LaunchCost:
    """Host time per kernel, with all that an engine does around a launch; `ns` is None if it is not known.

    Attributes:
        sigma: standard error of its logarithm
        source: the measurement, or the reason why there is none
    """

    ns: Price | None
    sigma: Price
    source: str

    def scaled(self, factor: float) -> LaunchCost:
        """Return the cost `factor` times as long, if it is known."""
        return self if self.ns is None else replace(self, ns=self.ns * factor)

    def __str__(self) -> str:
        price = "not measured" if self.ns is None else f"{self.ns / 1e3:,.1f} µs a kernel"
        return f"{price} ({self.source})"


PUBLISHED = LaunchCost(28_000.0, 0.6, "SGLang on Llama-3-8B, published in sgl-project/sglang pull request 1401")
"""A decode step, batch 1, took 8.23 ms without graphs and 7.35 with them (FlashInfer, 2024-09); it has 293 kernels as
they are counted here. The launch alone is a tenth of that. `sigma` is what other engines are apart: 16,000 in C++
(Qwen3-0.6B, 4.20 ms, xLLM-AI/xllm pull request 713), 80,000 (Qwen2.5-Omni-7B, 22 ms, vllm-project/vllm-omni issue
7960)."""


UNKNOWN = LaunchCost(None, 0.0, "nobody looked at its launches")


def launches(operations: Iterable[Operation]) -> Any:
    """Return the kernels of a step of `operations`: one for each occurrence, or the operation's own number."""
    return sum(
        np.where(np.asarray(operation.size) > 0, operation.count * getattr(operation, "launches", 1), 0)
        for operation in operations
    )


def launching_ps(launching_ns: Callable[[StepSizes], Any]) -> dict[tuple[bool, bool, bool], int]:
    """Return picoseconds of a step's launches, by whether it has decode rows, prompts and samples."""
    table = {}
    for decodes, prompts, samples in product((False, True), repeat=3):
        rows, chunk = float(decodes), float(prompts)
        one = StepSizes(decode_rows=rows, prefill_rows=chunk, prefill_tokens=chunk, sampled_rows=float(samples))
        table[decodes, prompts, samples] = round(1000 * float(launching_ns(one)))
    return table


def measured_launches(steps: pa.Table, deployment: Deployment, where: str) -> LaunchCost:
    """Return the launch cost from the dataset `steps` of our own engine on a GPU, which marks eager steps and graphs.

    Eager steps of few tokens take the time of their launches if graphs of as many kernels took less. The time of a
    kernel is then the 10th percentile of step time over kernels. `where` names the machine.
    """
    if deployment.device != "cuda":
        return LaunchCost(None, 0.0, "a CPU launches no kernels")
    if deployment.scheduler.speculative is not None:
        return LaunchCost(None, 0.0, "steps that draft have kernels that are not counted")
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
