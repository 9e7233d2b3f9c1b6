"""What a step's times mean when the host is the slower one, on devices whose pace is known; and what a step costs."""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from lab.gpu_suite.engine_benchmark import idle_share  # noqa: E402
from tests.realengine.test_engine_loop import OUTPUTS, TIGHT, engine_for, prompts, run  # noqa: E402
from tokentwin.realengine.devices.cpu_device import CpuDevice  # noqa: E402
from tokentwin.realengine.devices.device import Pending  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.serving.kv.blocks import blocks_for  # noqa: E402
from tokentwin.serving.request import Request  # noqa: E402
from tokentwin.serving.workload import Workload, WorkloadRequest  # noqa: E402
from tokentwin.traces.recording import Recording, notes_of  # noqa: E402

pytestmark = pytest.mark.engine


class LaunchBound(CpuDevice):
    """A device that finishes everything when it is launched, as a GPU that is faster than its host."""

    def __init__(self, threaded: bool) -> None:
        super().__init__(False)
        self.asynchronous = True


class DeviceBound(CpuDevice):
    """A device that begins when the host has launched everything and waits."""

    def __init__(self, threaded: bool) -> None:
        super().__init__(False)
        self.asynchronous = True
        self._queue: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> Pending:
        self._queue.append(work)
        return _Waiting(self)

    def synchronize(self) -> None:
        while self._queue:
            self._queue.popleft()()


class _Waiting:
    def __init__(self, device: DeviceBound) -> None:
        self._device = device

    def done(self) -> bool:
        return not self._device._queue

    def wait(self) -> None:
        self._device._queue.popleft()()


class Stream(CpuDevice):
    """A GPU and its host on one made-up clock: a forward pass takes `forward_ns` of the device, a launch 5 ms.

    The host copies a step's input before the device can begin. Marks are events of a stream: they happen when
    everything before them is done.
    """

    forward_ns = 0

    def __init__(self, threaded: bool) -> None:
        super().__init__(False)
        self.asynchronous = True
        self.host_ns = self.free_ns = 0

    def mark(self) -> Any:
        self.free_ns = max(self.free_ns, self.host_ns)
        passed_ns = self.free_ns
        return SimpleNamespace(ns=lambda: passed_ns, thread_ns=None)

    def submit(self, work: Callable[[], None]) -> Pending:
        work()
        return _Reached(self, self.free_ns)


class _Reached:
    def __init__(self, stream: Stream, at_ns: int) -> None:
        self._stream, self._at_ns = stream, at_ns

    def done(self) -> bool:
        return self._at_ns <= self._stream.host_ns

    def wait(self) -> None:
        self._stream.host_ns = max(self._stream.host_ns, self._at_ns)


