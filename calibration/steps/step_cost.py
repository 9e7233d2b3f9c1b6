"""A calibrated cost model: the price of each feature (its time per unit), the measured domain, and the errors.

A step's time is the sum of its features (launch, padded rows, KV read, prompt tokens, attention pairs, sampling), each
multiplied by a non-negative price. The CPU time between steps is another such sum. Sums are integers in picoseconds, so
a sequence of decode steps takes the same time if it is simulated step by step or at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.calibration_file import checked, read, save
from tokentwin.calibration.steps.features import (
    ADAPTER_CPU_FEATURES,
    ADAPTER_FEATURES,
    CPU_FEATURES,
    DRAFT_FEATURES,
    TOKEN_FEATURES,
    cpu_features,
    draft_features,
    feature_names,
    mixed_padding,
    pads_mixed_steps,
    step_features,
    token_features,
)
from tokentwin.calibration.steps.interval import Factors
from tokentwin.calibration.steps.launches import UNKNOWN, LaunchCost, launches, launching_ps
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.surfaces import SurfaceCost, Surfaces
from tokentwin.serving.adapter_times import AdapterTimes
from tokentwin.serving.cost_model import MASK_NS, padded
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.step_prices import DecodeRun

FILE = "calibration.json"
_FORMAT = 2
_Picoseconds = Annotated[int, Field(ge=0, lt=10**18)]
_CONTEXT = ("decode_context", "draft_context")


@dataclass(frozen=True)
class Residuals:
    """Errors of the predicted times of one regime's held-out steps, in percent of the measured time.

    A calibration states errors of CPU time at the machine's speed in each step, if its recordings have both.
    `quantiles_pct` are signed errors (predicted - measured) / measured at 5, 25, 50, 75 and 95 %.
    """

    steps: int
    median_error_pct: float
    p95_error_pct: float
    bias_pct: float
    quantiles_pct: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """The calibration of an engine, and the measurements behind it.

    Attributes:
        step_prices_ps, cpu_prices_ps: price per unit of each feature in picoseconds; DRAFT_FEATURES have prices only
            with speculative decoding, TOKEN_FEATURES only on GPUs, and ADAPTER_FEATURES only with LoRA adapters. Then
            `cpu_prices_ps` has the prices of `adapter_loads` and `adapter_copies`
        domain: smallest and largest measured value of each step feature, by regime
        residuals: held-out error by regime
        mask_ps: time of the grammar mask for one row in picoseconds; None if no row had one
        changed_ps, scored_ps: time in picoseconds of the penalties of one row, and of the log-probabilities of one
            token of a prompt; None if they were not measured, and take no time then
        interval: factors of the predicted time between which 90 % of runs lie
        weather: the slowdown of the machine that the prices include; None in an older calibration
        noise: times of the reference step and other measures of disturbance of the machine
        launches: host time of a kernel launch, from steps without CUDA graphs
        surfaces: corrected kernel times, which price the steps instead of `step_prices_ps`; None if prices were better
        unseen_error_pct: the usual error of a step in recordings that were not fitted, by what prices the steps: by
            these errors, prices or surfaces were chosen
        judged_error_pct: this error in recordings that had no part in the choice; None in an older calibration
        no_surfaces: the reason why there are no kernel times to correct; empty if there are
        untaught: clause that says why the measurements do not hold any more; empty if they do
    """

    id: str
    deployment: str
    hardware: Mapping[str, Any]
    version: str
    created: str
    step_prices_ps: Mapping[str, _Picoseconds]
    cpu_prices_ps: Mapping[str, _Picoseconds]
    domain: Mapping[str, Mapping[str, tuple[float, float]]]
    residuals: Mapping[str, Residuals]
    noise: Mapping[str, Any]
    fitted_steps: int
    mask_ps: int | None = None
    changed_ps: int | None = None
    scored_ps: int | None = None
    interval: Factors = (1.0, 1.0)
    weather: MachineSlowdown | None = None
    launches: LaunchCost = UNKNOWN
    untaught: str = ""
    surfaces: Surfaces | None = None
    unseen_error_pct: Mapping[str, float] = field(default_factory=dict)
    no_surfaces: str = ""
    judged_error_pct: float | None = None
    format: int = field(default=_FORMAT)

    @property
    def drafts(self) -> bool:
        """True if the engine has speculative decoding."""
        return any(name in self.step_prices_ps for name in DRAFT_FEATURES)

    @property
    def knees(self) -> bool:
        """True if the price of a token depends on the number of tokens in its step."""
        return any(name in self.step_prices_ps for name in TOKEN_FEATURES)

    @property
    def adapters(self) -> AdapterTimes | None:
        """The times of LoRA adapters; None if no measured step had one.

        Our kernels do nothing for slots and tiles without an adapter.
        """
        step, cpu = self.step_prices_ps, self.cpu_prices_ps
        if "adapted" not in step:
            return None
        prices = step["adapted"], 0, step["adapters"], step["adapted_tokens"]
        more = cpu.get("adapter_copies", 0), cpu.get("adapter_loads", 0)
        return AdapterTimes(*(ps / 1000 for ps in (*prices, *more)))

    @property
    def priced(self) -> tuple[tuple[str, dict[str, str], Mapping[str, int]], ...]:
        """The linear parts of a step's time, `step` and `cpu`: the meaning and the price of each feature.

        `step` is missing if surfaces price the steps.
        """
        step = self.features | {name: said for name, said in ADAPTER_FEATURES.items() if name in self.step_prices_ps}
        cpu = CPU_FEATURES | {name: said for name, said in ADAPTER_CPU_FEATURES.items() if name in self.cpu_prices_ps}
        between = ("cpu", cpu, self.cpu_prices_ps)
        return (("step", step, self.step_prices_ps), between) if self.surfaces is None else (between,)

    @property
    def most_adapters(self) -> float:
        """The largest number of LoRA adapters in a measured step."""
        return max((ranges["adapters"][1] for ranges in self.domain.values() if "adapters" in ranges), default=0.0)

    @property
    def chosen(self) -> str:
        """A sentence that says what prices the steps, and why; empty in an older calibration."""
        if self.no_surfaces:
            return f"steps are timed by linear prices: {self.no_surfaces}"
        if len(self.unseen_error_pct) < 2:
            return ""
        linear, surfaces = self.unseen_error_pct.items()
        (name, error), (other, more) = (surfaces, linear) if self.surfaces else (linear, surfaces)
        said = f"steps are timed by {name}, off by {error:g} % in unseen recordings ({other}: {more:g} %)"
        if self.judged_error_pct is None:
            return said
        return f"{said}; {self.judged_error_pct:g} % in recordings outside this comparison"

    @property
    def learnt_as(self) -> Deployment:
        """The parsed `deployment`."""
        return parse(Deployment, json.loads(self.deployment or "{}"), where="calibration.deployment")

    @property
    def features(self) -> dict[str, str]:
        """The features that a step's time depends on, with their meanings."""
        return feature_names(self.drafts, self.knees)

    def save(self, directory: Path) -> None:
        """Write `calibration.json` into `directory`; a failed write leaves no partial file."""
        save(self, directory / FILE)

    @classmethod
    def load(cls, directory: str | Path) -> Calibration:
        """Read `calibration.json` in `directory`; raise UserError if it is missing or has another format."""
        path = Path(directory) / FILE
        calibration = checked(cls, read(path, _FORMAT), str(path))
        missing = [f for f in calibration.features if f not in calibration.step_prices_ps]
        missing += [f for f in CPU_FEATURES if f not in calibration.cpu_prices_ps]
        if missing:
            raise UserError("calibration", str(path), f"has no price for {', '.join(missing)}; calibrate again")
        return calibration


