"""Small servers on the virtual clock for tests of learning: quick to ask, and known in every detail."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.planning.learn.answers import Answer, simulated
from tokentwin.planning.learn.questions import Question
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.front_door import FrontDoor

GPU = "H100"
MODEL = "Llama-3.1-8B"


def told(**scheduler: Any) -> Deployment:
    """Return the deployment as a user states it."""
    settings = {"max_model_len": 8192} | scheduler
    return Deployment.model_validate({"model": MODEL, "device": "cuda", "dtype": "bfloat16", "scheduler": settings})


@dataclass
class SmallServer:
    """A server of `deployment` that counts the questions in `asked`.

    Its steps take `factor` times as long as predicted for the GPU, or as long as `cost` says.
    """

    deployment: Deployment
    front_door: FrontDoor = field(default_factory=lambda: FrontDoor(client_ns=3e6))
    factor: float = 1.0
    cost: CostModel | None = None
    asked: list[str] = field(default_factory=list)

    def ask(self, question: Question) -> Answer:
        self.asked.append(question.name)
        cost = self.cost or predicted_cost(GPU, self.deployment).scaled(self.factor, self.factor, self.factor)
        said = simulated(question.workload, self.deployment, cost, self.front_door)
        return Answer(question, said.sent_ns, said.tokens_ns)


def server(policy: str = "vllm", factor: float = 1.0, **scheduler: Any) -> SmallServer:
    """Return a server with these settings."""
    settings = {
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 24,
        "num_blocks": 3000,
        "async_scheduling": False,
    } | scheduler
    stated = {"model": MODEL, "device": "cuda", "dtype": "bfloat16", "policy": policy, "scheduler": settings}
    return SmallServer(Deployment.model_validate(stated), factor=factor)


def changed(answer: Answer, how: Any) -> Answer:
    """Return the answer with the token times of each request replaced by `how(id, times)`."""
    tokens = {id: np.asarray(how(id, times), dtype=np.int64) for id, times in answer.tokens_ns.items()}
    return replace(answer, tokens_ns=tokens)
