"""Which drafter a deployment asks for, and whether the engine can run it."""

from __future__ import annotations

from realengine.drafting.drafter import Drafter
from realengine.drafting.ngram import NgramDrafter
from serving.deployments.config import Deployment, SchedulerConfig
from serving.errors import UserError
from serving.speculative import SpeculativeConfig


def check_drafts(deployment: Deployment, speculative: SpeculativeConfig) -> None:
    """Raise UserError for drafts that the engine cannot make or verify."""
    if speculative.method != "ngram":
        remedy = "works only in the simulator; the real engine drafts with ngram"
        raise UserError("scheduler.speculative.method", speculative.method, remedy)
    if deployment.scheduler.async_scheduling:  # the next step would be planned before its drafts are known
        remedy = "cannot be combined with scheduler.speculative on the real engine; set it to false"
        raise UserError("scheduler.async_scheduling", True, remedy)


def find_drafter(config: SchedulerConfig) -> Drafter | None:
    """None where nothing is drafted."""
    return None if config.speculative is None else NgramDrafter(config.speculative)
