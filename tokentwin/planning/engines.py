"""What a fleet may be made of: a GPU, how many of them share the model, a policy; and what fits on none.

A deployment that names `gpu_memory_utilization` gets the KV blocks that each GPU has room for, as vLLM would; one that
does not keeps its own number everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from serving.config import Deployment
from serving.errors import UserError
from serving.gpu_spec import GpuSpec
from serving.kv_capacity import kv_capacity
from serving.model_catalogue import find_model

if TYPE_CHECKING:
    from serving.workload import Workload

_ROUND = 1024  # tokens to which the longest request is rounded up


@dataclass(frozen=True)
class Engine:
    """One replica of a candidate fleet: what it runs, on which GPUs (by the name the user gave), at what price."""

    gpu: str
    usd_per_gpu_hour: float
    deployment: Deployment

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.deployment.gpus

    @property
    def usd_per_hour(self) -> float:
        """Price of one replica."""
        return self.gpus * self.usd_per_gpu_hour

    @property
    def name(self) -> str:
        """Short, and unique among the candidates."""
        tp, pp, dp, policy = (getattr(self.deployment, field) for field in _NAMED)
        stages = f" PP{pp}" if pp > 1 else ""
        copies = f" DP{dp}" if dp > 1 else ""
        return f"TP{tp}{stages}{copies} {self.gpu}" + (f" {policy}" if policy != "vllm" else "")


_NAMED = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "policy")


class RuledOut(NamedTuple):
    """A candidate that cannot serve at all, and why."""

    name: str
    reason: str


def long_enough(deployment: Deployment, workload: Workload) -> Deployment:
    """`deployment` with room for the longest request, in steps of 1,024 tokens, as far as the model's positions go."""
    longest = max((request.prompt_len + request.output_len for request in workload.requests), default=1)
    fitting = min(-(-longest // _ROUND) * _ROUND, find_model(deployment.model).max_positions)
    scheduler = deployment.scheduler.model_copy(update={"max_model_len": fitting})
    return deployment.model_copy(update={"scheduler": scheduler})


def candidate_engines(
    base: Deployment,
    gpus: Mapping[str, GpuSpec],
    tensor_parallel_sizes: Sequence[int],
    policies: Sequence[str],
    prices: Mapping[str, float],
) -> tuple[list[Engine], list[RuledOut]]:
    """Every combination, in the order given, of GPUs by name, sizes and policies: those that fit, and the rest.

    `prices` are dollars per GPU-hour by name, instead of the catalogue's. Raises UserError for one of no candidate.
    """
    for name in prices:
        if name not in gpus:
            raise UserError("price", name, f"is none of the candidates {', '.join(gpus)}")
    fitting, ruled_out = [], []
    for (name, gpu), tp, policy in product(gpus.items(), tensor_parallel_sizes, policies):
        deployment = base.model_copy(update={"tensor_parallel_size": tp, "policy": policy})
        engine = Engine(name, prices.get(name, gpu.usd_per_hour), deployment)
        try:
            fitting.append(_with_kv(engine, gpu))
        except UserError as error:
            ruled_out.append(RuledOut(engine.name, str(error)))
    return fitting, ruled_out


def _with_kv(engine: Engine, gpu: GpuSpec) -> Engine:
    deployment = engine.deployment
    capacity = kv_capacity(find_model(deployment.model), gpu, deployment)
    if deployment.gpu_memory_utilization is None:
        return engine
    capacity.check(deployment)
    scheduler = deployment.scheduler.model_copy(update={"num_blocks": capacity.num_blocks})
    return Engine(engine.gpu, engine.usd_per_gpu_hour, deployment.model_copy(update={"scheduler": scheduler}))
