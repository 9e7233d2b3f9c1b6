"""The CUDA device against a made-up driver: what goes to which stream, what is waited for, what is given back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

import tokentwin.realengine.devices.cuda_device  # noqa: E402
import tokentwin.realengine.host_tier  # noqa: E402
from tests.realengine.test_engine_loop import engine_for  # noqa: E402
from tokentwin.realengine.attention.kv_cache import KvCache  # noqa: E402
from tokentwin.realengine.devices.cpu_device import CpuDevice  # noqa: E402
from tokentwin.realengine.devices.cuda_device import CudaDevice  # noqa: E402
from tokentwin.realengine.devices.device import Device  # noqa: E402
from tokentwin.realengine.host_tier import StreamCopier  # noqa: E402
from tokentwin.realengine.models.model import Model  # noqa: E402

pytestmark = pytest.mark.engine

DEFAULT = "default stream"


class FakeCuda:
    """A stand-in for `torch.cuda` with one GPU. The current stream is a state of the thread, as in torch.

    done: what was asked for, and on which stream. stuck: True if events never happen.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self.done: list[tuple[str, object]] = []
        self.stuck = False
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object = None) -> None:
                cuda.done.append(("event", stream or cuda.current))

            def query(self) -> bool:
                return not cuda.stuck

            def synchronize(self) -> None:
                assert not cuda.stuck, "this would never come back"

            def elapsed_time(self, other: object) -> float:
                return 0.0

        class CUDAGraph:
            def __init__(self) -> None:
                self.alive = False
                self.shared: object = None

            def pool(self) -> object:
                assert self.alive, "a pool is gone with the last of its graphs"
                return self.shared or self

            def replay(self) -> None:
                assert self.alive
                cuda.done.append(("replay", cuda.current))

            def reset(self) -> None:
                self.alive = False

        self.Event, self.CUDAGraph = Event, CUDAGraph

    @property
    def current(self) -> object:
        return getattr(self._thread, "stream", DEFAULT)

    def launch(self) -> None:
        """Launch a kernel, as torch would."""
        self.done.append(("kernel", self.current))

    def Stream(self, device: object) -> object:
        return f"a stream of {device}"

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self._thread.stream = self.current, stream
        yield
        self._thread.stream = before

    @contextmanager
    def graph(self, graph: Any, pool: object, stream: object) -> Iterator[None]:
        with self.stream(stream):
            yield
        graph.alive, graph.shared = True, pool

    def set_device(self, index: int) -> None: ...

    def get_device_properties(self, index: int) -> object:
        return SimpleNamespace(multi_processor_count=132)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(
        tokentwin.realengine.devices.cuda_device, "torch", SimpleNamespace(cuda=fake, device=torch.device)
    )
    return fake


def elsewhere(work: Any) -> None:
    """Run `work` on a thread that did not make the device."""
    failed = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_whatever_thread_submits_work_goes_to_the_devices_own_stream(cuda: FakeCuda) -> None:
    device = CudaDevice(0)

    def submit() -> None:
        def work() -> None:
            device.mark()
            cuda.launch()
            graph = device.capture(lambda: cuda.launch())  # type: ignore[arg-type, return-value]
            graph()

        device.submit(work).wait()
        device.synchronize()
        assert cuda.current == DEFAULT  # the caller's own work is not moved

    for anywhere in (submit, lambda: elsewhere(submit)):
        cuda.done.clear()
        anywhere()
        assert {what for what, _ in cuda.done} == {"event", "kernel", "replay"}
        assert {stream for _, stream in cuda.done} == {"a stream of cuda:0"}


def test_copies_run_beside_the_steps_on_a_stream_of_their_own(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch = {"cuda": cuda, "inference_mode": torch.inference_mode}
    monkeypatch.setattr(tokentwin.realengine.host_tier, "torch", SimpleNamespace(**of_torch))
    monkeypatch.setattr(cuda, "Stream", lambda device: f"a stream for copies of {device}")
    copy = StreamCopier(torch.device("cuda", 0)).submit(cuda.launch)
    assert cuda.done == [(what, "a stream for copies of cuda:0") for what in ("event", "kernel", "event")]
    cuda.stuck = True
    assert not copy.done()
    cuda.stuck = False
    assert copy.done()
    began_ns, ended_ns = copy.times_ns()
    assert began_ns == ended_ns == copy.times_ns()[1] > 0


def test_weights_and_kv_are_made_where_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, made = [], []

    @contextmanager
    def current(_: Device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    for kind in (Model, KvCache):
        make = kind.__init__
        monkeypatch.setattr(
            kind,
            "__init__",
            lambda *a, make=make, kind=kind, **k: (made.append((kind, bool(inside))), make(*a, **k))[1],
        )
    monkeypatch.setattr(CpuDevice, "current", current)
    engine_for()
    assert made == [(Model, True), (KvCache, True)]


@pytest.mark.parametrize("wait", ["step", "synchronize"])
def test_waiting_for_a_device_that_is_stuck_ends_when_the_watch_says_so(cuda: FakeCuda, wait: str) -> None:
    """As it is for NCCL when a rank is lost."""
    device = CudaDevice(0)
    pending = device.submit(cuda.launch)
    cuda.stuck = True
    waited = []

    def watch(waited_s: float) -> None:
        waited.append(waited_s)
        if len(waited) == 3:
            raise RuntimeError("rank 1 is lost")

    device.watch = watch
    assert not pending.done()
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        pending.wait() if wait == "step" else device.synchronize()
    assert waited == sorted(waited)


def test_graphs_share_memory_and_are_released_whoever_holds_them(cuda: FakeCuda) -> None:
    device = CudaDevice(0)
    graphs = [device.capture(lambda: cuda.launch()) for _ in range(3)]  # type: ignore[arg-type, return-value]
    owned = list(device._graphs)
    assert len({id(graph.pool()) for graph in owned}) == 1
    owned.clear()
    del graphs[2]  # of the others one still has the pool
    graphs.append(device.capture(lambda: cuda.launch()))  # type: ignore[arg-type, return-value]
    device.release_graphs()
    for graph in graphs:
        with pytest.raises(AssertionError):
            graph()
    device.capture(lambda: cuda.launch())()  # type: ignore[arg-type, return-value]
    device.close()
    device.close()
