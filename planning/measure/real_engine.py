"""The real engine: loading it, estimating its time for a workload, and recording runs."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tokentwin.calibration.steps.design import Pace
from tokentwin.planning.home import home
from tokentwin.planning.progress import counting
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.user_code.plugins import check_name
from tokentwin.serving.workload import Workload
from tokentwin.traces.metrics.saturation import FEWEST
from tokentwin.traces.recording_writer import check_writable

if TYPE_CHECKING:
    from tokentwin.planning.measure.engine_fleet import EngineFleet
    from tokentwin.planning.measure.vllm_engine import VllmEngine
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import ModelFiles
    from tokentwin.realengine.offered_workload import Replayed

    RealEngines = Engine | EngineFleet | VllmEngine


def load_engine(deployment: Deployment, say: Callable[[str], None], warm: bool = True) -> Engine:
    """Load an engine, and warm it up unless its times do not matter.

    On a CPU it computes in the faster data type if none is stated. `say` is called with a line about its use of memory,
    and with a line about each choice that was not stated: an unusual data type, or the maximum length of the model.

    Raises UserError if torch is not installed or the model cannot be loaded.
    """
    runs = _runnable(deployment, say)
    from tokentwin.realengine.engine import Engine

    return _ready(Engine(*runs), say, warm)


def load_engines(deployment: Deployment, say: Callable[[str], None]) -> RealEngines:
    """Load the engine of `deployment` and warm it up: vLLM if its `engine` is vLLM, else ours.

    If the deployment has a fleet, there is one engine for each replica, in separate processes.

    Raises UserError as `load_engine` does, and for a fleet that only the simulator supports.
    """
    from tokentwin.planning.measure.engine_fleet import EngineFleet

    if runs_on_vllm(deployment):
        from tokentwin.planning.measure.vllm_engine import VllmEngine
        from tokentwin.planning.measure.vllm_process import VllmProcess

        say(f"loading {deployment.model} in vLLM")
        deployment = _in_fast_dtype(deployment, say)
        if deployment.fleet is None:
            return _ready(VllmEngine(deployment), say)
        return _ready(EngineFleet(deployment, VllmProcess), say)
    if deployment.fleet is None:
        return load_engine(deployment, say)
    runs, files, draft = _runnable(deployment, say)
    from tokentwin.realengine.parallel.replica_replay import start_replica

    return _ready(EngineFleet(runs, lambda number, alone, gpus: start_replica(number, alone, files, draft, gpus)), say)


def _runnable(deployment: Deployment, say: Callable[[str], None]) -> tuple[Deployment, ModelFiles, ModelFiles | None]:
    """Return the deployment to run, the model's files, and the files of the draft model, if there is one."""
    need_torch()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch loads OpenMP
    from tokentwin.realengine.models.weights import load_model_files, model_folder

    check_name("policy", deployment.policy, POLICIES)  # errors are reported before a model is loaded
    model_folder(deployment.model, home())
    say(f"loading {deployment.model}")
    deployment = _in_fast_dtype(deployment, say)
    files = load_model_files(deployment.model, home())
    positions, scheduler = files.spec.max_positions, deployment.scheduler
    if not scheduler.states("max_model_len") and scheduler.max_model_len > positions:
        say(f"max_model_len is {positions}, which is all that {files.spec.name} can take")
        deployment = deployment.rescheduled(max_model_len=positions)
    speculative = scheduler.speculative
    draft = load_model_files(speculative.model, home()) if speculative and speculative.model else None
    return deployment, files, draft


def need_torch() -> None:
    """Raise UserError if torch is not installed."""
    if find_spec("torch") is None:
        raise UserError("torch", None, "is not installed; pip install 'tokentwin[engine]'")


def check_replays(workload: Workload, deployment: Deployment, paths: Iterable[Path], overwrite: bool) -> None:
    """Raise UserError, before a model is loaded, if `workload` cannot be replayed and recorded in all of `paths`."""
    from tokentwin.realengine.offered_workload import refuse_items

    refuse_items(workload)
    for path in paths if not runs_on_vllm(deployment) else ():  # vLLM's recordings may lie beside other files
        check_writable(path, overwrite)


def _in_fast_dtype(deployment: Deployment, say: Callable[[str], None]) -> Deployment:
    """Return `deployment` with this CPU's faster data type if it states none; without torch it stays as it is."""
    if find_spec("torch") is None:
        return deployment
    from tokentwin.realengine.devices.machine import with_fast_dtype

    deployment, chosen = with_fast_dtype(deployment)
    if chosen:
        say(chosen)
    return deployment


