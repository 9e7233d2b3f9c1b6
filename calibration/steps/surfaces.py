"""Step times of our own engine as kernel times that its measured steps correct: the rival of linear prices.

A GPU's step is the larger of reading weights and of computing, so it is no line in its tokens. Here its shape comes
from kernel times: of the engine's own kernels where they were measured, of the bundled surfaces of its GPU elsewhere,
and on a CPU of the roofline. Measured steps teach a factor for each part (`tokentwin.calibration.steps.correction`;
prompts' attention to their own chunk and to their past are two parts), times per step, row and prompt, and a factor for
steps beyond the CUDA graphs, which run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.kernels.cpu_roofline import CpuRoofline
from tokentwin.calibration.kernels.own_kernels import KernelRatio, OwnKernels
from tokentwin.calibration.operations import KernelTimes, StepSizes
from tokentwin.calibration.steps.calibration_file import Price
from tokentwin.calibration.steps.correction import ADDED, Correction, added_amounts, correction_columns, step_parts
from tokentwin.calibration.steps.operation_cost import OperationCost, Tables
from tokentwin.serving.cost_model import TOKEN_BUCKETS, padded, padded_tokens
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.step_prices import PromptCells, StepPrices

_OF_ATTENTION = ("decode attention", "prompt attention", "past attention")
CPU = "cpu"
LINE = ("padded row", "sampled row", "prompt token")


@dataclass(frozen=True)
class Surfaces:
    """Corrected kernel times, as a calibration keeps them.

    Attributes:
        model: the model's shape as JSON, so that a calibration needs no model files
        gpu: name of the catalogued GPU; `cpu` for the roofline of a CPU
        balance: FLOPs of a CPU in the time of reading a byte; 0 for a GPU
        own: measured times of the engine's own kernels, as ratios to the GPU's bundled surfaces
        eager: share of the time outside of attention that a step beyond the CUDA graphs takes longer
        line_ns: times of `LINE` on a CPU, whose kernels for few rows the roofline does not describe; empty for a GPU
        captures: True if the engine runs mixed steps as CUDA graphs
    """

    model: str
    gpu: str
    correction: Correction
    balance: Price = 0.0
    own: tuple[KernelRatio, ...] = ()
    eager: Price = 0.0
    captures: bool = False
    line_ns: Mapping[str, Price] = field(default_factory=dict)

    @property
    def added_ns(self) -> dict[str, float]:
        """The times beside the kernels, by what they are added for: each step, row, prompt and so on."""
        return {ADDED[name]: ns for name, ns in self.correction.added_ns.items()} | dict(self.line_ns)

    def kernels(self) -> KernelTimes:
        """Return the uncorrected kernel times."""
        return kernels_of(self.gpu, self.balance, self.own)

    def scaled(self, factor: float) -> Surfaces:
        """Return the surfaces with all times multiplied by `factor`."""
        line_ns = {name: ns * factor for name, ns in self.line_ns.items()}
        return replace(self, correction=self.correction.scaled(factor, factor), line_ns=line_ns)

    def with_parts(self, factor: float, *parts: str) -> Surfaces:
        """Return the surfaces with the times of `parts` multiplied by `factor`."""
        factors = dict(self.correction.factors)
        factors |= {part: factor * factors[part] for part in parts}
        return replace(self, correction=replace(self.correction, factors=factors))


def kernels_of(gpu: str, balance: float, own: Iterable[KernelRatio] = ()) -> KernelTimes:
    """Return kernel times of a catalogued GPU, with the engine's `own` ratios, or of a CPU with this balance."""
    from tokentwin.calibration.steps.external_calibration import kernels  # it imports scipy, which is slow

    return CpuRoofline(balance) if gpu == CPU else OwnKernels(kernels(gpu), own)


def run_tokens(sizes: StepSizes, captures: bool) -> NDArray[np.float64]:
    """Return the tokens that go through the layers of each step, padding included."""
    rows, more = np.broadcast_arrays(sizes.decode_rows, np.asarray(sizes.prefill_tokens) + sizes.draft_tokens)
    return np.array([_run(int(row), int(other), captures) for row, other in zip(rows.flat, more.flat, strict=True)])


def _run(rows: int, more: int, captures: bool) -> float:
    if more:
        return float(padded_tokens(rows + more) if captures else rows + more)
    return float(padded(rows))


def beyond_graphs(tokens: Any, captures: bool) -> Any:
    """Return whether steps of so many tokens are beyond the largest CUDA graph."""
    return (np.asarray(tokens) > TOKEN_BUCKETS[-1]) & captures


def line_amounts(sizes: StepSizes) -> dict[str, NDArray[np.float64]]:
    """Return the amounts `[steps]` of each name in `LINE`."""
    rows = np.array([padded(int(row)) for row in np.atleast_1d(sizes.decode_rows)], dtype=np.float64)
    return dict(zip(LINE, (rows, sizes.sampled_rows + 0.0 * rows, sizes.prefill_tokens + 0.0 * rows), strict=True))


