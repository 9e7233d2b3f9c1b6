"""Questions about measured configurations: which gives most tokens a second of a GPU within these bounds?

Bounds lie between the least and the greatest measured values of a group's configurations, evenly in their logarithm. A
question is asked if some configuration keeps the bounds and the one of greatest throughput does not: without the first
it has no answer, without the second no bound matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from lab.decisions.configurations import Configuration, Times

_BOUNDS = 5  # bounds of each latency
_FEWEST = 4  # configurations of a group


@dataclass(frozen=True)
class Group:
    """Configurations that serve the same model the same requests, on one GPU or on several kinds of them."""

    model: str
    gpu: str
    lengths: tuple[int, int]
    options: tuple[Configuration, ...]

    @property
    def measured(self) -> list[float]:
        """The throughput of each configuration."""
        return [option.throughput(option.measured) for option in self.options]


@dataclass(frozen=True)
class Slo:
    """Upper bounds on the mean TTFT and TPOT; TTFT may have none."""

    ttft_ms: float
    tpot_ms: float

    def kept(self, times: Times) -> bool:
        return times.ttft_ms <= self.ttft_ms and times.tpot_ms <= self.tpot_ms


def groups(configurations: Sequence[Configuration]) -> list[Group]:
    """Return a group for every model, GPU and lengths, and one over all GPUs if several were measured."""
    kinds: dict[tuple[str, str, tuple[int, int]], list[Configuration]] = {}
    for option in configurations:
        for gpu in (option.gpu, ""):
            kinds.setdefault((option.model, gpu, option.lengths), []).append(option)
    made = []
    for (model, gpu, lengths), options in sorted(kinds.items(), key=lambda kind: kind[0]):
        gpus = sorted({option.gpu for option in options})
        if len(options) >= _FEWEST and (gpu or len(gpus) > 1):
            made.append(Group(model, gpu or " or ".join(gpus), lengths, tuple(options)))
    return made


def slos(group: Group) -> list[Slo]:
    """Return the bounds that are asked about, the tightest TPOT first."""
    measured = [option.measured for option in group.options]
    fastest = measured[int(np.argmax(group.measured))]
    tpots, ttfts = (_between([times[at] for times in measured]) for at in (1, 0))
    asked = dict.fromkeys(Slo(ttft, tpot) for tpot in tpots for ttft in (*ttfts, inf))
    return [slo for slo in asked if any(map(slo.kept, measured)) and not slo.kept(fastest)]


def _between(values: Sequence[float]) -> list[float]:
    bounds: list[float] = np.geomspace(min(values), max(values), _BOUNDS + 2)[1:-1].tolist()
    return bounds