def calibrated_adapters(deployment: Deployment) -> list[str]:
    """Return the LoRA adapters to measure: twice as many as there are slots, if the folder has so many."""
    lora = deployment.lora
    if lora is None or lora.adapters is None:
        return []
    from tokentwin.realengine.models.adapter_files import folder_adapters

    return (folder_adapters(lora) or [f"adapter{number}" for number in range(2 * lora.max_loras)])[: 2 * lora.max_loras]


def runs_on_vllm(deployment: Deployment) -> bool:
    """Return True if the `engine` of `deployment` is vLLM, so that vLLM itself makes its real runs."""
    return bool(deployment.engine) and deployment.engine_name.name == "vllm"


_Loaded = TypeVar("_Loaded", "Engine", "EngineFleet", "VllmEngine")


def _ready(engines: _Loaded, say: Callable[[str], None], warm: bool = True) -> _Loaded:
    if engines.memory_report:
        say(engines.memory_report)
    if warm:
        say("warming up")
        engines.warm_up()
    return engines


def pace_of(engine: RealEngines) -> Pace:
    """Return a rough measurement of the time of a decode step at half the batch size, and of one prompt token."""
    config = engine.deployment.scheduler
    rows = max(config.max_num_seqs // 2, 1)
    size = min(config.max_num_batched_tokens, 128)
    decode = min(engine.run_dummy([1] * rows) for _ in range(3))
    prefill = min(engine.run_dummy([size]) for _ in range(3))
    return Pace(decode, max(prefill // size, 1))


def fitting(
    workload: Workload, engine: RealEngines, minutes: float | None, say: Callable[[str], None], runs: int = 1
) -> Workload:
    """Return the first requests of `workload` that the engine finishes `runs` times in `minutes`, or all if it is None.

    `say` is called with the expected time of a run. The engine is modelled as a queue that serves one request after the
    other; each request takes its share of decode steps at half the batch size. Several engines are modelled as one
    engine that is faster by their number. Raises UserError, with the minutes needed, for too few requests to judge.
    """
    pace, fleet = pace_of(engine), engine.deployment.fleet
    replicas = 1 if fleet is None else fleet.pools[0].replicas
    rows = min(max(engine.deployment.scheduler.max_num_seqs // 2, 1), -(-(workload.concurrency or 1 << 30) // replicas))
    requests = list(workload.requests)
    ends_ns: list[int] = []
    for request in requests:
        work_ns = request.prompt_len * pace.prompt_token_ns + request.output_len * pace.decode_step_ns // rows
        ends_ns.append(max(ends_ns[-1] if ends_ns else 0, request.arrival_ns) + work_ns // replicas)
    count, fewest = len(requests), min(FEWEST, len(requests))
    kept = count if minutes is None else bisect_right(ends_ns, minutes / runs * 60e9)
    if kept < fewest:
        least, whole = (math.ceil(runs * ends_ns[number - 1] / 6e9) / 10 for number in (fewest, count))
        remedy = f"are enough for {kept:,} of {count:,} requests; {fewest:,} take about {least:,g} minutes"
        raise UserError("minutes", minutes, f"{remedy}, and all {whole:,g}; give more minutes, or leave them out")
    cut = "" if kept == count else f", the first {kept:,} of {count:,} requests"
    say(f"replaying {workload.name} takes about {(ends_ns[kept - 1] if kept else 0) / 1e9:,.0f} s{cut}")
    return replace(workload, requests=requests[:kept])


def record_run(workload: Workload, engine: RealEngines, out: Path, overwrite: bool, what: str) -> Replayed:
    """Replay and record, with a progress bar labelled `what`. Ctrl-C ends the run and writes the part that was run."""
    requests = sum(1 for _ in workload.requests)
    with counting(what, requests) as advance:
        return recording_call(engine)(workload, out, overwrite=overwrite, progress=advance)


def recording_call(engine: RealEngines) -> Callable[..., Replayed]:
    """Return the function that replays a workload on `engine` and records it."""
    from tokentwin.planning.measure.vllm_engine import VllmEngine

    if isinstance(engine, VllmEngine):  # vLLM needs no torch here
        return engine.record
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.replay import record

    if isinstance(engine, Engine):
        return lambda workload, out, **more: record(workload, engine, out, **more)
    return engine.record


def record_whole(workload: Workload, engine: RealEngines, out: Path, overwrite: bool) -> Replayed:
    """Replay and record. If Ctrl-C ends the run early, write the part that was run and raise KeyboardInterrupt."""
    done = record_run(workload, engine, out, overwrite, workload.name)
    if done.status != "complete":
        raise KeyboardInterrupt
    return done
