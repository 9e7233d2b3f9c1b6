"""Observers of the steps that a cost model priced, from which the trust in a result follows.

An observer returns exactly the step times of the cost model behind it, and notes the sizes of each step. Noted sizes
are judged later, as blocks of arrays, by the rules that also judge recorded steps.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration import adapter_fit, vision_tower
from tokentwin.calibration.operations import StepSizes, own_pairs
from tokentwin.calibration.steps.features import REGIMES, feature_rows, regimes
from tokentwin.calibration.steps.interval import REACH, StepInterval, factor_at, widened
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.pipeline_cost import PipelineCost
from tokentwin.calibration.steps.step_cost import StepCost
from tokentwin.calibration.steps.step_trust import (
    NEGLIGIBLE_STEPS,
    beyond,
    interval_of,
    run_level,
    stacked,
    step_trust,
    worst_trust,
)
from tokentwin.calibration.trust import EXTRAPOLATED, INTERPOLATED, UNKNOWN, VALIDATED, Trust, TrustLevel
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.step_plan import AGGREGATES, StepPlan, aggregates_of
from tokentwin.serving.user_code.own_cost import OwnCost

_BLOCK = 4096 * len(AGGREGATES)


@runtime_checkable
class JudgedCost(CostModel, Protocol):
    """A cost model that states the trust in the steps that it has priced."""

    def ends(self) -> tuple[JudgedCost, JudgedCost]:
        """Return the cost models at the fast and at the slow end of the 90 % interval.

        It holds for steps like those priced so far.
        """
        ...

    def at_share(self, share: float) -> JudgedCost:
        """Return the cost model with step times at the quantile `share` (0 to 1) of the interval.

        It holds for steps like those priced so far. Without a known interval the result is the cost model itself.
        """
        ...

    def trust(self) -> Trust:
        """Return how far to trust the steps priced so far, and why."""
        ...


class _Observed:
    """The common part of observers: prices come from `pure`, and noted sizes are counted in blocks."""

    def __init__(self, pure: CostModel) -> None:
        self.pure = pure
        self._noted = array("q")  # the AGGREGATES of one step after another
        # index of a noted row that stands for several decode steps -> number of these steps
        self._leaps: dict[int, int] = {}

    def at_share(self, share: float) -> Self:
        """Return the observed cost model at the quantile `share`; see `JudgedCost`."""
        raise NotImplementedError

    def ends(self) -> tuple[Self, Self]:
        """Return the observed cost models at both ends of the interval; see `JudgedCost`."""
        return self.at_share(0.05), self.at_share(0.95)

    def cpu_ns(self, plan: StepPlan) -> int:
        return self.pure.cpu_ns(plan)

    def step_ns(self, plan: StepPlan) -> int:
        self._note(plan)
        return self.pure.step_ns(plan)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        if steps > 1:
            self._leaps[len(self._noted) // len(AGGREGATES)] = steps
        self._noted.extend((0, 0, 0, 0, rows, context, rows, 0))
        if len(self._noted) >= _BLOCK:
            self._count_noted()
        return self.pure.decode_run_ns(rows, context, squares, steps)

    def _note(self, plan: StepPlan) -> None:
        self._noted.extend(aggregates_of(plan))
        if len(self._noted) >= _BLOCK:
            self._count_noted()

    def _count_noted(self) -> None:
        """Count the noted steps and clear the notes."""
        if not self._noted:
            return
        rows = np.array(self._noted, dtype=np.float64).reshape(-1, len(AGGREGATES))
        steps = np.ones(len(rows))
        steps[list(self._leaps)] = list(self._leaps.values())
        del self._noted[:]
        self._leaps.clear()
        self._count(StepSizes(**dict(zip(AGGREGATES, rows.T, strict=True))), steps)

    def _count(self, sizes: StepSizes, steps: NDArray[np.float64]) -> None:
        """Count the priced `sizes`.

        An entry with `steps` above 1 stands for so many pure decode steps, in which every row's context grows by a
        token per step.
        """
        raise NotImplementedError


class ObservedOperations(_Observed):
    """An observer of a cost model of operations: it keeps the longest context by decode rows, and prompt sizes."""

    pure: OperationCost

    def __init__(self, pure: OperationCost, end: float = 0.0) -> None:
        """Observe `pure`; `end` is the place in the 90 % intervals of adapters and the encoder, from -1 (fast) to 1."""
        super().__init__(pure)
        self.adapters = pure.adapters and pure.adapters.scaled(adapter_fit.SPREAD**end)
        self.encoder = pure.encoder and pure.encoder.scaled(vision_tower.SPREAD**end)
        self.known_interval: StepInterval | None = None  # if set, replaces the interval of the steps priced here
        self._judged: tuple[list[StepSizes], StepInterval] | None = None  # corners, and the interval of such steps
        self._longest: dict[int, float] = {}  # total context by number of decode rows
        self._decode_steps: Counter[int] = Counter()  # number of steps by number of decode rows
        self._prompts: Counter[tuple[int, int, int]] = Counter()  # exponents of 2: prompts, tokens, past of each

    def network_ns(self, tokens: int) -> int:
        return self.pure.network_ns(tokens)

    def at_share(self, share: float) -> Self:
        decode, prompts = (factor_at(known, share) for known in self.interval)
        launching = prompts  # their interval has the error of launches, too
        if self.pure.deployment.enforce_eager:
            launching = factor_at(widened(self.interval.decode, REACH * self.pure.host.launches.sigma), share)
        return type(self)(self.pure.scaled(decode, prompts, launching), (share - 0.5) / 0.45)

    @property
    def interval(self) -> StepInterval:
        """The interval of the priced steps, widened if the sizes of their kernels lie beyond the measured sizes."""
        if self.known_interval is not None:
            return self.known_interval
        self._count_noted()
        corners = self._corners()
        if self._judged is None or corners != self._judged[0]:
            self._judged = corners, interval_of(self.pure, corners)
        return self._judged[1]

    def trust(self) -> Trust:
        """Return the trust in the most uncertain step, with the part that is the reason.

        A negligible share of extrapolated steps does not count; a larger share is stated.
        """
        self._count_noted()
        if self.adapters is not None:
            return Trust(EXTRAPOLATED, adapter_fit.SAID)
        multimodal = self.pure.deployment.multimodal
        if self.encoder is not None and multimodal is not None and multimodal.encoder_us_per_token is None:
            return Trust(EXTRAPOLATED, vision_tower.SAID)
        steps = [self._decode_step(rows, longest / rows) for rows, longest in self._longest.items()]
        steps += [self._prompt_step(*kind) for kind in self._kinds()]
        if not steps:
            return Trust(UNKNOWN, "no step was priced")
        priced = step_trust(self.pure, stacked(steps))
        worst = worst_trust(self.pure, priced.worst_alone())
        if worst.level != EXTRAPOLATED:
            return worst
        counts = np.array([*(self._decode_steps[rows] for rows in self._longest), *self._prompts.values()])
        share = counts[priced.level >= TrustLevel.EXTRAPOLATED].sum() / counts.sum()
        reason = f"{shown_share(share, 1)} of the steps extrapolated: {worst.reason}"
        return Trust(run_level(priced.level, counts).word, reason)

    def _count(self, sizes: StepSizes, steps: NDArray[np.float64]) -> None:
        last = sizes.decode_context + sizes.decode_rows * (steps - 1)
        for rows in _as_they_came(sizes.decode_rows[sizes.decode_rows > 0]):
            longest = float(last[sizes.decode_rows == rows].max())
            self._longest[int(rows)] = max(self._longest.get(int(rows), 0.0), longest)
            self._decode_steps[int(rows)] += int(steps[sizes.decode_rows == rows].sum())
        with_prompts = sizes.prefill_tokens > 0
        rows, tokens, past, pairs = (
            getattr(sizes, f"prefill_{name}")[with_prompts] for name in ("rows", "tokens", "context", "pairs")
        )
        own = own_pairs(rows, tokens, past, pairs)
        length = 2.0 * own / tokens - 1.0
        kinds = (tokens / length, length, 1.0 + np.maximum(pairs - own, 0.0) / tokens)
        exponents = np.stack([np.frexp(kind)[1] - 1 for kind in kinds], axis=1).astype(np.int64)
        self._prompts.update(map(tuple, exponents.tolist()))

    def _kinds(self) -> list[tuple[float, float, float]]:
        """Return each kind of prompt step as number of prompts, tokens per prompt and past tokens per prompt."""
        return [(2.0**i, 2.0**j, 2.0**k - 1.0) for i, j, k in self._prompts]

    def _corners(self) -> list[StepSizes]:
        """Return steps that are at least as large as every priced step.

        One has the maximum number of decode rows, all with the longest context. The other has the maximum number of
        prompts, all with the maximum length and past.
        """
        corners = []
        if self._longest:
            longest = max(longest / rows for rows, longest in self._longest.items())
            corners.append(self._decode_step(max(self._longest), longest))
        if kinds := self._kinds():
            corners.append(self._prompt_step(*map(max, zip(*kinds, strict=True))))
        return corners

    def _decode_step(self, rows: int, context: float) -> StepSizes:
        speculative = self.pure.deployment.scheduler.speculative
        drafts = speculative.num_speculative_tokens if speculative else 0
        return StepSizes(decode_rows=rows, decode_context=rows * context, sampled_rows=rows, draft_tokens=rows * drafts)

    def _prompt_step(self, prompts: float, length: float, past: float) -> StepSizes:
        length = min(length, self.pure.deployment.scheduler.max_num_batched_tokens / prompts)
        tokens = prompts * length
        return StepSizes(
            prefill_rows=prompts,
            prefill_tokens=tokens,
            prefill_context=prompts * past,
            prefill_pairs=tokens * past + tokens * (length + 1) / 2,
            sampled_rows=prompts,
        )


class ObservedPipeline(ObservedOperations):
    """An observer of an engine with pipeline stages."""

    pure: PipelineCost

    def stages_ns(self, plan: StepPlan) -> list[int]:
        self._note(plan)
        return self.pure.stages_ns(plan)

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return self.pure.transfers_ns(plan)


class ObservedPrices(_Observed):
    """An observer of our own engine's calibration; it counts the steps outside the measured domain by feature."""

    pure: StepCost

    def __init__(self, pure: StepCost) -> None:
        super().__init__(pure)
        self.adapters = pure.adapters
        self._steps = 0
        self._outside = np.zeros(
            (len(REGIMES), len(pure.calibration.features)), dtype=np.int64
        )  # steps outside the domain, `[regime, feature]`; each is counted once, at its first feature outside

    def at_share(self, share: float) -> Self:
        known = self.pure.calibration
        launching = widened(known.interval, REACH * known.launches.sigma)
        return type(self)(self.pure.scaled(factor_at(known.interval, share), factor_at(launching, share)))

    @property
    def extrapolated_share(self) -> float:
        """The share of priced steps that lie outside the measured domain."""
        self._count_noted()
        return int(self._outside.sum()) / max(self._steps, 1)

    def trust(self) -> Trust:
        share, known = self.extrapolated_share, self.pure.calibration
        if known.untaught:
            return Trust(EXTRAPOLATED, known.untaught)
        if (lora := self.pure.deployment.lora) is not None:
            slots = min(lora.max_loras, self.pure.deployment.scheduler.max_num_seqs)
            if slots > known.most_adapters:
                measured = f"calibration {known.id} measured at most {known.most_adapters:.0f}"
                return Trust(EXTRAPOLATED, f"a step may have {slots} LoRA adapters, and {measured}")
        launching, rest = (f"launches take {known.launches}; ", "the rest") if self.pure.launching else ("", "it")
        if share <= NEGLIGIBLE_STEPS and (server := known.hardware.get("learnt")):
            return Trust(INTERPOLATED, f"clients of a server saw steps of these sizes ({server}, {known.created})")
        if share <= NEGLIGIBLE_STEPS:
            level = INTERPOLATED if self.pure.launching else VALIDATED
            return Trust(level, f"{launching}held-out steps of calibration {known.id} cover {rest}")
        counts = {
            f"{name} of {regime} steps" if regime in known.domain else f"{regime} steps": -int(self._outside[i, j])
            for i, regime in enumerate(REGIMES)
            for j, name in enumerate(known.features)
            if self._outside[i, j]
        }
        most = min(counts, key=lambda name: (counts[name], name))
        outside = (
            f"{shown_share(share, 1)} of the steps lie outside what calibration {known.id} measured, most by {most}"
        )
        return Trust(EXTRAPOLATED, launching + outside)

    def _count(self, sizes: StepSizes, steps: NDArray[np.float64]) -> None:
        self._steps += int(steps.sum())
        last = StepSizes(**{**vars(sizes), "decode_context": sizes.decode_context + sizes.decode_rows * (steps - 1)})
        # the steps between are inside, too
        inside = ~(self._beyond(sizes).any(axis=1) | self._beyond(last).any(axis=1))
        rest, counts = np.flatnonzero(~inside), steps[~inside].astype(np.int64)
        one_by_one = {name: np.repeat(np.broadcast_to(v, steps.shape)[rest], counts) for name, v in vars(sizes).items()}
        after = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        one_by_one["decode_context"] += one_by_one["decode_rows"] * after
        unfolded = StepSizes(**one_by_one)
        features_beyond = self._beyond(unfolded)
        out = features_beyond.any(axis=1)
        np.add.at(self._outside, (regimes(unfolded)[out], features_beyond[out].argmax(axis=1)), 1)

    def _beyond(self, sizes: StepSizes) -> NDArray[np.bool_]:
        known = self.pure.calibration
        return beyond(known, feature_rows(sizes, known.drafts, self.pure.pads, known.knees), regimes(sizes))


