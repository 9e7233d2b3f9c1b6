"""The explanation of a step's time: every operation with its roofline, and the corrected parts of the sum.

`token_life` lists the tensors that a step's tokens pass through: ids, embeddings, layers, logits and sampled ids. Each
stage is a tensor on one device, with its shape and bytes without padding. Activations have the deployment's `dtype`,
ids are int64, and sampling is in float32, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.context_parallel import share_of_step
from tokentwin.calibration.operations import Operation, StepSizes, bound_by, floor_ns
from tokentwin.calibration.step_operations import heads_per_device, step_operations
from tokentwin.calibration.steps.correction import PROMPT_PARTS, never_slower, parts_of
from tokentwin.calibration.steps.interval import REACH, Factors, widened
from tokentwin.calibration.steps.launches import outside_graphs
from tokentwin.calibration.steps.operation_cost import WAITING, OperationCost
from tokentwin.calibration.steps.step_trust import stacked, step_trust
from tokentwin.calibration.trust import Trust, TrustLevel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engines import captured_tokens
from tokentwin.serving.deployments.kv_layout import kv_dtype
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES


@dataclass(frozen=True)
class ExplainedOperation:
    """One kind of kernel in the step; times and amounts are sums over all its occurrences on one device.

    Attributes:
        utilisation: ratio of roofline time to expected time; 1 is the limit of the device
        bound: what limits it: `compute`, `memory`, `link` or, between nodes, `network`
    """

    name: str
    count: int
    flops: float
    bytes: float
    ns: float
    utilisation: float
    bound: str
    sigma: float
    level: TrustLevel

    @property
    def trust(self) -> Trust:
        """The trust in the operation's time."""
        return Trust(self.level.word, f"{self.name} {self.level.clause}")


class ExplainedStage(NamedTuple):
    """One pipeline stage's corrected time in the step."""

    layers: int
    ns: float


@dataclass(frozen=True)
class Explanation:
    """An explained step.

    Attributes:
        operations: every kind of kernel, with the time of the kernel alone
        kernels_ns: sum of these times by part of the step
        parts_ns: time of each part within a step of the engine, corrected by a fit to whole steps; the sum is `step_ns`
        stages: pipeline stages in order; empty without pipeline parallelism; with the transfers between them their sum
            is `step_ns`
        host_ns: CPU time before the step, which an overlapped loop hides
        beyond: half-width of the 90 % interval of the log time that comes from extrapolated kernels alone, if they all
            err in the same direction
        interval: factors of `step_ns` between which 90 % of runs lie
        level, why: trust level of the step, and the name of the part that limits it
        untaught: sentence about what no measured run covers; empty if there is nothing
        launches: number of kernels that the host launches outside of CUDA graphs
        launch_ns: host time of one launch
    """

    operations: list[ExplainedOperation]
    kernels_ns: dict[str, float]
    parts_ns: dict[str, float]
    stages: list[ExplainedStage]
    step_ns: float
    host_ns: float
    beyond: float
    interval: Factors
    level: TrustLevel
    why: str
    launches: int
    launch_ns: float
    launch_source: str
    untaught: str = ""


def explained(
    cost: OperationCost, operation: Operation, name: str, there: NDArray[np.bool_], weight: float = 1.0
) -> ExplainedOperation:
    """Return the sum of an operation over the steps for which `there` is True, multiplied by `weight`."""
    gpu, estimate, times = cost.kernels.gpu, never_slower(operation, cost.kernels), weight * operation.count

    def total(amount: Any) -> float:
        return times * float(np.sum(np.where(there, amount, 0.0)))

    ns, flops, moved = total(estimate.ns), total(operation.flops), total(operation.bytes)
    return ExplainedOperation(
        name=name,
        count=round(total(1.0)),
        flops=flops,
        bytes=moved,
        ns=ns,
        utilisation=total(floor_ns(gpu, operation)) / ns,
        bound=bound_by(gpu, operation, flops, moved),
        sigma=total(np.asarray(estimate.sigma) * estimate.ns) / ns,
        level=TrustLevel(int(np.max(np.where(there, estimate.level, 0)))),
    )


