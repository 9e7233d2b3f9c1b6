"""The part of a `Deployment` that the real engine can do: a setting is never ignored in silence."""

from __future__ import annotations

from realengine.loading import QUANTIZATIONS
from realengine.shard import shard_spec
from realengine.weights import ModelFiles
from serving.deployments.config import Deployment
from serving.deployments.kv_groups import kv_groups, stating_kv_groups
from serving.errors import UserError

_SIMULATED = (
    "pipeline_parallel_size", "data_parallel_size", "all2all_backend", "expert_imbalance", "inter_node", "fusion",
    "engine",
)  # fmt: skip


def check_deployment(deployment: Deployment, files: ModelFiles) -> Deployment:
    """Return `deployment` with the block tables of the model in `files`.

    Raises UserError, naming the first setting that the engine cannot do for that model.
    """
    scheduler = deployment.scheduler
    for name in _SIMULATED:
        if getattr(deployment, name) != Deployment.model_fields[name].default:
            remedy = "works only in the simulator; leave it out for the real engine"
            raise UserError(name, getattr(deployment, name), remedy)
    if deployment.kv_tiers is not None and len(tiers := deployment.kv_tiers.tiers) > 1:
        remedy = "real engines have one tier, the host's memory; leave the others out"
        raise UserError("kv_tiers.tiers", ", ".join(tier.name for tier in tiers), remedy)
    if deployment.fleet is not None:
        replicas = sum(pool.replicas for pool in deployment.fleet.pools)
        raise UserError("fleet", replicas, "is several engines, and this runs one; leave it out, or run bench")
    if scheduler.speculative is not None and scheduler.speculative.method in ("eagle", "mtp"):
        remedy = "works only in the simulator; the real engine drafts with ngram and draft_model"
        raise UserError("scheduler.speculative.method", scheduler.speculative.method, remedy)
    if deployment.quantization not in QUANTIZATIONS:
        remedy = f"works only in the simulator; the real engine runs {', '.join(QUANTIZATIONS)}"
        raise UserError("quantization", deployment.quantization, remedy)
    if deployment.quantization not in ("none", stored := files.spec.checkpoint_quantization) and stored != "none":
        remedy = f"cannot be made of {files.spec.name}, which is stored in {stored}; leave it out"
        raise UserError("quantization", deployment.quantization, remedy)
    if deployment.enable_expert_parallel and not files.spec.num_experts:
        raise UserError("enable_expert_parallel", True, f"needs a mixture; {files.spec.name} is dense; leave it out")
    shard_spec(files.spec, deployment.tensor_parallel_size, deployment.enable_expert_parallel)
    if scheduler.policy == "priority" and scheduler.enable_prefix_caching and not scheduler.forget_withdrawn:
        remedy = "could reuse blocks that were never computed under policy priority, as vLLM does; set it to true"
        raise UserError("scheduler.forget_withdrawn", False, remedy)
    if scheduler.max_model_len > files.spec.max_positions:
        remedy = f"must be at most {files.spec.max_positions}, the positions of {files.spec.name}"
        raise UserError("scheduler.max_model_len", scheduler.max_model_len, remedy)
    return stating_kv_groups(deployment, kv_groups(files.spec, deployment))