class ObservedOwn(_Observed):
    """An observer of a user's own cost model; the only known accuracy is the one that this model states."""

    pure: OwnCost

    def at_share(self, share: float) -> Self:
        known = self.pure.interval
        return self if known is None else type(self)(self.pure.scaled(factor_at(known, share)))

    def trust(self) -> Trust:
        said = "says how far off it may be" if self.pure.interval else "does not say how far off it may be"
        return Trust(UNKNOWN, f"the cost model {self.pure.name} was not made here, and {said}")

    def step_ns(self, plan: StepPlan) -> int:
        return self.pure.step_ns(plan)  # notes nothing, because the domain in which the model was measured is unknown

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return self.pure.decode_run_ns(rows, context, squares, steps)


def observed(cost: OperationCost | StepCost | OwnCost) -> ObservedOperations | ObservedPrices | ObservedOwn:
    """Return a new observer of `cost`, with no priced steps."""
    if isinstance(cost, PipelineCost):
        return ObservedPipeline(cost)
    if isinstance(cost, OperationCost):
        return ObservedOperations(cost)
    return ObservedPrices(cost) if isinstance(cost, StepCost) else ObservedOwn(cost)


def pure(cost: CostModel) -> CostModel:
    """Return the cost model behind an observed one, or `cost` itself."""
    return cost.pure if isinstance(cost, _Observed) else cost


def _as_they_came(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each value once, in order of first occurrence."""
    different, first = np.unique(values, return_index=True)
    return different[np.argsort(first)]
