"""A model's module for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), as a model of one layer.

The module takes the target's last hidden states and the embeddings of the tokens after them, joins the two in one
projection, and goes through a layer like the target's last one. Embedding and head are the target's.
"""

from __future__ import annotations

from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError


def draft_module(model: ModelSpec) -> ModelSpec:
    """Return the module of `model`. Raises UserError if it has none.

    Editions in NVFP4 keep the module in 16 bits. A module of several layers drafts with the first again and again.
    """
    if not model.draft_layers:
        remedy = f"cannot draft for {model.name}, which has no layers for multi-token prediction; use another method"
        raise UserError("scheduler.speculative.method", "mtp", remedy)
    stored = model.checkpoint_quantization
    return model.model_copy(
        update={
            "name": f"{model.name} MTP",
            "num_layers": 1,
            "dense_at": (),
            "sliding_window": 0,
            "sliding_layers": 0,
            "sliding_at": (),
            "latent": model.latent and model.latent.of_layers(model.num_layers, model.num_layers + 1),
            "linear": None,
            "linear_layers": 0,
            "draft_layers": 0,
            "is_draft_module": True,
            "checkpoint_quantization": "none" if stored == "nvfp4" else stored,
            "checkpoint_kept": (),
        }
    )


def module_deployment(deployment: Deployment) -> Deployment:
    """Return the deployment of the module beside `deployment`: without drafts, and in 16 bits beside NVFP4."""
    alone = deployment.rescheduled(speculative=None)
    return alone.model_copy(update={"quantization": "none"}) if deployment.quantization == "nvfp4" else alone
