"""The score of choices by measured figures.

The utility of a choice is its measured throughput divided by the highest measured throughput within the bounds. It is 0
if the choice breaks the bounds, or if nothing was chosen. Questions about one group depend on each other, so intervals
are bootstrapped over groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from statistics import fmean, median
from typing import Any

import numpy as np

from lab.decisions.configurations import Configuration, Times
from lab.decisions.own_rows import COUNTS, DRAWS, OwnRows
from lab.decisions.questions import Group, Slo, slos
from lab.decisions.rules import APPETITES, RULES, Rule, by_expected_worth
from tokentwin.calibration.steps.interval import REACH
from tokentwin.planning.plan.worth import RISK

_RESAMPLES = 2000
SHARES = (1.0, 0.75, 0.5)  # factors on the log errors of predictions
BOLD = 0.2  # another risk that is tried beside the default one


@dataclass(frozen=True)
class Answer:
    """The result of one choice.

    Attributes:
        utility: see the module
        broke: True if the choice breaks a bound, as measured
        chose: True if something was chosen
        promised: the rule's probability that the choice meets the bounds
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

    Attributes:
        utility, low, high: mean utility, and its 90 % interval over groups
        broke, none: shares of the questions with a broken bound, and without a choice
        regret: mean of 1 - utility over the choices that met the bounds
        promised: mean probability of meeting the bounds, over choices that have one
        kept: share of the same choices that met the bounds, as measured
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
    """Return the rule's choice for every question about every group."""
    chosen = []
    for group in groups:
        measured = np.array(group.measured)
        for slo in slos(group):
            keeps = np.array([slo.kept(option.measured) for option in group.options])
            option, promised = rule(group, slo)
            kept = option is not None and bool(keeps[option])
            utility = float(measured[option] / measured[keeps].max()) if kept else 0.0
            chosen.append(Answer(group, slo, utility, option is not None and not kept, option is not None, promised))
    return chosen


def summed_up(answered: Sequence[Answer]) -> Score:
    """Return the score of the answers; raise ValueError if there are none."""
    if not answered:
        raise ValueError("there is nothing to sum up")
    utility = np.array([answer.utility for answer in answered])
    kept = [answer.utility for answer in answered if answer.chose and not answer.broke]
    promises = [answer for answer in answered if answer.promised is not None]
    low, high = _interval(answered)
    return Score(
        questions=len(answered),
        groups=len({id(answer.group) for answer in answered}),
        utility=float(utility.mean()),
        low=low,
        high=high,
        broke=float(np.mean([answer.broke for answer in answered])),
        none=float(np.mean([not answer.chose for answer in answered])),
        regret=1.0 - float(np.mean(kept)) if kept else None,
        promised=float(np.mean([answer.promised for answer in promises])) if promises else None,
        kept=float(np.mean([not answer.broke for answer in promises])) if promises else None,
    )


def _interval(answered: Sequence[Answer]) -> tuple[float, float]:
    """Return the 90 % interval of the mean utility: 5 to 95 % of resamples of whole groups."""
    sums: dict[int, list[float]] = {}
    for answer in answered:
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
    """The result of rung 7.

    Attributes:
        rules: the score of every rule
        appetites: scores of our rule, by the risk that it may take
        parts: scores of our rule, by model and GPU
        closer: scores of our rule, by the factor on the errors of predictions (`SHARES`), and by risk
        own: scores of our rule after a few configurations of each group were measured, by their number and by risk;
            empty if it was not tried
        options: median number of configurations of the groups that questions are about
        common: measured share of the variance of errors that is common to configurations of a model on a GPU
        between: measured correlation between the errors of TTFT and TPOT of a configuration
    """

    rules: Mapping[str, Score]
    appetites: Mapping[float, Score]
    parts: Mapping[tuple[str, str], Score]
    closer: Mapping[tuple[float, float], Score]
    own: Mapping[tuple[int, float], Score]
    options: float
    common: float
    between: float


