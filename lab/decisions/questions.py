"""Questions about measured configurations: which one gives the most tokens a second per GPU and meets these bounds?

Bounds lie between the minimum and the maximum measured in a group of configurations, evenly spaced in the logarithm. A
question is asked only if some configuration meets the bounds and the one with the highest throughput does not: else the
question has no answer, or its bounds do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from lab.decisions.configurations import Configuration, Times

_BOUNDS = 5  # number of bounds on each latency
_FEWEST = 4  # minimum number of configurations of a group


@dataclass(frozen=True)
class Group:
    """Configurations that serve the same requests with the same model, on one kind of GPU or on several."""

    model: str
    gpu: str
    lengths: tuple[int, int]
    options: tuple[Configuration, ...]

    @property
    def measured(self) -> list[float]:
        """The measured throughput of each configuration."""
        return [option.throughput(option.measured) for option in self.options]


@dataclass(frozen=True)
class Slo:
    """Upper bounds on the mean TTFT and TPOT; TTFT may have none."""

    ttft_ms: float
    tpot_ms: float

    def kept(self, times: Times) -> bool:
        return times.ttft_ms <= self.ttft_ms and times.tpot_ms <= self.tpot_ms


def groups(configurations: Sequence[Configuration]) -> list[Group]:
    """Return a group for each model, GPU and lengths, and one over all GPUs if several kinds were measured."""
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
    """Return the pairs of bounds that are asked about, the tightest TPOT first."""
    measured = [option.measured for option in group.options]
    fastest = measured[int(np.argmax(group.measured))]
    tpots, ttfts = (_between([times[at] for times in measured]) for at in (1, 0))
    asked = dict.fromkeys(Slo(ttft, tpot) for tpot in tpots for ttft in (*ttfts, inf))
    return [slo for slo in asked if any(map(slo.kept, measured)) and not slo.kept(fastest)]


def _between(values: Sequence[float]) -> list[float]:
    bounds: list[float] = np.geomspace(min(values), max(values), _BOUNDS + 2)[1:-1].tolist()
    return bounds
