"""The times of a server's steps, from the tokens that its clients saw.

A simulation with the right settings says which token each step sampled. The client's times of these tokens are then
the times at which the steps ended, and the differences between them are the durations of the steps, whose sizes the
simulation also knows. The correction of step times is fitted to them as to a log of iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibration.operations import StepSizes
from calibration.steps.correction import Correction, fit_correction, step_parts
from calibration.steps.iteration_fit import IterationLog
from calibration.steps.launches import LaunchCost
from calibration.steps.operation_cost import OperationCost
from planning.learn.answers import Answer, Simulated
from serving.deployments.engines import captured_tokens
from serving.errors import UserError
from serving.step_plan import AGGREGATES

Floats = NDArray[np.float64]
_TOGETHER = 8  # number of equal decode steps that are measured together
_FEWEST = 20  # minimum number of steps
_LAUNCH_SCALES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0)
_BOUND = 0.95  # share of a step's time from which on its launches are its limit
_WORST = 0.2  # larger errors count no more than this one
_UNLIKELY = 0.002  # error that a launch cost e times the believed one must save


def aligned_steps(answer: Answer, twin: Simulated) -> IterationLog:
    """Return the steps of a simulation with the durations that the client saw, as far as both are known."""
    ends = twin.steps["end_ns"].to_numpy().astype(np.int64)
    starts = twin.steps["start_ns"].to_numpy().astype(np.int64)
    order = np.argsort(ends, kind="stable")
    ends, starts = ends[order], starts[order]
    seen_at = _seen_at(answer, twin, ends)
    sizes = {name: _column(twin, name)[order] for name in AGGREGATES}
    back_to_back = np.zeros(len(ends), dtype=bool)
    back_to_back[1:] = starts[1:] == ends[:-1]
    known = np.isfinite(seen_at)
    rows, durations = [], []
    first = 1
    while first < len(ends):
        last = _alike(sizes, back_to_back & known, first)
        if back_to_back[first] and known[first] and known[first - 1]:
            middle = (first + last) // 2
            rows.append(middle)
            durations.append((seen_at[last] - seen_at[first - 1]) / (last - first + 1))
        first = last + 1
    chosen, measured = np.array(rows, dtype=np.int64), np.array(durations)
    timed = measured > 0
    chosen, measured = chosen[timed], measured[timed]
    picked = {name: values[chosen] for name, values in sizes.items()}
    return IterationLog(StepSizes(**picked, decode_spread=np.zeros(len(chosen))), measured)


def joined(logs: Sequence[IterationLog]) -> IterationLog:
    """Return all steps of several logs as one."""
    fields = {name: np.concatenate([np.asarray(getattr(log.sizes, name)) for log in logs]) for name in _FIELDS}
    return IterationLog(StepSizes(**fields), np.concatenate([log.measured_ns for log in logs]))


_FIELDS = (*AGGREGATES, "decode_spread")


def fitted_steps(log: IterationLog, prior: OperationCost, fit_launches: bool = True) -> tuple[Correction, LaunchCost]:
    """Return the correction and the launch cost that best explain the steps, close to those of `prior`.

    A step whose launches take as long as it did says nothing about its kernels and is left out. The launch cost is the
    one of several that leaves the smallest errors, or that of `prior` if `fit_launches` is False.
    """
    parts = step_parts(prior.model, prior.deployment, prior.kernels, log.sizes)
    believed = prior.host.launches
    captured = captured_tokens(prior.deployment, prior.kernels.gpu)
    launching = np.broadcast_to(prior.launching_ns(log.sizes, captured), log.measured_ns.shape)
    best: tuple[float, Correction, LaunchCost] | None = None
    for scale in _LAUNCH_SCALES if fit_launches and np.any(launching > 0) else (1.0,):
        free = scale * launching < _BOUND * log.measured_ns
        rest = log.take(free)
        if len(rest) < _FEWEST:
            continue
        chosen = {name: ns[free] for name, ns in parts.items()}
        correction = fit_correction(chosen, rest.sizes, rest.measured_ns, "questions", prior.correction)
        device = sum(correction.apply(parts, log.sizes).values())
        error = np.abs(np.log(np.maximum(device, scale * launching) / log.measured_ns))
        score = float(np.minimum(error, _WORST).mean()) + _UNLIKELY * abs(float(np.log(scale)))
        if best is None or score < best[0]:
            best = score, correction, believed.scaled(scale)
    if best is None:
        raise UserError("steps", len(log), "were timed, which are too few; ask more questions")
    return best[1], best[2]


def _column(twin: Simulated, name: str) -> Floats:
    column = twin.steps[name].to_numpy(zero_copy_only=False)
    return np.nan_to_num(column.astype(np.float64))


def _seen_at(answer: Answer, twin: Simulated, ends: NDArray[np.int64]) -> Floats:
    """Return the time at which the client saw each step's tokens: the median of them; NaN for steps without tokens."""
    of_step, times = [], []
    _, tokens = twin.answer
    for id, seen in answer.tokens_ns.items():
        sampled = tokens.get(id)
        if sampled is not None and len(sampled) == len(seen):
            of_step.append(np.searchsorted(ends, sampled))
            times.append(seen)
    result = np.full(len(ends), np.nan)
    if of_step:
        at, when = np.concatenate(of_step), np.concatenate(times)
        order = np.lexsort((when, at))
        at, when = at[order], when[order]
        steps, first, count = np.unique(at, return_index=True, return_counts=True)
        result[steps] = when[first + (count - 1) // 2]
    return result


def _alike(sizes: dict[str, Floats], together: NDArray[np.bool_], first: int) -> int:
    """Return the last of at most `_TOGETHER` steps from `first` on that are decode steps of the same rows."""
    last = first
    while (
        last + 1 < len(together)
        and last - first + 1 < _TOGETHER
        and together[last + 1]
        and sizes["prefill_tokens"][first] == sizes["prefill_tokens"][last + 1] == 0
        and sizes["decode_rows"][first] == sizes["decode_rows"][last + 1]
    ):
        last += 1
    return last
