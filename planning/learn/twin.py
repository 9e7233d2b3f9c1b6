"""What a server may be: its settings and the times of its steps, and how well they explain its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.operations import StepSizes
from planning.learn.answers import Answer, Simulated, Times, simulated
from planning.learn.seen_steps import joined, seen_steps
from planning.learn.step_times import StepTimes
from serving.deployments.config import Deployment
from serving.front_door import FrontDoor

POLICIES = ("vllm", "sglang", "trtllm")
_SPREAD = 0.03  # standard deviation of the logarithm of a time that a right twin may be off by
_FREEDOM = 3.0  # degrees of freedom of Student's t, so that single outliers decide nothing
_COUNTED = 6  # maximum number of independent requests in a question: requests of one question share their error


_FIRST_DOOR = FrontDoor(client_ns=1e6)  # before it is fitted


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
    """A setting with step times, and the times of the API server in front of the engine.

    Attributes:
        base: the deployment as far as the user states it
    """

    base: Deployment
    setting: Setting
    times: StepTimes
    front_door: FrontDoor = _FIRST_DOOR

    @property
    def deployment(self) -> Deployment:
        return self.setting.applied(self.base)

    def step_ns(self, sizes: StepSizes) -> NDArray[np.float64]:
        """Return the duration of each step in `sizes`."""
        return self.times.ns(sizes, self.deployment)

    def having(self, **settings: Any) -> Twin:
        """Return the twin with other settings."""
        return replace(self, setting=self.setting._replace(**settings))

    def answers(self, asked: Iterable[Answer]) -> list[Simulated]:
        """Simulate the questions of `asked`."""
        deployment = self.deployment
        cost = self.times.cost(deployment)
        return [simulated(answer.as_sent, deployment, cost, self.front_door) for answer in asked]

    def fitted(self, asked: Sequence[Answer], prior: StepTimes, fit_launches: bool = True) -> Twin:
        """Return the twin with step times fitted to all answers, close to those of `prior`.

        The cost of a launch is fitted, too, or stays that of `prior`.
        """
        log = joined([seen_steps(answer, said) for answer, said in zip(asked, self.answers(asked), strict=True)])
        fitted = replace(self, times=prior.fitted(log, self.deployment, fit_launches))
        return fitted.with_front_door(client_ns=fitted._outside_ns(asked))

    def with_front_door(self, **times: float) -> Twin:
        """Return the twin with other times of the API server."""
        return replace(self, front_door=self.front_door.model_copy(update=times))

    def _outside_ns(self, asked: Sequence[Answer]) -> float:
        """Return `client_ns` with which the TTFT of lone requests is right, in the median."""
        late = []
        lone = [answer for answer in asked if answer.question.workload.concurrency == 1]
        for answer, said in zip(lone, self.answers(lone), strict=True):
            late += [
                (seen[0] - answer.sent_ns[id]) - (said.tokens_ns[id][0] - said.sent_ns[id])
                for id, seen in answer.tokens_ns.items()
                if id in said.tokens_ns
            ]
        return max(self.front_door.client_ns + float(np.median(late)), 0.0) if late else self.front_door.client_ns

    def likelihood(self, asked: Sequence[Answer]) -> float:
        """Return the log likelihood of the answers."""
        said = self.answers(asked)
        return sum(_likelihood(answer, twin) for answer, twin in zip(asked, said, strict=True))


def _likelihood(answer: Answer, said: Simulated) -> float:
    """Return the log likelihood of an answer, from the TTFT, the E2E latency and the longest gap of the requests.

    Requests are compared by rank among those of the same prompt length (TTFT) or output length (E2E): a request that
    comes a moment later is in another step, and which of equal requests that is, is chance.
    """
    lengths = {one.id: (one.prompt_len, one.output_len) for one in answer.question.workload.requests}
    alike = [id for id, seen in answer.tokens_ns.items() if len(said.tokens_ns.get(id, ())) == len(seen)]
    several = [id for id in alike if len(answer.tokens_ns[id]) > 2]
    latencies: list[tuple[list[int], int | None, Callable[[int, Times], float]]] = [
        (alike, 0, lambda sent, times: float(times[0] - sent)),
        (alike, 1, lambda sent, times: float(times[-1] - sent)),
        (several, None, lambda sent, times: float(np.diff(times).max())),
    ]
    total = 0.0
    for ids, length, latency in latencies:
        groups: dict[int, list[int]] = {}
        for id in ids:
            groups.setdefault(0 if length is None else lengths[id][length], []).append(id)
        errors = [
            np.sort(_logs(latency, answer.sent_ns, answer.tokens_ns, group))
            - np.sort(_logs(latency, said.sent_ns, said.tokens_ns, group))
            for group in groups.values()
        ]
        if errors:
            error = np.concatenate(errors) / _SPREAD
            density = -(_FREEDOM + 1) / 2 * np.log1p(error**2 / _FREEDOM)
            total += float(density.mean()) * min(len(error), _COUNTED)
    return total


def _logs(
    latency: Callable[[int, Times], float], sent_ns: dict[int, int], tokens_ns: dict[int, Times], ids: Sequence[int]
) -> NDArray[np.float64]:
    return np.log(np.maximum([latency(sent_ns[id], tokens_ns[id]) for id in ids], 1.0))
