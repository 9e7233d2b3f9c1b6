"""Which drafter a deployment asks for, and whether the engine can run it."""

from __future__ import annotations

from realengine.drafting.draft_model import ModelDrafter
from realengine.drafting.drafter import Drafter
from realengine.drafting.ngram import NgramDrafter
from realengine.weights import ModelFiles
from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec, check_vocabulary
from serving.errors import UserError
from serving.speculative import SpeculativeConfig


def check_drafts(speculative: SpeculativeConfig) -> None:
    """Raise UserError for drafts that the engine cannot make."""
    if speculative.method in ("eagle", "mtp"):
        remedy = "works only in the simulator; the real engine drafts with ngram and draft_model"
        raise UserError("scheduler.speculative.method", speculative.method, remedy)


def find_drafter(deployment: Deployment, target: ModelSpec, draft: ModelFiles | None) -> Drafter | None:
    """None where nothing is drafted. A draft model's weights are in `draft`.

    Raises UserError for a model that cannot draft for the target.
    """
    speculative = deployment.scheduler.speculative
    if speculative is None:
        return None
    if speculative.method == "ngram":
        return NgramDrafter(speculative)
    if draft is None:
        raise ValueError("method draft_model needs the files of the draft model")
    check_vocabulary(target, draft.spec)
    return ModelDrafter(deployment, draft)
