"""What a server may be: its settings and the times of its steps, and how well they explain its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.operations import StepSizes
from calibration.steps.correction import Correction
from calibration.steps.external_calibration import kernels
from calibration.steps.launches import UNKNOWN, LaunchCost
from calibration.steps.operation_cost import HostTimes, OperationCost
from planning.learn.answers import Answer, Simulated, simulated
from planning.learn.step_fit import aligned_steps, fitted_steps, joined
from serving.deployments.config import Deployment
from serving.deployments.model_catalogue import find_model

POLICIES = ("vllm", "sglang", "trtllm")
_SPREAD = 0.03  # standard deviation of the logarithm of a time that a right twin may be off by
_FREEDOM = 3.0  # degrees of freedom of Student's t, so that single outliers decide nothing
_COUNTED = 6  # maximum number of independent requests in a question: requests of one question share their error


class Setting(NamedTuple):
    """The settings of a server that its answers can reveal. The fields are those of `Deployment` and its scheduler."""

    policy: str
    max_num_batched_tokens: int
    async_scheduling: bool
    max_num_seqs: int
    num_blocks: int
    enable_prefix_caching: bool

    def applied(self, base: Deployment) -> Deployment:
        """Return `base` with these settings."""
        scheduler = {name: value for name, value in self._asdict().items() if name != "policy"}
        scheduler["max_num_seqs"] = min(self.max_num_seqs, self.max_num_batched_tokens)
        changed = base.rescheduled(**scheduler).model_copy(update={"gpu_memory_utilization": None})
        return changed if base.engine else changed.model_copy(update={"policy": self.policy})


@dataclass(frozen=True)
class Twin:
    """A setting with step times: `correction` of the GPU's kernels, and `request_ns` that a request takes outside."""

    base: Deployment
    gpu: str
    setting: Setting
    correction: Correction
    launches: LaunchCost = UNKNOWN
    request_ns: float = 0.0

    @property
    def deployment(self) -> Deployment:
        return self.setting.applied(self.base)

    def cost(self) -> OperationCost:
        deployment = self.deployment
        host = HostTimes(launches=self.launches)
        return OperationCost(find_model(deployment.model), deployment, kernels(self.gpu), self.correction, host)

    def step_ns(self, sizes: StepSizes) -> NDArray[np.float64]:
        """Return the duration of each step in `sizes`."""
        return np.asarray(sum(self.cost().parts(sizes).values()))

    def having(self, **settings: Any) -> Twin:
        """Return the twin with other settings."""
        return replace(self, setting=self.setting._replace(**settings))

    def answers(self, asked: Iterable[Answer]) -> list[Simulated]:
        """Simulate the questions of `asked`."""
        deployment, cost = self.deployment, self.cost()
        return [simulated(answer.as_sent, deployment, cost) for answer in asked]

    def fitted(self, asked: Sequence[Answer], prior: Twin, fit_launches: bool = True) -> Twin:
        """Return the twin with step times fitted to all answers, close to those of `prior`.

        The cost of a launch is fitted, too, or stays that of `prior`.
        """
        log = joined([aligned_steps(answer, said) for answer, said in zip(asked, self.answers(asked), strict=True)])
        correction, launches = fitted_steps(log, replace(prior, setting=self.setting).cost(), fit_launches)
        fitted = replace(self, correction=correction, launches=launches)
        return replace(fitted, request_ns=fitted.outside_ns(asked))

    def outside_ns(self, asked: Sequence[Answer]) -> float:
        """Return the time that lone requests take outside the engine: the median of what the simulation lacks."""
        late = []
        lone = [answer for answer in asked if answer.question.workload.concurrency == 1]
        for answer, said in zip(lone, self.answers(lone), strict=True):
            arrived, tokens = said.answer
            late += [
                (seen[0] - answer.sent_ns[id]) - (tokens[id][0] - arrived[id])
                for id, seen in answer.tokens_ns.items()
                if id in tokens
            ]
        return max(float(np.median(late)), 0.0) if late else 0.0

    def likelihood(self, asked: Sequence[Answer]) -> float:
        """Return the log likelihood of the answers."""
        said = self.answers(asked)
        return sum(_likelihood(answer, twin, self.request_ns) for answer, twin in zip(asked, said, strict=True))


def _likelihood(answer: Answer, said: Simulated, request_ns: float) -> float:
    """Return the log likelihood of an answer, from the TTFT, the E2E latency and the longest gap of each request."""
    arrived, tokens = said.answer
    pairs: list[list[tuple[float, float]]] = [[], [], []]
    for id, seen in answer.tokens_ns.items():
        if id not in tokens or len(tokens[id]) != len(seen):
            continue
        mine, sent, came = tokens[id], answer.sent_ns[id], arrived[id] - request_ns
        pairs[0].append((seen[0] - sent, mine[0] - came))
        if len(seen) > 1:
            pairs[1].append((seen[-1] - sent, mine[-1] - came))
        if len(seen) > 2:
            pairs[2].append((np.diff(seen).max(), np.diff(mine).max()))
    total = 0.0
    for values in pairs:
        if values:
            off = np.log(np.maximum(np.array(values), 1.0))
            error = (off[:, 0] - off[:, 1]) / _SPREAD
            density = -(_FREEDOM + 1) / 2 * np.log1p(error**2 / _FREEDOM)
            total += float(density.mean()) * min(len(values), _COUNTED)
    return total
