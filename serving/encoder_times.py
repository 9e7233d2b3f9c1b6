"""The time that encoding images, videos and audio adds to a step, and the protocol of a cost model that knows it.

vLLM encodes the items of a step before the step's other work, in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.workload import Item


class EncoderTimes(Protocol):
    """The times of an encoder."""

    def encode_ns(self, items: Sequence[Item]) -> int:
        """Return how long a step takes longer if it encodes `items`, in nanoseconds."""
        ...

    def scaled(self, factor: float) -> EncoderTimes: ...

    def on(self, deployment: Deployment) -> EncoderTimes:
        """Return the times on the devices of `deployment`, an engine with the same model and GPUs."""
        ...


class StatedEncoderTimes(NamedTuple):
    """A stated time for each placeholder token."""

    token_ns: float

    def encode_ns(self, items: Sequence[Item]) -> int:
        return round(self.token_ns * sum(item.tokens for item in items))

    def scaled(self, factor: float) -> StatedEncoderTimes:
        return StatedEncoderTimes(factor * self.token_ns)

    def on(self, deployment: Deployment) -> StatedEncoderTimes:
        return self


@runtime_checkable
class EncodingCost(Protocol):
    """A cost model that knows the times of an encoder; None if its deployment has none, or none that is known."""

    @property
    def encoder(self) -> EncoderTimes | None: ...


def encoder_times(cost: object) -> EncoderTimes | None:
    """Return the times of the encoder that `cost` knows; None if it knows none."""
    return cost.encoder if isinstance(cost, EncodingCost) else None
