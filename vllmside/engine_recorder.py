"""The recorder of one engine, which connects its events, the thread that writes them, and the files."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import yaml

from tokentwin.serving.errors import UserError, raised
from tokentwin.traces.live_recording import LiveRecording
from tokentwin.traces.recording_writer import DEPLOYMENT, RecordingWriter
from tokentwin.vllmside.engine_events import AdapterWork, EngineEvents, Event, Flight
from tokentwin.vllmside.record_settings import RecordSettings
from tokentwin.vllmside.recorded_run import RecordedRows, RecordedRun
from tokentwin.vllmside.vllm_deployment import LEAST_BLOCKS, VllmDeployment, read_deployment
from tokentwin.vllmside.vllm_interface import release
from tokentwin.vllmside.writer_thread import EventWriter, SameThread, WriterThread

_LOG = logging.getLogger("vllm.tokentwin")
_LEAST_BLOCKS = 1 << 14
_CLOSE_S = 4.0  # vLLM kills an engine 5 s after it has asked the engine to end

P = ParamSpec("P")
T = TypeVar("T")


def _harmless(
    note: Callable[Concatenate[EngineRecorder, P], T],
) -> Callable[Concatenate[EngineRecorder, P], T | None]:
    """Make `note` do nothing without a recording, and make its errors end only the recording."""

    @wraps(note)
    def noted(self: EngineRecorder, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if not self.goes_on:
            return None
        try:
            return note(self, *args, **kwargs)
        except Exception as error:
            self.end(str(error) if isinstance(error, UserError) else raised(error))
            return None

    return noted


class EngineRecorder:
    """The recorder of one scheduler. Its methods never raise.

    Attributes:
        run: columns of `runs` that are known at the start
    """

    def __init__(
        self, events: EngineEvents, writer: EventWriter, recorded: RecordedRun, run: Mapping[str, Any]
    ) -> None:
        self.cache_resets = 0
        self.run = run
        self._events = events
        self._writer = writer
        self._recorded = recorded
        self.now = events.now
        atexit.register(self.close)

    @property
    def due_ns(self) -> dict[int, int]:
        """The due times of future requests in ns, by number; the sender of requests fills it."""
        return self._events.due_ns

    def watch_speed(self, speed: Callable[[], float | None]) -> None:
        """Record the result of `speed` with each step."""
        self._events.watch_speed(speed)

    def watch_adapters(self, taken: Callable[[], AdapterWork]) -> None:
        """Record the loads and copies of LoRA adapters that `taken` returns after each step."""
        self._events.watch_adapters(taken)

    @property
    def goes_on(self) -> bool:
        """True as long as the engine is recorded."""
        return self._writer.goes_on

    def end(self, why: str) -> None:
        """Stop recording for the reason `why`; the recorded part stays a valid recording."""
        self._writer.end(why)

    @_harmless
    def arriving(self, request: Any) -> None:
        self._events.arrived(request)

    @_harmless
    def preempting(self, request: Any) -> None:
        self._events.preempting(request)

    @_harmless
    def planned(self, scheduler: Any, output: Any, plan_ns: int) -> None:
        self._events.planned(scheduler, output, plan_ns)

    @_harmless
    def returning(self, output: Any, result: Any) -> Flight | None:
        return self._events.returning(output, result)

    @_harmless
    def returned(self, flight: Flight | None, outputs: Any) -> None:
        if flight is not None:
            self._events.returned(flight, outputs.values())

    @_harmless
    def proposing(self) -> None:
        self._events.proposing()

    @_harmless
    def leaving(self, names: str | Iterable[str] | None) -> list[str]:
        return self._events.leaving(names)

    @_harmless
    def left(self, names: list[str] | None) -> None:
        self._events.left(names or ())

    @_harmless
    def settle(self) -> None:
        """Pass on the waiting events, which are now complete."""
        self._events.settle()

    def close(self, status: str = "complete") -> None:
        """Finish the recording when the engine ends. Further calls do nothing."""
        atexit.unregister(self.close)
        if self._writer.closed:
            return
        if self.goes_on:
            self._events.settle()
        self._writer.close(partial(self._finish, status), _CLOSE_S)

    def _finish(self, status: str) -> None:
        notes = {**json.loads(self.run["notes"]), "prefix_cache_resets": self.cache_resets}
        self._recorded.close(self.now(), status if self.goes_on else "interrupted", notes)


class _Nothing(EngineRecorder):
    """A recorder that does nothing, for an engine that cannot be recorded."""

    goes_on = False

    def __init__(self) -> None:
        self.cache_resets = 0
        self.run = {}

    def now(self) -> int:
        return 0

    @property
    def due_ns(self) -> dict[int, int]:
        return {}

    def watch_speed(self, speed: Callable[[], float | None]) -> None:
        pass

    def watch_adapters(self, taken: Callable[[], AdapterWork]) -> None:
        pass

    def close(self, status: str = "complete") -> None:
        pass


def open_recorder(scheduler: Any, settings: RecordSettings, version: str) -> EngineRecorder:
    """Return a recorder of vLLM's `scheduler`, or one that does nothing if recording is impossible."""
    try:
        return _open(scheduler, settings, version)
    except Exception as error:
        why = str(error) if isinstance(error, UserError) else raised(error)
        _LOG.error("tokentwin: nothing is recorded: %s", why)
        return _Nothing()


