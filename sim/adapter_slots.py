"""The LoRA adapters of one replica: in the device's slots, and in host memory, as vLLM keeps them.

Before a step, vLLM's worker makes sure that each adapter of the step is in host memory (else it loads it from disk) and
in a slot (else it copies it there). In both places the least recently used adapter gives way. This is CPU time before
the step can start, so the overlapped loop hides a part of it behind the step before.
"""

from __future__ import annotations

from typing import NamedTuple

from serving.adapter_times import AdapterTimes
from serving.deployments.lora import LoraConfig
from serving.step_plan import StepPlan


class AdapterUse(NamedTuple):
    """The number of loads from disk, of copies into a slot, and the CPU time of both."""

    loads: int = 0
    copies: int = 0
    waiting_ns: int = 0


class AdapterSlots:
    """The adapters of one replica; at the start there are none. `use` counts their loads so far."""

    def __init__(self, times: AdapterTimes, lora: LoraConfig) -> None:
        self._times = times
        self._slots, self._host = lora.max_loras, lora.host_loras
        self._on_device: dict[str, None] = {}  # the least recently used first
        self._in_host: dict[str, None] = {}
        self._loads = self._copies = self._waiting_ns = 0

    @property
    def use(self) -> AdapterUse:
        return AdapterUse(self._loads, self._copies, self._waiting_ns)

    def ready_ns(self, plan: StepPlan) -> int:
        """Bring the adapters of `plan` into slots; return the time that this takes."""
        loads, copies = self._loads, self._copies
        for adapter in plan.adapters:
            self._touch(adapter)
        ns = round((self._loads - loads) * self._times.load_ns + (self._copies - copies) * self._times.copy_ns)
        self._waiting_ns += ns
        return ns

    def added_ns(self, adapters: dict[str, int], tokens: int) -> int:
        """Return the time that `adapters`, with their numbers of tokens, add to a step of `tokens` tokens."""
        return self._times.added_ns(adapters, tokens)

    def _touch(self, adapter: str) -> None:
        if adapter in self._in_host:
            del self._in_host[adapter]
        else:
            self._loads += 1
            if len(self._in_host) == self._host:
                oldest = next(iter(self._in_host))
                del self._in_host[oldest]
                self._on_device.pop(oldest, None)  # vLLM also empties its slot
        self._in_host[adapter] = None
        if adapter in self._on_device:
            del self._on_device[adapter]
        else:
            self._copies += 1
            if len(self._on_device) == self._slots:
                del self._on_device[next(iter(self._on_device))]
        self._on_device[adapter] = None
