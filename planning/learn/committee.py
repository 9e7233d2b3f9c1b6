"""Which question to ask next: the one whose answer should narrow the prediction of traffic most.

A committee of twins explains the answers so far: with other settings, and with step times that some answers did not
teach (query by committee, Seung et al. 1992). Its members predict the traffic and the answer to a question. If the two
vary together, the answer narrows the prediction; by how much is the update of an ensemble Kalman filter (Evensen 1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokentwin.planning.learn.proof import figures
from tokentwin.planning.learn.questions import Question
from tokentwin.planning.learn.twin import Twin

_NOISE = 0.02  # standard deviation of the logarithm of a figure in an answer
_REACH = 1.645  # standard deviations of a normal distribution to the end of its 90 % interval
_METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
_REFUSED_MS = 1e5  # a latency of requests of which none is answered; some engines refuse long prompts
_SHORTEST_S = 2.0  # a question costs no less: it needs time to be prepared

Floats = NDArray[np.float64]


@dataclass
class Member:
    """A twin, and what it predicts of questions."""

    twin: Twin
    _seen: dict[str, tuple[Floats, float]] = field(default_factory=dict, init=False, repr=False)

    def foreseen(self, question: Question) -> tuple[Floats, float]:
        """Return the logarithms of the means and medians of the latencies, and the seconds of the answer."""
        if question.name not in self._seen:
            said = self.twin.foreseen(question)
            known = figures(said.sent_ns, said.tokens_ns, list(said.tokens_ns))
            usual = [
                known.get((metric, statistic), _REFUSED_MS) for metric in _METRICS for statistic in ("mean", "p50")
            ]
            last = max((int(times[-1]) for times in said.tokens_ns.values()), default=0)
            self._seen[question.name] = np.log(np.maximum(usual, 1e-6)), last / 1e9
        return self._seen[question.name]


@dataclass(frozen=True)
class Committee:
    """Twins with the logarithms of their weights, up to a constant, and the traffic that they are to predict."""

    members: Sequence[Member]
    logs: Sequence[float]
    traffic: Sequence[Question]

    @property
    def weights(self) -> Floats:
        """The weights of the members; their sum is 1."""
        weights = np.exp(np.asarray(self.logs) - max(self.logs))
        return np.asarray(weights / weights.sum())

    @property
    def band_pct(self) -> float:
        """Half of the 90 % interval of the least certain mean or median of the traffic, in percent."""
        variances = self.weights @ np.square(self._spread(self.traffic))
        return 100 * float(np.expm1(_REACH * np.sqrt(variances.max())))

    def best_question(self, questions: Sequence[Question]) -> Question:
        """Return the question that narrows the prediction most in relation to the time that its answer takes."""
        return max(questions, key=self.narrowing)

    def narrowing(self, question: Question) -> float:
        """Return by how much the answer should lower the variance of the logarithms of figures, per second."""
        share = np.sqrt(self.weights)[:, None]
        traffic, asked = share * self._spread(self.traffic), share * self._spread([question])
        both = traffic.T @ asked
        certain = asked.T @ asked + _NOISE**2 * np.eye(asked.shape[1])
        lowered = float(np.trace(both @ np.linalg.solve(certain, both.T)))
        seconds = self.members[int(np.argmax(self.logs))].foreseen(question)[1]
        return lowered / max(seconds, _SHORTEST_S)

    def _spread(self, questions: Sequence[Question]) -> Floats:
        """Return how far each member's logarithms of figures lie from the weighted mean; a row for each member."""
        logs = np.array(
            [np.concatenate([member.foreseen(question)[0] for question in questions]) for member in self.members]
        )
        return np.asarray(logs - self.weights @ logs)