def explain(cost: OperationCost, sizes: StepSizes) -> Explanation:
    """Explain the step of `sizes` (plain numbers, not arrays)."""
    alike = stacked([sizes])
    all_operations = cost.operations(alike)
    priced = [operation for operation in all_operations if operation.size[0] > 0]
    operations = [explained(cost, operation, operation.name, np.ones(1, dtype=np.bool_)) for operation in priced]
    parts = {name: float(ns[0]) for name, ns in cost.parts(alike).items() if ns[0] > 0}
    step_ns = sum(parts.values())
    known = step_trust(cost, alike)
    beyond, worst = float(known.beyond[0]), int(known.worst[0])
    captured = captured_tokens(cost.deployment, cost.kernels.gpu)
    launching = REACH * cost.host.launches.sigma if WAITING in parts and cost.deployment.enforce_eager else 0.0
    of_prompts = sum(ns for name, ns in parts.items() if name in PROMPT_PARTS)
    rows = int(sizes.decode_rows + sizes.prefill_rows)
    return Explanation(
        operations=operations,
        kernels_ns=_kernels_ns(cost, all_operations, alike),
        parts_ns=parts,
        stages=[
            ExplainedStage(stage.model.num_layers, float(sum(ns[0] for ns in stage.parts(alike).values())))
            for stage in cost.stages
        ],
        step_ns=step_ns,
        host_ns=cost.host.step_ns + cost.host.row_ns * rows,
        beyond=beyond,
        interval=widened(
            cost.known_interval.of_step(of_prompts / step_ns if step_ns else 0.0), hypot(beyond, launching)
        ),
        level=TrustLevel(int(known.kernels[0])),
        why=known.names[worst] if worst >= 0 else "",
        launches=int(outside_graphs(cost.model, cost.deployment, sizes, captured)),
        launch_ns=cost.host.launch_ns,
        launch_source=cost.host.launches.source,
        untaught=cost.untaught,
    )


def _kernels_ns(cost: OperationCost, operations: list[Operation], sizes: StepSizes) -> dict[str, float]:
    """Sum the kernel times of `operations` by part, without a correction; drafting operations are the last ones."""
    count = len(step_operations(cost.model, cost.deployment, sizes))
    kernels: dict[str, float] = {}
    for name, ns in parts_of(operations[:count], cost.kernels, {}):
        kernels[name] = kernels.get(name, 0.0) + float(ns[0])
    drafting = sum(float(ns[0]) for _, ns in parts_of(operations[count:], cost.kernels, {}))
    return {name: ns for name, ns in {**kernels, "drafting": drafting}.items() if ns > 0}


_ID_BYTES, _FLOAT_BYTES = 8, 4


class Stage(NamedTuple):
    """A tensor that tokens pass through: it occurs `times` times in a step and has `bytes` bytes in all occurrences."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    times: int
    bytes: int


def token_life(model: ModelSpec, deployment: Deployment, sizes: StepSizes) -> list[Stage]:
    """Return the tensors of the step of `sizes` (plain numbers) in the order in which its tokens pass them.

    The attention of layers with a constant state instead of KV is left out.
    """
    tokens, sampled = int(share_of_step(deployment, sizes).tokens), int(sizes.sampled_rows)
    kept_tokens = int(sizes.tokens) // deployment.decode_context_parallel_size
    tp, dtype, cached = deployment.tensor_parallel_size, deployment.dtype, kv_dtype(deployment)
    heads, kv_heads = heads_per_device(model, tp)
    hidden, layers, vocabulary = model.hidden_size, model.num_layers, -(-model.vocab_size // tp)
    values = model.latent.v_head_dim if model.latent is not None else model.head_dim

    def stage(name: str, *shape: int, stored_as: str = dtype, times: int = 1) -> Stage:
        width = {"int64": _ID_BYTES, "float32": _FLOAT_BYTES}.get(stored_as) or DTYPE_BYTES[stored_as]
        return Stage(name, shape, stored_as, times, int(times * prod(shape) * width))

    kept = (
        stage("latent vectors, kept as KV", kept_tokens, model.latent.kv_dim, stored_as=cached, times=model.kv_layers)
        if model.latent is not None
        else stage(
            "keys and values, kept as KV",
            2,
            kept_tokens,
            kv_heads,
            model.head_dim,
            stored_as=cached,
            times=model.kv_layers,
        )
    )
    stages = [
        stage("token ids", tokens, stored_as="int64"),
        stage("embeddings", tokens, hidden),
        stage("layer: queries", tokens, heads, model.head_dim, times=model.kv_layers),
        kept._replace(name=f"layer: {kept.name}"),
        stage("layer: attention", tokens, heads, values, times=model.kv_layers),
    ]
    if dense := layers - model.moe_layers:
        stages.append(stage("layer: gate and up", tokens, 2, -(-model.intermediate_size // tp), times=dense))
    if model.moe_layers:
        inter = model.moe_intermediate_size
        groups = deployment.expert_gpus // tp  # they step together and share their experts
        inter = inter if deployment.enable_expert_parallel else -(-inter // deployment.expert_gpus)
        routed = tokens * groups * model.experts_per_token // deployment.expert_parallel_size
        stages += [
            stage("layer: scores of experts", tokens, model.num_experts, times=model.moe_layers),
            stage("layer: experts' gate and up", routed, 2, inter, times=model.moe_layers),
        ]
    return [
        *stages,
        stage("layer: hidden states", tokens, hidden, times=layers),
        stage("last hidden states", sampled, hidden),
        stage("logits", sampled, vocabulary),
        stage("probabilities", sampled, model.vocab_size, stored_as="float32"),
        stage("sampled ids", sampled, stored_as="int64"),
    ]
