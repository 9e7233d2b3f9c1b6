"""The configurations of a group as a user predicts them who has measured a few of them.

The source of a configuration is left out of the evidence first. Then the measured configurations of that source, drawn
at random from the group, join the evidence (`tokentwin.calibration.validation.external.own_runs` does the same for
users).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, sqrt

from lab.decisions.configurations import Configuration, Times
from lab.decisions.questions import Group
from tokentwin.calibration.steps.evidence import OWN_ROWS, Belief, Evidence, Origin, Taught, reach_of
from tokentwin.calibration.validation.external.predicted_run import PredictedRun, taught

COUNTS = (1, 3)
DRAWS = 2
_ROUNDS = 2


@dataclass(frozen=True)
class OwnRows:
    """Groups of which some configurations were measured; `evidence` is that of all sources."""

    evidence: Evidence
    _left: dict[str, Evidence] = field(default_factory=dict, repr=False)

    def known(self, group: Group, count: int, draw: int) -> Group:
        """Return the group with `count` measured configurations, and predictions of the others that use them."""
        draws = random.Random(f"{group.model} {group.gpu} {group.lengths} {count} {draw}")
        chosen = set(draws.sample(range(len(group.options)), min(count, len(group.options) - 1)))
        own: dict[str, list[PredictedRun]] = {}
        for at in sorted(chosen):
            row = _row(group.options[at])
            own.setdefault(row.origin.source, []).append(row)
        beliefs: dict[Origin, Belief] = {}
        evidence = {source: self._joined(source, rows) for source, rows in own.items()}
        options = []
        for at, option in enumerate(group.options):
            origin = _row(option).origin
            if at in chosen:
                options.append(replace(option, low=option.measured, blind=option.measured, high=option.measured))
            elif origin.source not in own:
                options.append(option)
            else:
                if origin not in beliefs:
                    beliefs[origin] = evidence[origin.source].belief(origin)
                options.append(self._predicted(option, beliefs[origin], len(own[origin.source])))
        return replace(group, options=tuple(options))

    def _joined(self, source: str, rows: Sequence[PredictedRun]) -> Evidence:
        """Return the evidence of the other sources with these rows."""
        if source not in self._left:
            self._left[source] = self.evidence.without(lambda origin: origin.source == source)
        joined = self._left[source]
        for _ in range(_ROUNDS):
            equations: list[Taught] = []
            for origin in dict.fromkeys(row.origin for row in rows):
                mine = [row for row in rows if row.origin == origin]
                equations.append(taught(origin, mine, joined.belief(origin).logs))
            joined = self._left[source].joined(equations)
        return joined

    def _predicted(self, option: Configuration, belief: Belief, own_rows: int) -> Configuration:
        row = _row(option)
        predicted, slopes = row.predicted(belief.logs)
        enough = max(count for count in OWN_ROWS if count <= own_rows)
        ends: dict[str, tuple[float, float, float]] = {}
        for figure, centre, slope in zip(row.figures, predicted.tolist(), slopes, strict=True):
            others = [
                miss
                for miss in self.evidence.own_missed[enough]
                if miss.figure == figure and miss.origin.source != row.origin.source
            ]
            sigma = sqrt(float(belief.variance(slope)) + self.evidence.noise[figure] ** 2)
            factor = exp(reach_of(others, row.origin) * sigma)
            ends[figure] = centre / factor, centre, centre * factor
        low, blind, high = (
            Times(ttft, tpot) for ttft, tpot in zip(ends["ttft_ms.mean"], ends["tpot_ms.mean"], strict=True)
        )
        return replace(option, low=low, blind=blind, high=high)


def _row(option: Configuration) -> PredictedRun:
    assert option.row is not None  # as `configurations` makes them
    return option.row
