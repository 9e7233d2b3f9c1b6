"""The seam between rung 4 and whatever prices a step: a case, a GPU and a deployment in, a cost model out."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from calibration.external.case import Case
from calibration.kernel_times import Mark
from serving.config import Deployment
from serving.cost_model import CostModel


class StandingCost(CostModel, Protocol):
    """A cost model that knows how sure it is."""

    def ends(self) -> tuple[CostModel, CostModel]:
        """The same at the fast and the slow end of its 90 % interval, for steps like those that it was asked so far."""
        ...

    def standing(self) -> tuple[Mark, str]:
        """How far to trust what it was asked so far, and why."""
        ...


class Prediction(NamedTuple):
    """A cost model, asked nothing yet, and the KV blocks that the engine would have where a case does not state them.

    client_ms   what a client adds to TTFT at most, 9 times out of 10
    """

    cost: StandingCost
    num_blocks: int
    client_ms: float = 0.0


class Predictor(Protocol):
    """Prices steps of engines that were never measured here."""

    def __call__(self, case: Case, gpu: str, deployment: Deployment) -> Prediction:
        """`case` is for leaving out what its own runs taught. Raises UserError for an unknown GPU or model."""
        ...
