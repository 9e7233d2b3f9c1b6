"""Servers whose settings and step times a learner does not know, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tokentwin.calibration.steps.correction import COMPUTE
from tokentwin.calibration.steps.external_calibration import blind, kernels
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.planning.learn.answers import Answer, simulated
from tokentwin.planning.learn.questions import Question
from tokentwin.planning.learn.twin import ROUTERS, Setting
from tokentwin.serving.cost_model import CostModel, decode_plans
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.step_plan import StepPlan

_MODELS = (("meta-llama/Llama-3.1-8B-Instruct", 1), ("Qwen/Qwen3-32B", 2), ("meta-llama/Llama-3.1-70B-Instruct", 4))
_GPUS = ("H100", "H200", "A100-80G")
# TensorRT-LLM refuses prompts with more tokens than a step
_BUDGETS = {
    "vllm": (1024, 2048, 4096, 8192, 16_384),
    "sglang": (1024, 2048, 4096, 8192, 16_384),
    "trtllm": (8192, 16_384),
}
_KERNELS = ("weights", "decode attention", "prompt attention", "past attention", "elementwise", "collectives")


class Noisy:
    """A cost model whose steps take random factors longer or shorter than those of `cost`."""

    def __init__(self, cost: CostModel, seed: int, sigma: float) -> None:
        self._cost, self._sigma, self._random = cost, sigma, random.Random(seed)

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._cost.cpu_ns(plan)

    def step_ns(self, plan: StepPlan) -> int:
        return round(self._cost.step_ns(plan) * self._random.lognormvariate(0.0, self._sigma))

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [self.cpu_ns(plan) + self.step_ns(plan) for plan in decode_plans(rows, context, squares, steps)]


@dataclass(frozen=True)
class HiddenServer:
    """A server on the virtual clock, behind an API server with the times of `front_door`."""

    gpu: str
    deployment: Deployment
    cost: OperationCost
    front_door: FrontDoor
    seed: int
    sigma: float = 0.01

    def ask(self, question: Question) -> Answer:
        """Serve the question's workload, as its client would see it."""
        noisy = Noisy(self.cost, self.seed + sum(map(ord, question.name)), self.sigma)
        said = simulated(question.workload, self.deployment, noisy, self.front_door)
        refused = len(list(question.workload.requests)) - len(said.tokens_ns)
        return Answer(question, {id: said.sent_ns[id] for id in said.tokens_ns}, said.tokens_ns, refused)

    def stated(self) -> Deployment:
        """Return what a learner is given: model, precision and parallelism."""
        model_len = self.deployment.scheduler.max_model_len
        settings = {"model": self.deployment.model, "tensor_parallel_size": self.deployment.tensor_parallel_size}
        return Deployment.model_validate({**settings, "dtype": "bfloat16", "scheduler": {"max_model_len": model_len}})


def hidden_server(seed: int) -> HiddenServer:
    """Draw the server with this seed."""
    draw = random.Random(seed)
    gpu = draw.choice(_GPUS)
    model, tp = draw.choice(_MODELS if gpu != "A100-80G" else _MODELS[:1])
    policy = draw.choice(("vllm", "vllm", "sglang", "trtllm"))
    scheduler = {
        "max_num_batched_tokens": draw.choice(_BUDGETS[policy]),
        "max_num_seqs": draw.choice((48, 64, 128, 200, 256)),
        "async_scheduling": draw.random() < 0.5,
        "enable_prefix_caching": draw.random() < 0.7,
        "max_model_len": 16384,
    }
    stated = {"model": model, "tensor_parallel_size": tp, "dtype": "bfloat16", "policy": policy, "scheduler": scheduler}
    deployment, _ = with_engine_defaults(Deployment.model_validate(stated), find_gpu(gpu))
    known = blind(gpu, deployment)
    factors = dict(known.correction.factors)
    for name in _KERNELS:
        factors[name] *= draw.lognormvariate(0.0, 0.15)
    clock = draw.lognormvariate(0.0, 0.15)
    factors |= {name: clock * factors[name] for name in COMPUTE}
    correction = replace(known.correction, factors=factors)
    capacity = kv_capacity(
        find_model(model), find_gpu(gpu), deployment.model_copy(update={"gpu_memory_utilization": 0.9})
    )
    blocks = round(capacity.num_blocks * draw.uniform(0.15, 1.0))
    block_size, replicas, router = draw.choice((16, 16, 32, 64)), draw.choice((1, 1, 1, 2, 3)), draw.choice(ROUTERS)
    scheduled = deployment.rescheduled(
        num_blocks=blocks * deployment.scheduler.block_size // block_size, block_size=block_size
    )
    deployment = Setting.of(scheduled)._replace(replicas=replicas, router=router).applied(scheduled)
    host = known.host.scaled(draw.lognormvariate(0.0, 0.3))
    cost = OperationCost(find_model(model), deployment, kernels(gpu), correction, host)
    front_door = FrontDoor(
        client_ns=draw.uniform(1e6, 12e6),
        request_ns=draw.uniform(0, 5e5),
        outputs_ns=draw.uniform(0, 2e6),
        chunk_ns=draw.uniform(0, 4e4),
        own_processes=True,
    )
    return HiddenServer(gpu, deployment, cost, front_door, seed)


def seconds(answers: Iterable[Answer]) -> float:
    """Return the server time of all answers."""
    return sum(max(int(np.max(times)) for times in answer.tokens_ns.values()) for answer in answers) / 1e9
