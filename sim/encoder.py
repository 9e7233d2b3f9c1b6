"""The encoder of one replica: what it encodes, and how long its steps take longer for it."""

from __future__ import annotations

from typing import NamedTuple

from tokentwin.serving.encoder_times import EncoderTimes
from tokentwin.serving.step_plan import StepPlan


class EncoderUse(NamedTuple):
    """The number of items that steps encoded, of their embeddings, and the time that this took."""

    items: int = 0
    tokens: int = 0
    encoding_ns: int = 0


class Encoder:
    """An encoder that shares a device with its replica's steps. `use` counts its work so far."""

    def __init__(self, times: EncoderTimes) -> None:
        self._times = times
        self._items = self._tokens = self._encoding_ns = 0

    @property
    def use(self) -> EncoderUse:
        return EncoderUse(self._items, self._tokens, self._encoding_ns)

    def encode_ns(self, plan: StepPlan, pace: float) -> int:
        """Encode the items of `plan`, `pace` times as slowly as usual; return the time that this adds to the step."""
        items = plan.encoded_items()
        ns = round(pace * self._times.encode_ns(items))
        self._items += len(items)
        self._tokens += sum(item.tokens for item in items)
        self._encoding_ns += ns
        return ns
