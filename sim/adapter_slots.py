"""The LoRA adapters of one simulated replica, and the time to bring them into slots.

This is CPU time before the step can start, so the overlapped loop hides a part of it behind the step before.
"""

from __future__ import annotations

from typing import NamedTuple

from tokentwin.serving.adapter_places import AdapterPlaces
from tokentwin.serving.adapter_times import AdapterTimes
from tokentwin.serving.deployments.lora import LoraConfig
from tokentwin.serving.step_plan import StepPlan


class AdapterUse(NamedTuple):
    """The number of loads from disk, of copies into a slot, and the CPU time of both."""

    loads: int = 0
    copies: int = 0
    waiting_ns: int = 0


class AdapterSlots:
    """The adapters of one replica; at the start there are none. `use` counts their loads so far."""

    def __init__(self, times: AdapterTimes, lora: LoraConfig) -> None:
        self._times = times
        self._places = AdapterPlaces(lora)
        self._waiting_ns = 0

    @property
    def use(self) -> AdapterUse:
        return AdapterUse(self._places.loads, self._places.copies, self._waiting_ns)

    def ready_ns(self, plan: StepPlan) -> int:
        """Bring the adapters of `plan` into slots; return the time that this takes."""
        places = self._places
        loads, copies = places.loads, places.copies
        for adapter in plan.adapters:
            places.use(adapter)
        ns = round((places.loads - loads) * self._times.load_ns + (places.copies - copies) * self._times.copy_ns)
        self._waiting_ns += ns
        return ns

    def added_ns(self, adapters: dict[str, int], tokens: int) -> int:
        """Return the time that `adapters`, with their numbers of tokens, add to a step of `tokens` tokens."""
        return self._times.added_ns(adapters, tokens)
