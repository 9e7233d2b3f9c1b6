"""What choices were worth, as measured.

The utility of a choice is its measured throughput over the best measured that keeps the bounds, and 0 if it breaks
them or if nothing was chosen. Questions about one group depend on each other: intervals are bootstrapped over groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean

import numpy as np

from calibration.steps.interval import REACH
from calibration.validation.decisions.configurations import Configuration
from calibration.validation.decisions.questions import Group, Slo, slos
from calibration.validation.decisions.rules import APPETITES, RULES, Rule, by_expected_worth

_RESAMPLES = 2000


@dataclass(frozen=True)
class Answer:
    """What one choice came to.

    utility    see above
    broke      it breaks a bound in truth
    chose      something was chosen
    promised   the probability that it keeps the bounds, as the rule had it
    """

    group: Group
    slo: Slo
    utility: float
    broke: bool
    chose: bool
    promised: float | None


@dataclass(frozen=True)
class Score:
    """The answers of one rule, summed up.

    utility, low, high  mean, and its 90 % interval over groups
    broke, none         shares of the questions
    regret              what was given away where the bounds were kept: mean of 1 - utility
    promised, kept      of the choices with a probability: its mean, and how many kept the bounds in truth
    """

    questions: int
    groups: int
    utility: float
    low: float
    high: float
    broke: float
    none: float
    regret: float | None
    promised: float | None
    kept: float | None


def answers(groups: Sequence[Group], rule: Rule) -> list[Answer]:
    """The rule's choice for every question about every group."""
    found = []
    for group in groups:
        measured = np.array(group.measured)
        for slo in slos(group):
            keeps = np.array([slo.kept(option.measured) for option in group.options])
            option, promised = rule(group, slo)
            kept = option is not None and bool(keeps[option])
            utility = float(measured[option] / measured[keeps].max()) if kept else 0.0
            found.append(Answer(group, slo, utility, option is not None and not kept, option is not None, promised))
    return found


def summed_up(found: Sequence[Answer]) -> Score:
    """Raises ValueError for no answers."""
    if not found:
        raise ValueError("there is nothing to sum up")
    utility = np.array([answer.utility for answer in found])
    kept = [answer.utility for answer in found if answer.chose and not answer.broke]
    promises = [answer for answer in found if answer.promised is not None]
    low, high = _interval(found)
    return Score(
        questions=len(found),
        groups=len({id(answer.group) for answer in found}),
        utility=float(utility.mean()),
        low=low,
        high=high,
        broke=float(np.mean([answer.broke for answer in found])),
        none=float(np.mean([not answer.chose for answer in found])),
        regret=1.0 - float(np.mean(kept)) if kept else None,
        promised=float(np.mean([answer.promised for answer in promises])) if promises else None,
        kept=float(np.mean([not answer.broke for answer in promises])) if promises else None,
    )


def _interval(found: Sequence[Answer]) -> tuple[float, float]:
    """Of the mean utility, 5 to 95 % of resamples of whole groups."""
    sums: dict[int, list[float]] = {}
    for answer in found:
        entry = sums.setdefault(id(answer.group), [0.0, 0.0])
        entry[0] += answer.utility
        entry[1] += 1
    total = np.array(list(sums.values()))
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = total[rng.integers(0, len(total), (_RESAMPLES, len(total)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.05, 0.95)).tolist()
    return low, high


@dataclass(frozen=True)
class Decisions:
    """Rung 7.

    rules       the score of every rule
    appetites   of ours, by the risk that it may take
    parts       of ours, by model and GPU
    common      share of the variance of errors that was common to configurations of a model on a GPU, as measured
    """

    rules: Mapping[str, Score]
    appetites: Mapping[float, Score]
    parts: Mapping[tuple[str, str], Score]
    common: float


def decided(groups: Sequence[Group]) -> Decisions:
    """Every rule on every question. Raises ValueError where there is none."""
    ours = answers(groups, by_expected_worth())
    parts: dict[tuple[str, str], list[Answer]] = {}
    for answer in ours:
        parts.setdefault((answer.group.model, answer.group.gpu), []).append(answer)
    return Decisions(
        rules={name: summed_up(answers(groups, rule)) for name, rule in RULES.items()},
        appetites={risk: summed_up(answers(groups, by_expected_worth(risk))) for risk in APPETITES},
        parts={part: summed_up(found) for part, found in parts.items()},
        common=common_share([option for group in groups for option in group.options]),
    )


def common_share(options: Sequence[Configuration]) -> float:
    """Of the mean square error, in standard deviations of its band, how much is the square of its family's mean.

    A family is a model on a GPU. TTFT and TPOT count alike; errors without a band are left out.
    """
    families: dict[tuple[str, str, int], list[float]] = {}
    for option in {option.run: option for option in options}.values():
        for at in (0, 1):
            error = log(option.measured[at] / option.blind[at])
            reach = abs(log((option.high if error > 0 else option.low)[at] / option.blind[at]))
            if reach > 0:
                families.setdefault((option.model, option.gpu, at), []).append(REACH * error / reach)
    total = sum(z**2 for found in families.values() for z in found)
    return sum(len(found) * fmean(found) ** 2 for found in families.values()) / total if total else 0.0
