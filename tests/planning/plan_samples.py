"""Engines with simple prices, traffic for them, and the answer by trying every fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokentwin.calibration.steps.interval import factor_at
from tokentwin.calibration.trust import INTERPOLATED, Trust
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.planning.plan.trial import Question, try_fleet
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest

SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2048, num_blocks=600)
SPEEDS = {"slow": 1.0, "fast": 2.5, "snail": 0.1}  # speed relative to the slow engine


class Steps(TokenCost):
    """Step times of 20 ms a step and 0.1 ms a token at speed 1, all 20 % uncertain, or with an `interval`."""

    def __init__(self, speed: float, interval: tuple[float, float] | None = (0.8, 1.2)) -> None:
        super().__init__(round(2e7 / speed), round(1e5 / speed), round(1e3 / speed))
        self.speed, self.interval = speed, interval

    def ends(self) -> tuple[Steps, Steps]:
        return self.at_share(0.05), self.at_share(0.95)

    def at_share(self, share: float) -> Steps:
        return self if self.interval is None else Steps(self.speed / factor_at(self.interval, share))

    def trust(self) -> Trust:
        return Trust(INTERPOLATED, "made up")


@dataclass(frozen=True)
class BySpeed:
    """Tensor parallelism over n makes an engine n^0.8 times as fast."""

    interval: tuple[float, float] | None = (0.8, 1.2)

    def __call__(self, engine: Engine) -> Steps:
        return Steps(SPEEDS[engine.gpu] * engine.deployment.tensor_parallel_size**0.8, self.interval)


def engine(gpu: str = "slow", tp: int = 1, usd: float = 1.0) -> Engine:
    return Engine(gpu, usd, Deployment(tensor_parallel_size=tp, scheduler=SCHEDULER))


def traffic(requests: int = 140, rate: float = 60.0, seed: int = 0, tokens: int = 300) -> Workload:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e9 / rate, requests)).astype(np.int64).tolist()
    prompts = rng.integers(1, tokens, requests).tolist()
    outputs = rng.integers(1, 40, requests).tolist()
    return Workload(
        [
            WorkloadRequest(id, at, ((PRIVATE, prompt),), output)
            for id, (at, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
        ],
        shares_prefixes=False,
    )


def question(*slos: str, workload: Workload | None = None) -> Question:
    workload = workload or traffic()
    requests = len(list(workload.requests))
    return Question(workload, requests, parse_objectives(slos), BySpeed(), "least-requests", risk=0.1)


def fewest(query: Question, of: Engine, most: int) -> int | None:
    """Return the smallest number of replicas that holds, by trying every number from one up."""
    return next((n for n in range(1, most + 1) if try_fleet(query, of, n, to_the_end=True).met), None)


def cheapest(query: Question, engines: Sequence[Engine], most: int, spares: int = 0) -> tuple[float, str, int] | None:
    """Return price, engine and replicas of the cheapest fleet, by trying everything."""
    found = [(of, fewest(query, of, most)) for of in engines]
    offers = [((n + spares) * of.usd_per_hour, of.name, n) for of, n in found if n is not None]
    return min(offers, default=None)
