"""The places of one engine's LoRA adapters: in the device's slots, and in host memory, as vLLM keeps them.

Before a step, vLLM's worker makes sure that each adapter of the step is in host memory (else it loads it from disk) and
in a slot (else it copies it there). In both places the least recently used adapter gives way. The simulator and the
real engine use the same rule.
"""

from __future__ import annotations

from tokentwin.serving.deployments.lora import LoraConfig


class AdapterPlaces:
    """The adapters in each place; at the start there are none.

    Attributes:
        slots: slot of each adapter on the device, the least recently used first
        in_host: adapters in host memory, in the same order
        loads: number of loads from disk so far
        copies: number of copies into a slot so far
    """

    def __init__(self, lora: LoraConfig) -> None:
        self._most_in_host = lora.host_loras
        self._free = list(range(lora.max_loras))[::-1]
        self.slots: dict[str, int] = {}
        self.in_host: dict[str, None] = {}
        self.loads = self.copies = 0

    def use(self, adapter: str) -> int:
        """Bring `adapter` into host memory and into a slot, if it is not there; return the slot."""
        if adapter in self.in_host:
            del self.in_host[adapter]
        else:
            self.loads += 1
            if len(self.in_host) == self._most_in_host:
                oldest = next(iter(self.in_host))
                del self.in_host[oldest]
                if oldest in self.slots:  # vLLM also empties its slot
                    self._free.append(self.slots.pop(oldest))
        self.in_host[adapter] = None
        if adapter in self.slots:
            slot = self.slots.pop(adapter)
        else:
            self.copies += 1
            slot = self._free.pop() if self._free else self.slots.pop(next(iter(self.slots)))
        self.slots[adapter] = slot
        return slot