def decided(groups: Sequence[Group], own_rows: OwnRows | None = None) -> Decisions:
    """Apply every rule to every question; raise ValueError if there is no question.

    With `own_rows`, the questions are asked again after some configurations of each group were measured.
    """
    rules, appetites, parts, closer, own = (defaultdict[Any, list[Answer]](list) for _ in range(5))
    for group in groups:  # one after the other: a group's draws are kept for all rules, and are large
        for name, rule in RULES.items():
            rules[name] += answers([group], rule)
        for risk in APPETITES:
            appetites[risk] += answers([group], by_expected_worth(risk))
        parts[group.model, group.gpu] += answers([group], by_expected_worth())
        for share in SHARES:
            with_less = _closer(group, share)
            for risk in (RISK, BOLD):
                closer[share, risk] += answers([with_less], by_expected_worth(risk))
        for count, draw in product(COUNTS if own_rows else (), range(DRAWS)):
            assert own_rows is not None
            known = own_rows.known(group, count, draw)
            for risk in (RISK, BOLD):
                own[count, risk] += answers([known], by_expected_worth(risk))
    if not any(rules.values()):
        raise ValueError("there is nothing to sum up")
    options = [option for group in groups for option in group.options]
    return Decisions(
        rules=_summed(rules),
        appetites=_summed(appetites),
        parts=_summed(parts),
        closer=_summed(closer),
        own=_summed(own),
        options=median(len(group.options) for group in groups if slos(group)),
        common=common_share(options),
        between=_correlation(options),
    )


def _summed(answered: Mapping[Any, Sequence[Answer]]) -> dict[Any, Score]:
    return {key: summed_up(answers) for key, answers in answered.items() if answers}


def _closer(group: Group, share: float) -> Group:
    """Return the group with predictions whose log errors and bands are multiplied by `share`."""

    def option(predicted: Configuration) -> Configuration:
        blind = Times(*(m * (b / m) ** share for m, b in zip(predicted.measured, predicted.blind, strict=True)))
        low, high = (
            Times(*(c * (e / b) ** share for c, e, b in zip(blind, end, predicted.blind, strict=True)))
            for end in (predicted.low, predicted.high)
        )
        return replace(predicted, low=low, blind=blind, high=high)

    return replace(group, options=tuple(map(option, group.options)))


def common_share(options: Sequence[Configuration]) -> float:
    """Return the share of the mean square error that comes from the mean error of each family.

    A family is a model on a GPU. Errors are in standard deviations of their band; an error without a band counts as 0.
    TTFT and TPOT count alike.
    """
    families: dict[tuple[str, str, int], list[float]] = {}
    for option, *both in _errors(options):
        for at, error in enumerate(both):
            families.setdefault((option.model, option.gpu, at), []).append(error)
    total = sum(z**2 for errors in families.values() for z in errors)
    return sum(len(errors) * fmean(errors) ** 2 for errors in families.values()) / total if total else 0.0


def _correlation(options: Sequence[Configuration]) -> float:
    """Return the correlation of the errors of TTFT and TPOT, taken about zero instead of their means."""
    both = np.array([errors for _, *errors in _errors(options)]).reshape(-1, 2)
    (ttft, across), (_, tpot) = both.T @ both
    return float(across / np.sqrt(ttft * tpot)) if ttft * tpot else 0.0


def _errors(options: Sequence[Configuration]) -> Iterator[tuple[Configuration, float, float]]:
    """Yield each configuration once, with the errors of its TTFT and TPOT in standard deviations of their bands."""
    for option in {option.run: option for option in options}.values():
        errors = []
        for measured, blind, low, high in zip(option.measured, option.blind, option.low, option.high, strict=True):
            error = log(measured / blind)
            reach = abs(log((high if error > 0 else low) / blind))
            errors.append(REACH * error / reach if reach else 0.0)
        yield option, errors[0], errors[1]
