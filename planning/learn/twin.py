"""What a server may be: its settings and the times of its steps, and how well they explain its answers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.iteration_fit import IterationLog
from tokentwin.planning.learn.answers import Answer, Simulated, Times, simulated, steps_until_first
from tokentwin.planning.learn.questions import Question
from tokentwin.planning.learn.seen_steps import joined, seen_steps
from tokentwin.planning.learn.step_times import StepTimes
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig, RouterConfig
from tokentwin.serving.front_door import FrontDoor

POLICIES = ("vllm", "sglang", "trtllm")
ROUTERS = ("round-robin", "least-requests")
_SPREAD = 0.03  # standard deviation of the logarithm of a time that a right twin may be off by
_PATTERN = 0.008  # the same of a difference between two times of one answer
_SHARES = (0.3, 0.5, 0.7, 1.0, 1.4, 2.0)  # in which a further step may cost less or more than the twin says
_COUNT = 0.1  # the same of a number of steps
_SHORT = 1.5  # TTFT, in shortest ones, up to which a prompt is short
GROUPS = 4  # number of groups of questions, of which each is predicted from the others
_FREEDOM = 3.0  # degrees of freedom of Student's t, so that single outliers decide nothing
_COUNTED = 6  # maximum number of independent requests in a question: requests of one question share their error


_FIRST_DOOR = FrontDoor(client_ns=1e6, own_processes=True)  # before it is fitted


class Setting(NamedTuple):
    """The settings of a server that its answers can reveal.

    The fields are those of `Deployment` and its scheduler. `replicas` engines with these settings are behind `router`.
    """

    policy: str
    max_num_batched_tokens: int
    async_scheduling: bool
    max_num_seqs: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    replicas: int = 1
    router: str = ROUTERS[0]

    @classmethod
    def of(cls, deployment: Deployment) -> Setting:
        """Return the settings of `deployment`, whose number of KV blocks must be known."""
        scheduler = {name: getattr(deployment.scheduler, name) for name in _OF_SCHEDULER}
        setting = cls(policy=deployment.policy, **scheduler)
        if deployment.fleet is None:
            return setting
        (pool,) = deployment.fleet.pools
        return setting._replace(replicas=pool.replicas, router=deployment.fleet.router.name)

    def applied(self, base: Deployment) -> Deployment:
        """Return `base` with these settings."""
        scheduler = {name: getattr(self, name) for name in _OF_SCHEDULER}
        scheduler["max_num_seqs"] = min(self.max_num_seqs, self.max_num_batched_tokens)
        changed = base.rescheduled(**scheduler).model_copy(update={"gpu_memory_utilization": None})
        if self.replicas > 1:
            fleet = FleetConfig(pools=(PoolConfig(replicas=self.replicas),), router=RouterConfig(name=self.router))
            changed = changed.model_copy(update={"fleet": fleet})
        return changed if base.engine else changed.model_copy(update={"policy": self.policy})


_OF_SCHEDULER = tuple(name for name in Setting._fields if name not in ("policy", "replicas", "router"))


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

    def having_blocks_of(self, tokens: int) -> Twin:
        """Return the twin with blocks of `tokens` tokens, and about as much KV as before."""
        setting = self.setting
        return self.having(block_size=tokens, num_blocks=setting.num_blocks * setting.block_size // tokens)

    def answers(self, asked: Iterable[Answer]) -> list[Simulated]:
        """Simulate the questions of `asked`."""
        deployment = self.deployment
        cost = self.times.cost(deployment)
        return [simulated(answer.as_sent, deployment, cost, self.front_door) for answer in asked]

    def foreseen(self, question: Question) -> Simulated:
        """Simulate a question that was not asked yet."""
        deployment = self.deployment
        return simulated(question.workload, deployment, self.times.cost(deployment), self.front_door)

    def fitted(
        self, asked: Sequence[Answer], prior: StepTimes, fit_launches: bool = True, recorded: IterationLog | None = None
    ) -> Twin:
        """Return the twin with step times fitted to all answers, close to those of `prior`.

        The cost of a launch is fitted, too, or stays that of `prior`. `recorded` are steps that the server itself
        recorded; they are fitted instead of those that clients saw.
        """
        log = recorded
        if log is None:
            said = self.answers(asked)
            log = joined([seen_steps(answer, own) for answer, own in zip(asked, said, strict=True)])
            del said
            gc.collect()  # a run's objects refer to one another, and are large before they are many
        fitted = replace(self, times=prior.fitted(log, self.deployment, fit_launches))
        return fitted.with_front_door(client_ns=fitted._outside_ns(asked))

    def with_front_door(self, **times: float) -> Twin:
        """Return the twin with other times of the API server."""
        return replace(self, front_door=self.front_door.model_copy(update=times))

    def _outside_ns(self, asked: Sequence[Answer]) -> float:
        """Return `client_ns` with which the TTFT of lone short prompts is right, in the median.

        The error of a long prompt is mostly that of its step times.
        """
        late: list[tuple[float, float]] = []
        lone = [answer for answer in asked if answer.question.workload.concurrency == 1]
        for answer, said in zip(lone, self.answers(lone), strict=True):
            for id, seen in answer.tokens_ns.items():
                if id in said.tokens_ns:
                    first_ns = float(seen[0] - answer.sent_ns[id])
                    late.append((first_ns, first_ns - float(said.tokens_ns[id][0] - said.sent_ns[id])))
        if not late:
            return self.front_door.client_ns
        shortest = min(first_ns for first_ns, _ in late)
        errors = [error for first_ns, error in late if first_ns <= _SHORT * shortest]
        return max(self.front_door.client_ns + float(np.median(errors)), 0.0)

    def likelihood(self, asked: Sequence[Answer]) -> float:
        """Return the log likelihood of the answers."""
        said = self.answers(asked)
        return sum(_likelihood(answer, twin) for answer, twin in zip(asked, said, strict=True))

    def likelihood_of_steps(self, asked: Sequence[Answer]) -> float:
        """Return the log likelihood of the numbers of steps until first tokens, which do not depend on step times."""
        total = 0.0
        for answer, said in zip(asked, self.answers(asked), strict=True):
            seen, own = (steps_until_first(one.sent_ns, one.tokens_ns) for one in (answer, said))
            errors = [np.log((seen[id] + 1) / (own[id] + 1)) for id in sorted(seen.keys() & own.keys())]
            total += float(_densities(np.array(errors), _COUNT).sum())
        return total

    def likelihood_of_pattern(self, answer: Answer, plain: Twin) -> float:
        """Return the log likelihood of how the TTFT of one long prompt differs from those of the others.

        `plain` is the twin without the pattern: the difference between both may be as large as some share in `_SHARES`
        of what they say. An error that all prompts share, as from step times that are not quite right, does not count.
        Errors are as large as those between prompts of one length, which differ by noise alone.
        """
        (said,), (without,) = self.answers([answer]), plain.answers([answer])
        lengths = {one.id: one.prompt_len for one in answer.question.workload.requests}
        both = sorted(answer.tokens_ns.keys() & said.tokens_ns.keys() & without.tokens_ns.keys())
        ids = [id for id in both if lengths[id] > max(lengths.values()) / 2]
        seen, own, base = (_logs(_first_ns, one.sent_ns, one.tokens_ns, ids) for one in (answer, said, without))
        of_length = [seen[[lengths[id] == length for id in ids]] for length in sorted({lengths[id] for id in ids})]
        noise = float(np.sqrt(np.mean([float(np.var(logs, ddof=1)) for logs in of_length if len(logs) > 1] or [0.0])))
        errors = (seen - base - share * (own - base) for share in _SHARES)
        spread = max(_PATTERN, noise)
        return max(float(_densities(error - np.median(error), spread).sum()) for error in errors)


def fitted_apart(twin: Twin, asked: Sequence[Answer], prior: StepTimes) -> list[Twin]:
    """Return twins of which each is fitted without some of the answers: those at every `GROUPS`-th place."""
    near = prior.with_launches_of(twin.times)
    return [
        twin.fitted([answer for at, answer in enumerate(asked) if at % GROUPS != group], near, fit_launches=False)
        for group in range(GROUPS)
    ]


def _likelihood(answer: Answer, said: Simulated) -> float:
    """Return the log likelihood of an answer, from the TTFT, the E2E latency and the longest gap of the requests.

    Requests are compared by rank among those of the same prompt length (TTFT) or output length (E2E): a request that
    comes a moment later is in another step, and which of equal requests that is, is chance.
    """
    lengths = {one.id: (one.prompt_len, one.output_len) for one in answer.question.workload.requests}
    alike = [id for id, seen in answer.tokens_ns.items() if len(said.tokens_ns.get(id, ())) == len(seen)]
    several = [id for id in alike if len(answer.tokens_ns[id]) > 2]
    latencies: list[tuple[list[int], int | None, Callable[[int, Times], float]]] = [
        (alike, 0, _first_ns),
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
            total += _as_few(_densities(np.concatenate(errors)))
    if answer.counted is not None:
        pairs = zip(answer.counted, said.counted, strict=True)
        total += float(_densities(np.array([np.log((seen + 1) / (own + 1)) for seen, own in pairs])).sum())
    return total


def _densities(errors: NDArray[np.float64], spread: float = _SPREAD) -> NDArray[np.float64]:
    """Return the log densities of errors of logarithms."""
    return np.asarray(-(_FREEDOM + 1) / 2 * np.log1p((errors / spread) ** 2 / _FREEDOM))


def _as_few(densities: NDArray[np.float64]) -> float:
    """Return the sum of log densities, in which many of one question count as a few."""
    return float(densities.mean()) * min(len(densities), _COUNTED)


def _first_ns(sent: int, times: Times) -> float:
    return float(times[0] - sent)


def _logs(
    latency: Callable[[int, Times], float], sent_ns: dict[int, int], tokens_ns: dict[int, Times], ids: Sequence[int]
) -> NDArray[np.float64]:
    return np.log(np.maximum([latency(sent_ns[id], tokens_ns[id]) for id in ids], 1.0))