class StepCost:
    """The cost model of a calibration. It also predicts times of steps outside the measured domain.

    An engine that was calibrated with CUDA graphs may have a `deployment` without them. A step then takes its
        calibrated time or the time of its launches, whichever is longer.

    Attributes:
        adapters: times of LoRA adapters, which the simulator adds to a step; None if none was measured
        pads: True if mixed steps run as CUDA graphs
        launching: True if the host launches kernels one by one, although the calibration was made with graphs
    """

    def __init__(
        self, calibration: Calibration, deployment: Deployment | None = None, like: SurfaceCost | None = None
    ) -> None:
        learnt_as = calibration.learnt_as
        serves = deployment or learnt_as
        self.calibration, self.deployment = calibration, serves
        self.adapters = calibration.adapters
        self.pads = pads_mixed_steps(serves)
        self.launching = serves.enforce_eager and not learnt_as.enforce_eager
        surfaces = calibration.surfaces
        self._surfaces: SurfaceCost | None = None
        if surfaces is not None:
            self._surfaces = SurfaceCost(surfaces, serves) if like is None else like.corrected(surfaces)
        self._launching_ps: dict[tuple[bool, bool, bool], int] = {}
        if self.launching:
            model, each_ns = find_model(serves.model), calibration.launches.ns or 0.0
            self._launching_ps = launching_ps(lambda sizes: each_ns * launches(step_operations(model, serves, sizes)))
        self._step = tuple(int(calibration.step_prices_ps[name]) for name in calibration.features)
        self._drafts, self._knees = calibration.drafts, calibration.knees
        self._per_context = sum(int(calibration.step_prices_ps.get(name, 0)) for name in _CONTEXT)
        self._cpu = tuple(int(calibration.cpu_prices_ps[name]) for name in CPU_FEATURES)
        self._changed_ps, self._scored_ps = calibration.changed_ps or 0, calibration.scored_ps or 0
        self._mask_ps = MASK_NS * 1000 if calibration.mask_ps is None else calibration.mask_ps

    def scaled(self, factor: float, launching: float | None = None) -> StepCost:
        """Return the cost model with prices multiplied by `factor`, and the launch cost by `launching` if given."""
        known = self.calibration
        made = replace(
            known,
            step_prices_ps={name: round(p * factor) for name, p in known.step_prices_ps.items()},
            cpu_prices_ps={name: round(p * factor) for name, p in known.cpu_prices_ps.items()},
            changed_ps=known.changed_ps and round(known.changed_ps * factor),
            scored_ps=known.scored_ps and round(known.scored_ps * factor),
            launches=known.launches.scaled(factor if launching is None else launching),
        )
        return self.priced_by(replace(made, surfaces=known.surfaces and known.surfaces.scaled(factor)))

    def priced_by(self, calibration: Calibration) -> StepCost:
        """Return the cost model of the same deployment by `calibration`, with other prices of the same kernels."""
        return StepCost(calibration, self.deployment, self._surfaces)

    def cpu_ns(self, plan: StepPlan) -> int:
        return (_dot(self._cpu, cpu_features(plan)) + self._mask_ps * plan.masked_rows) // 1000

    def step_ns(self, plan: StepPlan) -> int:
        total = self._step_ps(plan)
        if self.launching:
            holds = plan.decode_rows > 0, plan.prefill_tokens > 0, plan.sampled_rows > 0
            total = max(total, self._launching_ps[holds])
        if plan.changed_rows or plan.scored_tokens:
            total += self._changed_ps * plan.changed_rows + self._scored_ps * plan.scored_tokens
        return total // 1000

    def _step_ps(self, plan: StepPlan) -> int:
        if self._surfaces is not None:
            return self._surfaces.step_ps(plan)
        rows = padded(plan.decode_rows)
        padding = mixed_padding(plan, rows) if self.pads else 0
        features = step_features(plan, rows, padding)
        if self._drafts:
            features += draft_features(plan)
        if self._knees:
            features += token_features(plan, rows, padding)
        return _dot(self._step, features)

    @property
    def logits_said(self) -> str:
        """A sentence about the times that rules for logits and log-probabilities of prompts add."""
        if self.calibration.changed_ps is None:
            return (
                "penalties and log-probabilities of prompts are free, because the calibration does not know their "
                "times; calibrate measures them for our own engine on one device"
            )
        row_us, token_us = self._changed_ps / 1e6, self._scored_ps / 1e6
        return f"penalties of one row take {row_us:.3g} us, log-probabilities of a prompt {token_us:.3g} us a token"

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        first = StepPlan.from_amounts(
            decode_rows=rows, decode_context=context, decode_squares=squares, sampled_rows=rows
        )
        run: Iterable[int]
        if self._surfaces is not None:
            run = self._surfaces.run_ns(rows, context, squares, steps, self.cpu_ns(first))
        else:
            price_ps = self._step_ps(first)
            run = DecodeRun(1000 * self.cpu_ns(first) + price_ps, self._per_context * rows, steps)
        if not self.launching:
            return run
        least_ns = self.cpu_ns(first) + self._launching_ps[True, False, True] // 1000
        return [max(ns, least_ns) for ns in run]


def _dot(prices: tuple[int, ...], amounts: tuple[int, ...]) -> int:
    return sum(price * amount for price, amount in zip(prices, amounts, strict=True))