def measured_parts(
    model: ModelSpec, deployment: Deployment, kernels: KernelTimes, sizes: StepSizes, captures: bool
) -> dict[str, NDArray[np.float64]]:
    """Return the uncorrected parts of many steps, `[steps]`: attention of the rows, all else of the padded tokens."""
    tokens = run_tokens(sizes, captures)
    layers = StepSizes(prefill_tokens=tokens, sampled_rows=np.asarray(sizes.sampled_rows))
    dense = step_parts(model, deployment, kernels, layers)
    attention = step_parts(model, deployment, kernels, replace(sizes, sampled_rows=0.0 * tokens))
    parts = {name: attention[name] if name in _OF_ATTENTION else ns for name, ns in dense.items()}
    parts |= {name: attention[name] for name in _OF_ATTENTION if name in attention}
    return {name: ns for name, ns in parts.items() if name != "imbalance"}


def surface_ns(surfaces: Surfaces, deployment: Deployment, sizes: StepSizes) -> NDArray[np.float64]:
    """Return the time of each step by `surfaces`, `[steps]`."""
    model, correction = ModelSpec.model_validate_json(surfaces.model), surfaces.correction
    parts = measured_parts(model, deployment, surfaces.kernels(), sizes, surfaces.captures)
    tokens = run_tokens(sizes, surfaces.captures)
    eager = 1.0 + surfaces.eager * beyond_graphs(tokens, surfaces.captures)
    columns = correction_columns(parts, tokens)
    ns: NDArray[np.float64] | float = sum(
        correction.factors[name] * amount * (1.0 if name in _OF_ATTENTION else eager)
        for name, amount in columns.items()
    )
    ns += sum(correction.added_ns[name] * amount for name, amount in added_amounts(sizes).items())
    line = line_amounts(sizes) if surfaces.line_ns else {}
    return np.asarray(ns + sum(surfaces.line_ns[name] * amount for name, amount in line.items()))


class SurfaceCost(OperationCost):
    """The prices of steps by corrected surfaces, in tables: those of the simulator of other engines, our padding."""

    def __init__(self, surfaces: Surfaces, deployment: Deployment, tables: Tables | None = None) -> None:
        self.surfaces = surfaces
        spec = ModelSpec.model_validate_json(surfaces.model)
        super().__init__(spec, deployment, surfaces.kernels(), surfaces.correction, tables=tables)
        self._line_ns = tuple(surfaces.line_ns.get(name, 0.0) for name in LINE)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_mixed"}

    def corrected(self, surfaces: Surfaces) -> SurfaceCost:
        """Return the prices by `surfaces` that differ only in their correction; kernel times are not made again."""
        return SurfaceCost(surfaces, self.deployment, self._tables)

    def step_ps(self, plan: StepPlan) -> int:
        """Return the picoseconds of a step."""
        prices = self._mixed if plan.prefill_tokens or plan.draft_tokens else self._prices
        more_ns = self._line(plan.decode_rows, plan.sampled_rows, plan.prefill_tokens)
        return prices.step_ps(plan, plan.sampled_rows) + 1000 * more_ns

    def run_ns(self, rows: int, context: int, squares: int, steps: int, cpu_ns: int) -> Iterable[int]:
        """Return the durations of `steps` pure decode steps, each with `cpu_ns` before it."""
        return self._prices.run(rows, context, squares, steps, cpu_ns + self._line(rows, rows, 0))

    def _line(self, rows: int, sampled: int, tokens: int) -> int:
        row_ns, sample_ns, token_ns = self._line_ns
        return round(padded(rows) * row_ns + sampled * sample_ns + tokens * token_ns)

    @cached_property
    def _mixed(self) -> StepPrices:
        alike, added = self._prices, self._added
        return StepPrices(
            self._mixed_ps, alike.sampled_ps, added["step"], added["prompt"], added["prompts only"],
            added["prompts only, token"], 0.0, 0.0, alike.make_rows, PromptCells(alike.prompts.make),
        )  # fmt: skip

    @cached_property
    def _mixed_ps(self) -> list[int]:
        captures = self.surfaces.captures
        run = [_run(0, tokens, captures) for tokens in range(self._most_tokens + 1)]
        sizes = StepSizes(prefill_tokens=np.minimum(run, max(self._most_tokens, 1)))
        eager = 1.0 + self.surfaces.eager * beyond_graphs(sizes.prefill_tokens, captures)
        return [round(1000 * ns) for ns in (eager * self._token_parts("mixed tokens", sizes)).tolist()]

    @cached_property
    def _run_tokens(self) -> NDArray[np.float64]:
        run = [padded(rows) for rows in range(self._most_tokens + 1)]
        return np.minimum(run, max(self._most_tokens, 1)).astype(np.float64)
