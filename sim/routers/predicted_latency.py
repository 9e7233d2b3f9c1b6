"""A router that learns latencies from requests that have ended, and chooses the replica with the shortest prediction.

It follows llm-d's scheduling by predicted latency (llm-d.ai, "Latency Predictor"): models that are trained online
predict TTFT and TPOT of a request at each replica, from the replica's load and the prompt. llm-d trains boosted trees
for the 90th percentile; here two linear models are trained for the mean, by recursive least squares with forgetting
(Ljung, "System Identification", 1999). The arithmetic is plain Python, in a fixed order, so that every machine makes
the same choices. A choice looks at all replicas.
"""

from __future__ import annotations

from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet
from tokentwin.sim.routers.least import outstanding_requests

_FEWEST = 50  # ended requests before which the replica with the fewest requests is chosen
_FORGETTING = 0.999  # weight of the previous request relative to the last one
_UNCERTAIN = 1e3  # variance of the coefficients before the first request
_THOUSAND = 1000.0

Features = tuple[float, ...]


class PredictedLatency:
    """A router that chooses the replica with the shortest predicted E2E latency; the first among equals.

    The prediction is TTFT plus TPOT for as many output tokens as requests had in the mean so far. The simulator calls
    `ended` with the end of each request.
    """

    def __init__(self) -> None:
        self._ttft, self._tpot = _OnlineLine(), _OnlineLine()
        self._asked: dict[int, Features] = {}  # features of the chosen replicas, by request
        self._ended = self._outputs = 0

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        if self._ended < _FEWEST:
            chosen = replicas.least(outstanding_requests)
        else:
            tokens = max(self._outputs / self._ended - 1, 0.0)
            chosen = min(replicas, key=lambda one: self._predicted_ns(_features(request, one), tokens))
        self._asked[request.id] = _features(request, chosen)
        return chosen

    def ended(
        self, id: int, finished: bool, outputs: int, arrival_ns: int, first_token_ns: int | None, end_ns: int
    ) -> None:
        """Learn from a request that has ended, unless it has no token."""
        features = self._asked.pop(id, None)
        if features is None or not finished or first_token_ns is None:
            return
        self._ended += 1
        self._outputs += outputs
        self._ttft.learn(features, float(first_token_ns - arrival_ns))
        if outputs > 1:
            self._tpot.learn(features, (end_ns - first_token_ns) / (outputs - 1))

    def _predicted_ns(self, features: Features, tokens: float) -> float:
        return self._ttft.predict(features) + tokens * self._tpot.predict(features)


def _features(request: WorkloadRequest, replica: Replica) -> Features:
    return (
        1.0,
        request.prompt_len / _THOUSAND,
        float(replica.queued_requests),
        float(replica.outstanding_requests),
        replica.known_tokens / _THOUSAND,
    )


class _OnlineLine:
    """A linear model of one value, by recursive least squares. It predicts no negative value."""

    def __init__(self) -> None:
        self._coefficients: list[float] = []
        self._covariance: list[list[float]] = []

    def predict(self, features: Features) -> float:
        value = 0.0
        for coefficient, feature in zip(self._coefficients, features, strict=False):
            value += coefficient * feature
        return max(value, 0.0)

    def learn(self, features: Features, value: float) -> None:
        if not self._coefficients:
            size = len(features)
            self._coefficients = [0.0] * size
            self._covariance = [[_UNCERTAIN * (row == column) for column in range(size)] for row in range(size)]
        error = value
        for coefficient, feature in zip(self._coefficients, features, strict=True):
            error -= coefficient * feature
        gains = []
        for row in self._covariance:
            gain = 0.0
            for entry, feature in zip(row, features, strict=True):
                gain += entry * feature
            gains.append(gain)
        scale = _FORGETTING
        for gain, feature in zip(gains, features, strict=True):
            scale += gain * feature
        for at, gain in enumerate(gains):
            self._coefficients[at] += gain / scale * error
            row = self._covariance[at]
            for to, other in enumerate(gains):
                row[to] = (row[to] - gain * other / scale) / _FORGETTING
        largest = max(row[at] for at, row in enumerate(self._covariance))
        if largest > _UNCERTAIN:  # features that do not vary would let it grow without limit
            self._covariance = [[entry * _UNCERTAIN / largest for entry in row] for row in self._covariance]
