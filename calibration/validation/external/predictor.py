"""The seam between rung 4 and whatever prices a step: a case, a GPU and a deployment in, a cost model out."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from calibration.steps.observed import JudgedCost
from calibration.validation.external.case import Case
from serving.deployments.config import Deployment


class Prediction(NamedTuple):
    """A new cost model, and the KV blocks that the engine would have where a case does not state them.

    client_ms   what a client adds to TTFT at most, 9 times out of 10
    """

    cost: JudgedCost
    num_blocks: int
    client_ms: float = 0.0


class Predictor(Protocol):
    """Prices steps of engines that were never measured here."""

    def __call__(self, case: Case, gpu: str, deployment: Deployment) -> Prediction:
        """`case` is for leaving out what its own runs taught. Raises UserError for an unknown GPU or model."""
        ...
