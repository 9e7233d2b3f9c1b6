"""How far sources are apart: what the prediction of a further one is off by, as those of the others tell.

A source is an engine of some version with its model, its GPU and its client. What its runs are off by together is most
of what a prediction does not know, how they scatter about that is the rest; the mean square of a source's errors has
both. Sources weigh alike and are few, hence Student's t, as for recordings of our own engine
(`calibration.steps.fit.interval`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

COVERAGE = 0.9


def reach(misses: Mapping[str, NDArray[np.float64]]) -> float:
    """How far from 0 a log error of one more source lies, 9 times out of 10.

    `misses` are the errors of every source, predicted without what it taught. With J sources and their root mean square
    s, the next error is s sqrt(1 + 1/J) times a variable of Student's t with J - 1 degrees of freedom.
    """
    squares = [float(np.mean(np.square(errors))) for errors in misses.values() if errors.size]
    count = len(squares)
    if count < 2:
        raise ValueError(f"{count} sources say nothing of how far sources are apart")
    quantile = float(student.ppf((1 + COVERAGE) / 2, count - 1))
    return quantile * float(np.sqrt(np.mean(squares) * (1 + 1 / count)))


def most_of_one_more(means: Sequence[float]) -> float:
    """What a time that no source can have less than none of stays below in one more source, 9 times out of 10.

    `means` are those of J sources, taken for exponentially distributed: with their mean m the next one exceeds x with
    probability (1 + x / (J m))^-J, Bayes' predictive under Jeffreys' prior.
    """
    count = len(means)
    if not count:
        return 0.0
    total = sum(max(mean, 0.0) for mean in means)
    return total * float((1 - COVERAGE) ** (-1 / count) - 1)
