"""Several real engines, each in its own process, behind one router of the simulator.

This process has the clients and the router, and writes the recording. The router decides only by the requests that it
has sent and the reports that it has received. Both are recorded with their times, so that every choice can be repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Protocol, cast

from tokentwin.realengine.offered_workload import OfferedRequests, Replayed, ReplayTexts, adapters_of, run_columns
from tokentwin.realengine.parallel.replica_pipe import About, Arrival, End, HangUp, Ran, Report
from tokentwin.realengine.undisturbed import ctrl_c_heard, no_cycle_search
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest, with_session_ends
from tokentwin.sim.routed_replica import RoutedReplica
from tokentwin.sim.router import ReplicaSet, Router, find_router
from tokentwin.traces.recording_writer import RecordingWriter

_LONGEST_WAIT_NS = 100_000_000  # maximum wait before it checks for Ctrl-C
_POLLED_NS = 1_000_000  # a wait ends this long before the next arrival, because waits are rounded up


class EngineProcess(Protocol):
    """A process with one engine. Its first message is `About`; see `tokentwin.realengine.parallel.replica_pipe`."""

    number: int
    pipe: Connection

    def begin(self, call: str, *arguments: object) -> None: ...
    def ask(self, call: str, *arguments: object) -> Any: ...
    def send(self, message: object) -> None: ...
    def heard(self) -> Any: ...
    def close(self) -> None: ...


class EngineFleet:
    """The engines of `deployment.fleet`, loaded.

    `start` starts a process with one engine. Its arguments are the number of the engine, the deployment without the
    fleet, and the engine's GPUs, if any.

    Attributes:
        about: the description that each process sent of its engine
        deployment: the resolved deployment of an engine, with the fleet
        memory_report: description of the first engine's use of memory; empty if it is not known

    Raises UserError for a fleet that only the simulator supports, and for settings that an engine does not support.
    """

    def __init__(self, deployment: Deployment, start: Callable[[int, Deployment, str | None], EngineProcess]) -> None:
        fleet = real_fleet(deployment)
        self._ends = ExitStack()
        alone = deployment.model_copy(update={"fleet": None})
        self._engines: list[EngineProcess] = []
        try:
            for number, gpus in enumerate(gpus_of(deployment, fleet.pools[0].replicas)):
                engine = start(number, alone, gpus)
                self._ends.callback(engine.close)
                self._engines.append(engine)
            self.about = [cast(About, engine.heard()) for engine in self._engines]
        except BaseException:
            self.close()
            raise
        resolved = parse(Deployment, json.loads(self.about[0].deployment), where="engine")
        stated = {"model": deployment.model, "threads": deployment.threads, "lora": deployment.lora}
        self.deployment = resolved.model_copy(update={**stated, "fleet": fleet})
        self.memory_report = self.about[0].memory_report

    @property
    def replicas(self) -> int:
        return len(self._engines)

    def _all(self, call: str, *arguments: object) -> list[Any]:
        """Return every engine's answer to a call; all engines run the call at the same time."""
        for engine in self._engines:
            engine.begin(call, *arguments)
        return [engine.heard() for engine in self._engines]

    def warm_up(self) -> None:
        self._all("warm_up")

    def time_operations(self) -> None:
        self._all("time_operations")

    def run_dummy(self, sizes: Sequence[int]) -> int:
        """Run one step on the first engine, as `Engine.run_dummy` does."""
        return cast(int, self._engines[0].ask("run_dummy", list(sizes)))

    def canary(self) -> int:
        """Return the median of the engines' canary times in ns; the canaries run one after the other."""
        return int(median(engine.ask("canary") for engine in self._engines))

    def close(self) -> None:
        """End the processes. It may be called more than once, and after an error."""
        self._ends.close()

    def record(
        self,
        workload: Workload,
        out: str | Path,
        *,
        seed: int = 0,
        overwrite: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Replayed:
        """Replay and record a workload on all engines, as `tokentwin.realengine.replay.record` does on one."""
        requests = list(workload.requests)
        if adapters := adapters_of(requests):
            self._all("check_adapters", adapters)
        workload = replace(workload, requests=requests)
        if self.deployment.scheduler.kv_eviction == "session":
            workload = with_session_ends(workload)
        first = self.about[0]
        columns = run_columns(Path(out).name, workload, self.deployment, first.hardware, first.num_blocks, seed)
        run = {**columns, "replicas": self.replicas}
        writer = RecordingWriter(out, run, workload=workload, overwrite=overwrite)
        try:
            self._all("reset")
            before = self.canary()
            router = find_router(self._fleet.router.name, **self._fleet.router.settings)
            block_size = self.deployment.scheduler.block_size
            routed = _RoutedRun(self._engines, self.about, block_size, router, workload, writer, progress)
            with no_cycle_search(), ctrl_c_heard() as stopped:
                status, duration_ns = routed.run(stopped)
            after = self.canary()
            notes = {"canary_before_ns": before, "canary_after_ns": after, **first.notes}
            shares = [ran.launching_share for ran in routed.ran if ran.launching_share is not None]
            if shares:
                notes["launching_share"] = sum(shares) / len(shares)
            replica_lives = [self._life(number) for number in range(self.replicas)]
            routed.texts.keep_sent(writer)
            writer.close(status, duration_ns=duration_ns, notes=json.dumps(notes), replica_lives=replica_lives)
        except BaseException:
            writer.discard()
            raise
        return Replayed(status, len(requests), routed.finished, duration_ns, before, after)

    @property
    def _fleet(self) -> FleetConfig:
        return cast(FleetConfig, self.deployment.fleet)

    def _life(self, number: int) -> dict[str, Any]:
        """Return the lifetime row of a replica that existed from the start to the end of the run."""
        pool, gpus = self._fleet.pools[0].name, self.deployment.gpus
        life = {"replica": number, "pool": pool, "gpus": gpus, "started_ns": 0, "ready_ns": 0}
        return {**life, "ended_ns": None, "ended_by": ""}


class _RoutedRun:
    """A run of a workload on the engines.

    All messages to the router come through this class, one after the other, never two at a time.
    """

    def __init__(
        self,
        engines: Sequence[EngineProcess],
        about: Sequence[About],
        block_size: int,
        router: Router,
        workload: Workload,
        writer: RecordingWriter,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.finished = 0
        self.ran: list[Ran] = []
        self._engines = {engine.pipe: engine for engine in engines}
        kv_tokens = [one.num_blocks * block_size for one in about]
        self._routed = [RoutedReplica(*numbered) for numbered in enumerate(kv_tokens)]
        self._ready = ReplicaSet()
        for replica in self._routed:
            self._ready.join(replica.as_replica)
        self._router = router
        self._writer = writer
        self._progress = progress
        self._ended = 0
        self._offered = OfferedRequests(workload)
        self.texts = ReplayTexts(workload, about[0].vocab_size, about[0].forces)
        self._open: dict[int, tuple[WorkloadRequest, int]] = {}  # open requests, and the replica of each
        self._heard_ns: dict[tuple[int, int], int] = {}  # by replica and step, until the row of the step comes
        self._started_ns = self._last_ns = 0

    def run(self, stopped: Callable[[], bool]) -> tuple[str, int]:
        """Run the workload; return the status of the run, and its duration in ns."""
        engines = list(self._engines.values())
        for engine in engines:
            engine.begin("replay")
        for engine in engines:
            engine.heard()  # the engine is ready, after a garbage collection
        self._started_ns = perf_counter_ns()
        for engine in engines:
            engine.send(self._started_ns)
        while self._busy and not stopped():
            self._send()
            self._listen()
        status = "interrupted" if stopped() and self._busy else "complete"
        for engine in engines:
            engine.send(End())
        while len(self.ran) < len(self._engines):
            self._listen()
        return status, self._now()

    @property
    def _busy(self) -> bool:
        return bool(self._open) or not self._offered.exhausted

    def _now(self) -> int:
        """Return the time since the start of the run, in ns."""
        return perf_counter_ns() - self._started_ns

    def _moment(self) -> int:
        """Return the current time in ns, always later than the times returned before."""
        self._last_ns = max(self._now(), self._last_ns + 1)
        return self._last_ns

    def _send(self) -> None:
        now = self._now()
        engines = list(self._engines.values())
        for id in self._offered.hang_ups(now):
            if id in self._open:
                engines[self._open[id][1]].send(HangUp(id))
        for arrived in map(self.texts.sent, self._offered.arrivals(now)):
            send_ns = self._moment()
            replica = cast(RoutedReplica, self._router.choose(arrived, self._ready))
            replica.takes(arrived.id, arrived.prompt_len, arrived.output_limit)
            self._open[arrived.id] = arrived, replica.index
            engines[replica.index].send(Arrival(arrived, *self.texts.tokens(arrived), send_ns))

    def _listen(self) -> None:
        """Handle messages of the engines until the next arrival is due, or the maximum wait has passed."""
        due_ns = self._offered.next_ns
        ahead_ns = _LONGEST_WAIT_NS if due_ns is None else min(due_ns - self._now(), _LONGEST_WAIT_NS)
        waited_s = max(ahead_ns - _POLLED_NS, 0) / 1e9
        for pipe in cast("list[Any]", wait(list(self._engines), waited_s)):
            engine = self._engines[pipe]
            said = engine.heard()
            if isinstance(said, Ran):
                self.ran.append(said)
            else:
                self._hear(engine.number, said)

    def _hear(self, number: int, report: Report) -> None:
        replica, heard_ns = self._routed[number], self._moment()
        if report.step is not None:
            self._heard_ns[number, report.step] = heard_ns
        for id in report.sampled:
            replica.got(id, 1)
        for id, output in report.said.items():
            self.texts.said(id, output)
        for row in report.requests:
            self._left(replica, row, heard_ns)
        for row in report.steps:
            step_heard_ns = self._heard_ns.pop((number, row["step"]))
            self._writer.add_step(**{**row, "replica": number, "heard_ns": step_heard_ns})

    def _left(self, replica: RoutedReplica, row: dict[str, Any], heard_ns: int) -> None:
        request, _ = self._open.pop(row["request_id"])
        ended = row["status"] != "unfinished"
        self._writer.add_request(
            **{**row, **request.labels, "replica": replica.index, "heard_ns": heard_ns if ended else None}
        )
        if not ended:
            return
        replica.loses(request.id)
        self._ended += 1
        self.finished += row["status"] == "finished"
        self._offered.ended(request, row["send_ns"] if row["end_ns"] is None else row["end_ns"])
        if self._progress is not None:
            self._progress(self._ended)


def real_fleet(deployment: Deployment) -> FleetConfig:
    """Return the fleet of `deployment`. Raises UserError unless it is one pool of identical engines behind a router."""
    fleet = deployment.fleet
    assert fleet is not None
    remedy = "works only in the simulator; leave it out for real engines"
    if len(fleet.pools) > 1:
        names = ", ".join(pool.name for pool in fleet.pools)
        raise UserError("fleet.pools", names, "real engines are one pool; leave the others out")
    pool = fleet.pools[0]
    plain = PoolConfig(name=pool.name, replicas=pool.replicas)
    for name in PoolConfig.model_fields:
        if getattr(pool, name) != getattr(plain, name):
            raise UserError(f"fleet.pools.{pool.name}.{name}", str(getattr(pool, name)), remedy)
    for name in ("admission", "failures", "autoscaler", "processes"):
        if getattr(fleet, name) != getattr(FleetConfig(), name):
            raise UserError(f"fleet.{name}", None, remedy)
    if fleet.router.name == "predicted-latency":
        raise UserError("fleet.router", fleet.router.name, "works only in the simulator; choose another router")
    find_router(fleet.router.name, **fleet.router.settings)
    if deployment.gpu_memory_utilization is not None and deployment.device == "cpu" and pool.replicas > 1:
        shared = "means one engine, and these share their memory; state scheduler.num_blocks instead"
        raise UserError("gpu_memory_utilization", deployment.gpu_memory_utilization, shared)
    return fleet


def gpus_of(deployment: Deployment, replicas: int) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each replica; each has its own GPUs. Raises UserError if there are too few."""
    if deployment.device == "cpu":
        return [None] * replicas
    per_replica, here = deployment.tensor_parallel_size, _gpus_here()
    if here < per_replica * replicas:
        remedy = f"need {per_replica * replicas} GPUs, and this machine has {here}; lower it"
        raise UserError("replicas", replicas, remedy)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(here)))).split(",")
    return [",".join(visible[at * per_replica : (at + 1) * per_replica]) for at in range(replicas)]


def _gpus_here() -> int:
    """Return the number of GPUs that this process may use; without torch, count the driver's devices."""
    if find_spec("torch") is None:
        stated = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len(list(Path("/dev").glob("nvidia[0-9]*")) if stated is None else list(filter(None, stated.split(","))))
    import torch

    return torch.cuda.device_count()
