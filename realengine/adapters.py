"""The LoRA adapters of one engine: those in host memory, and the slots that a step's adapters take.

An adapter is loaded when a step first needs it, and then copied into a slot as a part of the device's work, because an
earlier step may still use the adapter that gives way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter_ns
from typing import NamedTuple

from tokentwin.realengine.models.adapter_files import AdapterFiles
from tokentwin.realengine.models.lora_slots import LoraSlots
from tokentwin.realengine.step_input import HostAdapter
from tokentwin.serving.adapter_places import AdapterPlaces
from tokentwin.serving.deployments.lora import LoraConfig


class StepAdapters(NamedTuple):
    """The adapters of one step.

    Attributes:
        slots: slot of each adapter
        copies: adapters to copy into slots before the step
        tokens: number of tokens with an adapter
        loads: number of adapters that were loaded from disk
        load_ns: host time of these loads
    """

    slots: Mapping[str, int]
    copies: tuple[tuple[int, HostAdapter], ...]
    tokens: int
    loads: int
    load_ns: int


class Adapters:
    """The adapters in `files`; at the start none is in host memory or in `slots`."""

    def __init__(self, lora: LoraConfig, files: AdapterFiles, slots: LoraSlots) -> None:
        self._lora, self._files, self._slots = lora, files, slots
        self.reset()

    @property
    def names(self) -> list[str]:
        """The names of all adapters in a folder; none for random adapters, which have any name."""
        return self._files.names

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError for the first of `names` that is no adapter that the engine can run."""
        for name in names:
            self._files.check(name)

    def reset(self) -> None:
        """Forget all adapters."""
        self._places = AdapterPlaces(self._lora)
        self._host: dict[str, HostAdapter] = {}

    def ready(self, tokens: Mapping[str, int]) -> StepAdapters:
        """Load what a step with these adapters lacks, and give each a slot; `tokens` are their numbers of tokens.

        Raises UserError if an adapter cannot be read any more.
        """
        places, slots, copies, load_ns = self._places, {}, [], 0
        loads = places.loads
        for name in tokens:
            is_new, lacks_slot = name not in places.in_host, name not in places.slots
            slots[name] = places.use(name)
            if is_new:
                load_ns += self._load(name)
            if lacks_slot:
                copies.append((slots[name], self._host[name]))
        return StepAdapters(slots, tuple(copies), sum(tokens.values()), places.loads - loads, load_ns)

    def _load(self, name: str) -> int:
        """Load an adapter into host memory, where others may have given way; return the time taken in ns."""
        began_ns = perf_counter_ns()
        for gone in self._host.keys() - self._places.in_host.keys():
            del self._host[gone]
        self._host[name] = self._slots.on_host(self._files.read(name))
        return perf_counter_ns() - began_ns
