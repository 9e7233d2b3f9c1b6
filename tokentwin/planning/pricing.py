"""What times the steps of a candidate: kernel tables for any GPU and size, or a calibration of our own engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokentwin.planning.engines import Engine
from tokentwin.planning.trial import PricedSteps

if TYPE_CHECKING:
    from calibration.engine_calibration import EngineCalibration
    from calibration.operation_cost import OperationCost
    from calibration.step_cost import Calibration


@dataclass(frozen=True)
class KernelPricing:
    """Kernel tables of each GPU, corrected by what an engine taught, or by what is bundled."""

    learnt: EngineCalibration | None = None
    _known: dict[tuple[str, str], OperationCost] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, engine: Engine) -> PricedSteps:
        from calibration.predict import predicted_cost

        key = engine.gpu, engine.deployment.model_dump_json()
        if key not in self._known:
            self._known[key] = predicted_cost(engine.gpu, engine.deployment, self.learnt)
        return self._known[key].unasked()


@dataclass(frozen=True)
class MeasuredPricing:
    """Our own engine where it was calibrated; only policies and limits may differ between candidates."""

    measured: Calibration

    def __call__(self, engine: Engine) -> PricedSteps:
        from calibration.step_cost import StepCost

        return StepCost(self.measured)