def rows_recorder(scheduler: Any, rows: RecordedRows, started_ns: int, version: str) -> EngineRecorder:
    """Open a recorder that passes its rows to `rows` at once; times are relative to `started_ns` (perf_counter_ns).

    The numbers of requests are in their names. An error ends the recording, and `goes_on` is then False.
    """
    run, _ = _run_columns(scheduler, "", "", version)
    recorded = _recorded_run(scheduler, rows)
    writer = SameThread(recorded)
    return EngineRecorder(_events(scheduler, writer.put, started_ns, numbered=True), writer, recorded, run)


def _open(scheduler: Any, settings: RecordSettings, version: str) -> EngineRecorder:
    config = scheduler.vllm_config
    parallel = config.parallel_config
    if config.model_config.runner_type not in ("generate", "pooling"):
        remedy = "cannot be recorded; only generate and pooling can"
        raise UserError("runner_type", config.model_config.runner_type, remedy)
    rank = parallel.data_parallel_rank if parallel.data_parallel_size > 1 else None
    path = _free_path(Path(settings.record) if rank is None else Path(settings.record) / f"rank-{rank}")
    run, deployment = _run_columns(scheduler, path.name, settings.workload, version, settings.model, settings.adapters)
    writer = RecordingWriter(path, run)
    _write_deployment(path, deployment, config)
    recorded = _recorded_run(scheduler, LiveRecording(writer, run))
    thread = WriterThread(recorded, settings.most_waiting_rows)
    events = _events(scheduler, thread.put, time.perf_counter_ns(), settings.numbered)
    _LOG.info("tokentwin: this engine is recorded in %s", path)
    return EngineRecorder(events, thread, recorded, run)


