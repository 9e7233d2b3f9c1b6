"""The seam between rung 4 and whatever prices a step: a case, a GPU and a deployment in, a cost model out."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from calibration.external.case import Case
from calibration.kernel_times import Mark
from serving.config import Deployment
from serving.cost_model import CostModel


class StandingCost(CostModel, Protocol):
    """A cost model that knows how sure it is."""

    @property
    def interval(self) -> tuple[float, float]:
        """Factors of the predicted time between which 9 of 10 runs lie, one factor for all steps of a run."""
        ...

    def standing(self) -> tuple[Mark, str]:
        """How far to trust what it was asked so far, and why."""
        ...


class Prediction(NamedTuple):
    """A cost model, and the KV blocks that the engine would have where a case does not state them."""

    cost: StandingCost
    num_blocks: int


class Predictor(Protocol):
    """Prices steps of engines that were never measured here."""

    def __call__(self, case: Case, gpu: str, deployment: Deployment) -> Prediction:
        """`case` is for leaving out what its own runs taught. Raises UserError for an unknown GPU or model."""
        ...
