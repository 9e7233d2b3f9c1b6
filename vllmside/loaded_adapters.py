"""The LoRA adapters of a vLLM engine in this process: requests for them, and the times of their loads and copies.

vLLM's worker loads an adapter from disk, and copies it into a slot, before the step that first needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

from vllm.lora.request import LoRARequest

from tokentwin.serving.errors import UserError
from tokentwin.vllmside.engine_events import NO_WORK, AdapterWork

_CONFIG = "adapter_config.json"


class LoadedAdapters:
    """The adapters in `folder`, which has the PEFT folder of each under its name; `runner` is vLLM's model runner."""

    def __init__(self, folder: str, runner: Any) -> None:
        self._folder = Path(folder)
        self._names = sorted(path.parent.name for path in self._folder.glob(f"*/{_CONFIG}"))
        self._work = NO_WORK
        self._manager = manager = runner.lora_manager
        manager._load_adapter = self._timed(manager._load_adapter, "load")
        slots = manager._adapter_manager
        slots.activate_adapter = self._timed(slots.activate_adapter, "copy")

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError for the first of `names` that is no adapter in the folder."""
        for name in names:
            if name not in self._names:
                known = ", ".join(self._names) or "none"
                remedy = f"has no {_CONFIG} in a folder of its name in {self._folder}; there: {known}"
                raise UserError("adapter", name, remedy)

    def asked(self, name: str) -> LoRARequest:
        """Return vLLM's request for the adapter `name`."""
        return LoRARequest(name, 1 + self._names.index(name), str(self._folder / name))

    def forget(self) -> None:
        """Remove all adapters from slots and from host memory."""
        self._manager.remove_all_adapters()

    def taken(self) -> AdapterWork:
        """Return the loads and copies since the last call."""
        work, self._work = self._work, NO_WORK
        return work

    def _timed(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return `call` with a clock; a copy that returns False was not needed, because the adapter has its slot."""
        count, time = ("loads", "load_ns") if what == "load" else ("copies", "copy_ns")

        def timed(*args: Any) -> Any:
            began, of_thread = perf_counter_ns(), thread_time_ns()
            result = call(*args)
            if result is not False:
                spent = {count: 1, time: perf_counter_ns() - began, "thread_ns": thread_time_ns() - of_thread}
                more = {name: getattr(self._work, name) + value for name, value in spent.items()}
                self._work = self._work._replace(**more)
            return result

        return timed
