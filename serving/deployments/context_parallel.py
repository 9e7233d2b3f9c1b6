"""Which models can share the tokens of prompts (prefill) or of KV blocks (decode): context parallelism.

The rules for KV blocks are those of vLLM 0.32 (`ModelConfig.verify_with_parallel_config`). vLLM itself shares prompts
only of models with latent attention, vLLM-Ascend and SGLang also of others.
"""

from __future__ import annotations

from tokentwin.serving.deployments.attention import CompressedAttention
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError


def devices_with_same_kv(model: ModelSpec, tp: int) -> int:
    """Return the number of `tp` tensor-parallel devices that hold the same KV, and could share it instead.

    It is 1 for models whose KV cannot be shared.
    """
    if _other_than_full(model) or (model.latent is not None and model.latent.index_topk):
        return 1
    if model.latent is not None:
        return tp
    copies = max(tp // model.num_kv_heads, 1)
    return copies if (model.num_heads // model.num_kv_heads) % copies == 0 else 1


def check_context(model: ModelSpec, deployment: Deployment) -> None:
    """Raise UserError if devices cannot share prompts or KV blocks of `model` as `deployment` states."""
    pcp, dcp = deployment.prefill_context_parallel_size, deployment.decode_context_parallel_size
    for name, size in (("prefill_context_parallel_size", pcp), ("decode_context_parallel_size", dcp)):
        if size > 1 and (lack := _other_than_full(model)):
            raise UserError(name, size, f"is simulated only for attention to all tokens; {model.name} has {lack}")
    if dcp == 1:
        return
    if model.latent is not None and model.latent.index_topk:
        remedy = f"is not simulated for the indexer of {model.name}, whose keys every device keeps; leave it out"
        raise UserError("decode_context_parallel_size", dcp, remedy)
    same = devices_with_same_kv(model, tp := deployment.tensor_parallel_size)
    if same % dcp:
        remedy = f"must divide {same}, the number of the {tp} tensor-parallel devices that hold the same KV"
        raise UserError("decode_context_parallel_size", dcp, remedy)


def _other_than_full(model: ModelSpec) -> str:
    """Return the kind of attention of `model` that sees less than all tokens before it, or more; empty for none."""
    kinds = {
        "a sliding window": model.sliding_layers > 0,
        "constant states": model.linear is not None,
        "compressed attention": isinstance(model.latent, CompressedAttention),
        "an encoder": model.bidirectional,
    }
    return next((kind for kind, given in kinds.items() if given), "")
