"""The anchored column: two factors and a constant, fitted on one named run that is then not scored.

One factor multiplies decode steps, the other the time that prompts add to a step; a constant outside the engine is
added to each request. Each reproduces one figure of the anchor run, by repeated simulation of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from calibration.validation.external.case import Anchor
from serving.cost_model import CostModel
from serving.errors import UserError
from serving.step_plan import StepPlan

_ROUNDS = 12
_CLOSE = 1e-4  # relative difference at which the anchor's figures count as reproduced


@dataclass(frozen=True)
class Correction:
    """Two factors, `decode` and `prefill`, and `overhead_ms`, milliseconds on each request's TTFT and E2E."""

    decode: float = 1.0
    prefill: float = 1.0
    overhead_ms: float = 0.0


class Corrected:
    """A cost model with its decode steps scaled by one factor and the time that prompts add by another.

    Factors are of the CPU time and the step together; the CPU keeps its share, scaled as decode steps are.
    """

    def __init__(self, cost: CostModel, correction: Correction) -> None:
        self._cost = cost
        self._decode = correction.decode
        self._prefill = correction.prefill

    def cpu_ns(self, plan: StepPlan) -> int:
        return round(self._decode * self._cost.cpu_ns(plan))

    def step_ns(self, plan: StepPlan) -> int:
        whole = self._cost.cpu_ns(plan) + self._cost.step_ns(plan)
        decode = 0
        if plan.decode_rows:
            (decode,) = self._cost.decode_run_ns(plan.decode_rows, plan.decode_context, plan.decode_squares, 1)
        prompts = whole - decode if plan.prefill_rows else 0
        return max(round(self._decode * decode) + round(self._prefill * prompts) - self.cpu_ns(plan), 0)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [round(self._decode * ns) for ns in self._cost.decode_run_ns(rows, context, squares, steps)]


def fit_correction(
    anchor: Anchor, measured: Mapping[str, float], simulate: Callable[[Correction], Mapping[str, float]]
) -> Correction:
    """Return the correction with which `simulate` reproduces the anchor run's figures that `anchor` names.

    Factors and the constant are adjusted in turn, each by the error of its own figure. Latencies of an unloaded run are
    nearly proportional to them, so this converges in a few rounds. Raises UserError for a figure that the anchor run
    does not have.
    """
    fitted = {name: figure for name in ("decode", "prefill", "overhead") if (figure := getattr(anchor, name))}
    for name, figure in fitted.items():
        if figure not in measured:
            remedy = f"is not a figure of {anchor.run}; choose one of {', '.join(measured)}"
            raise UserError(f"anchor.{name}", figure, remedy)
    correction = Correction()
    for _ in range(_ROUNDS):
        simulated = simulate(correction)
        off = {name: measured[figure] / simulated[figure] for name, figure in fitted.items()}
        if all(abs(ratio - 1) < _CLOSE for ratio in off.values()):
            break
        if "decode" in off:
            correction = replace(correction, decode=correction.decode * off["decode"])
        if "prefill" in off:
            correction = replace(correction, prefill=correction.prefill * off["prefill"])
        if "overhead" in off:
            short_ms = measured[fitted["overhead"]] - simulated[fitted["overhead"]]
            correction = replace(correction, overhead_ms=max(correction.overhead_ms + short_ms, 0.0))
    return correction