@pytest.mark.parametrize(("forward_ns", "idle"), [(50_000_000, 0.0), (1_000_000, 0.8)])
def test_a_device_that_waits_for_the_hosts_copies_is_idle(
    forward_ns: int, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes what the device computes, and a late host shows as idle time of the GPU suite, above its 3 %."""
    engine = engine_on(Stream, monkeypatch, async_scheduling=True)
    runner, stream = engine.runner, engine.runner.device
    forward, prepare = runner._forward, runner.attention.prepare

    def computing(batch: Any) -> Any:
        stream.free_ns = max(stream.free_ns, stream.host_ns) + forward_ns
        return forward(batch)

    def copying(*about: Any) -> None:
        stream.host_ns += 5_000_000
        prepare(*about)

    monkeypatch.setattr(runner, "_forward", computing)
    monkeypatch.setattr(runner.attention, "prepare", copying)
    for module in ("engine", "step"):
        monkeypatch.setattr(f"tokentwin.realengine.{module}.perf_counter_ns", lambda: stream.host_ns)
    _, steps = run(engine)
    decodes = [step for step in steps if not step.plan.prefill_rows]
    assert {step.end_ns - step.start_ns for step in decodes} == {forward_ns}
    share = idle_share(steps[1:])
    assert share is not None and share == pytest.approx(idle, abs=0.03)
    engine.close()


def engine_on(device: type[CpuDevice], patch: pytest.MonkeyPatch, **scheduler: Any) -> Engine:
    patch.setattr("tokentwin.realengine.devices.cpu_device.CpuDevice", device)
    return engine_for(scheduler=scheduler)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("device", [LaunchBound, DeviceBound])
def test_time_in_which_the_host_was_still_launching_can_be_told_from_device_time(
    device: type[CpuDevice], overlapped: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a step, and from a recording: plan, schedule, prepare and launch end when the step was handed over."""
    engine = engine_on(device, monkeypatch, async_scheduling=overlapped)
    _, steps = run(engine)
    bound = device is LaunchBound
    assert all(step.launch_ns > 0 for step in steps)
    assert all(step.launching_ns == (step.end_ns - step.start_ns if bound else 0) for step in steps)
    workload = Workload([WorkloadRequest(n, 0, (("", 5),), 6) for n in range(9)], "nine")
    record(workload, engine, tmp_path / "run")
    recording = Recording.load(tmp_path / "run")
    for row in recording.steps.to_pylist():
        launched = row["plan_ns"] + row["schedule_ns"] + row["prepare_ns"] + row["launch_ns"]
        assert launched >= row["end_ns"] if bound else launched <= row["start_ns"]
    assert notes_of(recording.run)["launching_share"] == bound


def test_a_device_that_is_not_asynchronous_is_never_waiting_for_a_launch() -> None:
    _, steps = run(engine_for())
    assert {step.launch_ns for step in steps} == {step.launching_ns for step in steps} == {0}


def touched(waiting: int, overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of requests that each of some steps looks at, with so many in the queue."""
    engine = engine_for(scheduler={"async_scheduling": overlapped})
    for number in range(6 + waiting):
        engine.add(WorkloadRequest(number, 0, (("", 6),), OUTPUTS), [number % 1000 + i for i in range(6)])
    looked: set[int] = set()
    known = Request.known.fget
    assert known is not None
    with monkeypatch.context() as patch:
        patch.setattr(Request, "known", property(lambda r: looked.add(r.id) or known(r)))
        counts = []
        for _ in range(12):
            looked.clear()
            step = engine.step()
            assert step is not None and (step.load.waiting, step.load.running) == (waiting, 6)
            assert step.load.waiting_blocks == 2 * waiting
            counts.append(len(looked))
    engine.close()
    return counts


@pytest.mark.pure
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_step_looks_at_no_more_requests_when_more_are_waiting(overlapped, monkeypatch):
    few, many = (touched(waiting, overlapped, monkeypatch) for waiting in (3, 3000))
    assert few == many
    assert max(few) <= 7


@pytest.mark.parametrize(
    ("policy", "overlapped"), [("vllm", False), ("vllm", True), ("static", True), ("sjf", False), ("fair", True)]
)
def test_the_demand_of_the_queue_is_what_counting_it_gives(policy: str, overlapped: bool) -> None:
    """Through preemptions, tokens that come to a preempted request, stops and aborts."""
    tight = {**TIGHT, "block_size": 1, "num_blocks": 160} if policy != "static" else {}  # every token is a block
    engine = engine_for(scheduler={**tight, "async_scheduling": overlapped}, policy=policy)
    draw = random.Random(5)
    arriving, counted, preempted = list(enumerate(prompts(24))), 0, 0
    while arriving or engine.scheduler.requests:
        for number, prompt in arriving[:3]:
            engine.add(
                WorkloadRequest(number, number, (("", len(prompt)),), OUTPUTS), prompt, stop_ids=range(0, 1024, 9)
            )
        del arriving[:3]
        if draw.random() < 0.1 and engine.scheduler.requests:
            engine.abort(draw.choice(list(engine.scheduler.requests)))
        if engine.has_room and (flight := engine.launch()):
            counted += flight.load.waiting_blocks
            preempted += len(flight.plan.preempted)
            size = engine.scheduler.config.block_size
            assert flight.load.waiting_blocks == sum(blocks_for(r.known, size) for r in engine.scheduler.waiting)
            if engine.has_room:
                continue
        engine.finish()
    while engine.finish():
        pass
    engine.close()
    assert counted and (preempted or not tight)
    assert engine._demand.blocks == 0


@pytest.mark.parametrize("cuda", [False, True])
def test_warm_up_runs_every_bucket_and_sizes_from_the_largest_down(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(scheduler={"max_num_seqs": 20, "max_num_batched_tokens": 100, "max_model_len": 64})
    runner = engine.runner
    ran: list[tuple[list[int], bool]] = []
    monkeypatch.setattr(runner, "dummy_step", lambda sizes, draw=False: ran.append((sizes, draw)))
    if cuda:
        monkeypatch.setattr(runner.device, "torch_device", torch.device("cuda", 0))
    engine.warm_up()
    decodes = [sizes for sizes, draw in ran if max(sizes) == 1 and not draw]
    assert decodes == [[1] * rows for rows in (24, 16, 8, 4, 2, 1)]
    rest = ran[len(decodes) :]
    steps = [sizes for sizes, draw in rest if not draw]
    assert steps[0] == [*[1] * 18, 64, 18]  # all that a step may hold, rows and tokens
    tokens = [sum(sizes) for sizes in steps]
    assert tokens == ([100, 75, 50, 37, 25, 19, 12, 9, 6, 5, 3] if cuda else [100, 50, 25])
    assert [sizes for sizes, draw in rest if draw] == ([[1] * 24, [1]] if cuda else [[1]])