def _run_columns(
    scheduler: Any, name: str, workload: str, version: str, model: str = "", adapters: str | None = None
) -> tuple[dict[str, Any], VllmDeployment]:
    """Return the columns of `runs` that are known at the start, and the deployment in them."""
    config, kv_cache = scheduler.vllm_config, scheduler.kv_cache_config
    described = read_deployment(config, kv_cache, scheduler.block_size, release(version), encoder=_encoder(scheduler))
    if (policy := getattr(scheduler, "policy_name", None)) is not None:  # one of our schedulers, with its own settings
        decided = {"policy": policy, "scheduler": scheduler.settings}
        described = replace(described, deployment=described.deployment.model_copy(update=decided))
    if model:
        described = replace(described, deployment=described.deployment.model_copy(update={"model": model}))
    if adapters and (lora := described.deployment.lora) is not None:
        where = {"lora": lora.model_copy(update={"adapters": adapters})}
        described = replace(described, deployment=described.deployment.model_copy(update=where))
    notes: dict[str, Any] = {"engine": f"vllm {version}", "unmodelled": dict(described.unmodelled)}
    if config.parallel_config.data_parallel_size > 1:
        notes["data_parallel_rank"] = config.parallel_config.data_parallel_rank
    run = {
        "run_id": name,
        "clock": "wall",
        "workload": workload,
        "deployment": described.deployment.model_dump_json(),
        "replicas": 1,
        "seed": config.model_config.seed or 0,
        "hardware": json.dumps(_hardware(config, version)),
        "calibration": "",
        "num_blocks": max(kv_cache.num_blocks, LEAST_BLOCKS) - 1,
        "block_size": scheduler.block_size,
        "notes": json.dumps(notes),
    }
    return run, described


def _encoder(scheduler: Any) -> tuple[int, int] | None:
    """Return the encoder's budget of a step and the size of its cache, in embeddings; None without an encoder."""
    budget = getattr(scheduler, "max_num_encoder_input_tokens", 0)
    return (budget, scheduler.encoder_cache_manager.cache_size) if budget else None


def _recorded_run(scheduler: Any, recording: RecordedRows) -> RecordedRun:
    most_blocks = max(4 * scheduler.kv_cache_config.num_blocks, _LEAST_BLOCKS)
    lookahead = getattr(scheduler.vllm_config, "num_hash_lookahead_tokens", 0)
    return RecordedRun(recording, scheduler.hash_block_size, most_blocks, lookahead)


def _events(scheduler: Any, put: Callable[[Event], None], started_ns: int, numbered: bool) -> EngineEvents:
    config = scheduler.vllm_config
    return EngineEvents(
        put,
        max_model_len=config.model_config.max_model_len,
        drafts=config.speculative_config is not None,
        adapters=getattr(config, "lora_config", None) is not None,
        overlapped=bool(config.scheduler_config.async_scheduling),
        times_thread=_computes_here(config),
        started_ns=started_ns,
        started_s=time.time() - (time.perf_counter_ns() - started_ns) / 1e9,
        numbered=numbered,
    )


def _free_path(path: Path) -> Path:
    """Return `path` if it does not exist or is an empty directory, else the first such of PATH-2, PATH-3, ..."""
    free, number = path, 1
    while free.exists() and (not free.is_dir() or any(free.iterdir())):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _computes_here(config: Any) -> bool:
    """Return True if the model runs in the scheduler's thread, which it does on a CPU in one process."""
    backend = config.parallel_config.distributed_executor_backend
    return str(config.device_config.device_type) == "cpu" and backend in (None, "uni")


def _hardware(config: Any, version: str) -> dict[str, str | int]:
    device = str(config.device_config.device_type)
    hardware: dict[str, str | int] = {
        "device": device,
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "vllm": version,
    }
    if (torch := sys.modules.get("torch")) is not None:
        hardware["torch"] = torch.__version__
        if device == "cuda":
            hardware["gpu"] = torch.cuda.get_device_name()
            hardware["cuda"] = torch.version.cuda or ""
        else:
            hardware["threads"] = torch.get_num_threads()
    return hardware


def _write_deployment(path: Path, described: VllmDeployment, config: Any) -> None:
    stated = described.deployment.model_dump(mode="json", exclude_defaults=True)
    head = [f"# {config.model_config.model} as vLLM had resolved it"]
    head += [f"# not described here: {name}: {value}" for name, value in described.unmodelled.items()]
    text = "\n".join(head) + "\n" + yaml.safe_dump(stated, sort_keys=False)
    (path / DEPLOYMENT).write_text(text, encoding="utf-8")
