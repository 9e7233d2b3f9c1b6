"""What the engine does when something goes wrong: one line that says what, never a hang, and no half a step."""

import multiprocessing
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

import tokentwin.realengine.parallel.rank_process  # noqa: E402
import tokentwin.realengine.parallel.ranks  # noqa: E402
from tests.realengine.test_engine_loop import OUTPUTS, engine_for, prompts, run  # noqa: E402
from tests.stand_in import StandIn  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.parallel.ranks import Ranks  # noqa: E402
from tokentwin.serving.deployments.config import Deployment  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine
NGRAM = {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}


def started(engine: Engine, steps: int = 4) -> Engine:
    """Return an engine with requests under way and, if steps overlap, one step in flight."""
    for number, prompt in enumerate(prompts(4)):
        engine.add(WorkloadRequest(number, 0, (("", len(prompt)),), OUTPUTS), prompt)
    for _ in range(steps):
        assert engine.step()
    if engine._depth > 1:
        assert engine.launch()
    return engine


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    """Return the tokens of a run without any error."""
    return run(engine_for())[0]


class Broken(Exception):
    pass


def broken(*_: object, **__: object) -> Any:
    raise Broken("said so")


def break_runner(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.runner, "launch", broken)


def break_work(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.runner.model, "forward", broken)
    engine.runner.release_graphs()


def break_packing(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tokentwin.realengine.engine.pack", broken)


def break_callback(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    for sequence in engine.sequences.values():
        patch.setattr(sequence, "_on_token", broken)


def break_policy(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "_policy", StandIn(engine._policy, schedule=broken))


@pytest.mark.parametrize("scheduler", [{}, {"async_scheduling": True}, {"async_scheduling": True, **NGRAM}])
@pytest.mark.parametrize("fault", [break_runner, break_work, break_packing, break_callback, break_policy])
def test_after_an_error_no_step_runs_until_the_engine_is_reset(fault, scheduler, whole):
    """Scheduler and device disagree then. A reset makes the engine as new: the tokens of a whole run come out."""
    engine = started(engine_for(scheduler=scheduler))
    with pytest.MonkeyPatch.context() as patch:
        fault(engine, patch)
        with pytest.raises(Broken):
            for _ in range(3):
                engine.step()
    for call in (engine.step, engine.launch, engine.finish):
        with pytest.raises(UserError, match=r"engine: 'stopped': .*said so; reset it"):
            call()
    assert engine.abort(0) is not None  # as `generate` does on its way out
    engine.reset()
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
    outputs, _ = run(engine)
    engine.close()
    engine.close()
    assert outputs == whole
    with pytest.raises(UserError, match=r"engine: 'closed'"):
        engine.step()
    with pytest.raises(UserError, match=r"engine: 'closed'"):
        engine.reset()


def test_a_rank_that_was_killed_is_one_line_and_the_engine_closes() -> None:
    """In the middle of an overlapped run: rank 0 has a step in flight whose collectives nobody will join."""
    engine = started(engine_for(scheduler={"async_scheduling": True}, tensor_parallel_size=2))
    assert engine.runner._mine._graphs
    os.kill(engine.runner._processes[0].pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"tensor_parallel_size: 2: rank 1 was ended by signal 9"):
        for _ in range(3):
            engine.step()
    engine.reset()
    engine.add(WorkloadRequest(9, 0, (("", 4),), 2), [1, 2, 3, 4])
    with pytest.raises(UserError, match=r"rank 1 was ended by signal 9"):
        engine.step()
    engine.close()
    engine.close()
    assert not torch.distributed.is_initialized()
    assert not engine.runner._processes[0].is_alive()


@pytest.mark.parametrize("error", [None, UserError("field", 3, "is bad; do better"), ValueError("a bug")])
def test_a_rank_gives_back_its_graphs_and_only_then_leaves(error, monkeypatch):
    """Rank 1, in this process: rank 0 hangs up when they have met, or making the first step fails."""
    did: list[str] = []
    mine, theirs = multiprocessing.Pipe()
    mine.send(("launch", ()))

    def join_group(*_: object) -> None:
        assert mine.recv() == ("answer", None)
        if error is None:
            mine.close()

    def launch() -> None:
        if error is not None:
            raise error

    device = SimpleNamespace(synchronize=lambda: did.append("wait"))
    gone = {name: lambda said=name: did.append(said.replace("_", " ")) for name in ("release_graphs", "close_device")}
    runner = SimpleNamespace(device=device, launch=launch, **gone)
    monkeypatch.setattr(tokentwin.realengine.parallel.rank_process, "join_group", join_group)
    monkeypatch.setattr(tokentwin.realengine.parallel.rank_process, "DistributedGroup", lambda: None)
    monkeypatch.setattr(tokentwin.realengine.parallel.rank_process, "ModelRunner", lambda *_: runner)
    monkeypatch.setattr(
        tokentwin.realengine.parallel.rank_process,
        "leave_group",
        lambda in_step: did.append("leave" if in_step else "abort"),
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    tokentwin.realengine.parallel.rank_process.serve(Deployment(), None, 1, "", theirs)  # type: ignore[arg-type]
    assert (
        did == ["wait", "release graphs", "close device", "leave"]
        if error is None
        else ["release graphs", "close device", "abort"]
    )
    if error is not None:
        said = Ranks._message(None, 1, mine)  # type: ignore[arg-type]
        if isinstance(error, UserError):
            assert isinstance(said, UserError) and str(said) == str(error)
        else:
            assert isinstance(said, RuntimeError) and str(said) == "rank 1: ValueError: a bug"


def test_a_rank_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tokentwin.realengine.parallel.ranks, tokentwin.realengine.parallel.rank_process):
        monkeypatch.setattr(module, "PATIENCE_S", 3.0)
    monkeypatch.setattr(tokentwin.realengine.parallel.ranks, "_LAST_WORDS_S", 0.2)
    engine = started(engine_for(tensor_parallel_size=2))
    os.kill(engine.runner._processes[0].pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=r"tensor_parallel_size: 2: rank 1 has not answered for 3 s"):
        engine.step()
    engine.close()
    assert not engine.runner._processes[0].is_alive()
