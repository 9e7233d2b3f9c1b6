"""The check of whole engines: it holds for the engine as it is, and fails for one with a fault."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

import torch

from lab.gpu_suite import end_to_end
from lab.gpu_suite.end_to_end import Checked, check_engine, checked, engine_checks
from tokentwin.realengine.devices.cpu_device import CpuDevice
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.seating import Seating
from tokentwin.realengine.sequence import TokenSequence

pytestmark = pytest.mark.engine


def small() -> Checked:
    """Return a float32 model of one layer."""
    first = checked("cpu", dry_run=True)[0]
    return first._replace(spec=first.spec.model_copy(update={"num_layers": 1}))


def verdicts() -> list[bool]:
    return [row["ok"] for row in check_engine(small())]


def test_the_engine_holds_and_everything_that_should_happens() -> None:
    rows = list(check_engine(small()))
    assert [row["ok"] for row in rows] == [True, True, True], rows
    assert rows[0]["error"] < 1e-5
    assert set(rows[2]["seen"]) == set(end_to_end._MUST_HAPPEN)


def neighbours_seat(patch: pytest.MonkeyPatch) -> None:
    """Read a token that the host has not seen from the seat beside the request's."""
    inputs = TokenSequence.inputs
    patch.setattr(
        TokenSequence, "inputs", lambda self, start, count, seat, *drafts: inputs(self, start, count, seat ^ 1, *drafts)
    )


def stale_graph(patch: pytest.MonkeyPatch) -> None:
    """Make a graph repeat the result of its second replay for ever."""

    def capture(self: CpuDevice, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        given: list[torch.Tensor] = []

        def replay() -> torch.Tensor:
            if len(given) < 2:
                given.append(work())
            return given[-1]

        return replay

    patch.setattr(CpuDevice, "capture", capture)


def swapped_tokens(patch: pytest.MonkeyPatch) -> None:
    """Give two requests of a step each other's tokens."""
    launch = Engine.launch

    def launched(self: Engine) -> Any:
        flight = launch(self)
        if flight is not None and self._depth == 2 and len(flight.sampled_rows) > 1:
            wait = flight.launched.wait
            flight.launched.wait = lambda: [*reversed((tokens := wait())[:2]), *tokens[2:]]  # type: ignore[method-assign]
        return flight

    patch.setattr(Engine, "launch", launched)


def stale_block(patch: pytest.MonkeyPatch) -> None:
    """Keep an old block table when another request takes its seat."""

    def follow(self: Seating, plan: Any) -> None:
        for request in plan.preempted:
            self.leave(request.id)
        for request in plan.admitted:
            seat = self._seats[request.id] = self._free.pop()
            self._entered[seat] = request.blocks

    patch.setattr(Seating, "follow", follow)


@pytest.mark.parametrize("fault", [neighbours_seat, stale_graph, swapped_tokens, stale_block])
def test_a_fault_is_seen(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert not all(verdicts())


def test_what_did_not_happen_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    roomy = engine.deployment.scheduler.model_copy(update={"num_blocks": 1200})
    deployment = engine.deployment.model_copy(update={"scheduler": roomy})
    rows = list(check_engine(engine._replace(deployment=deployment)))
    assert [row["ok"] for row in rows] == [True, True, False]
    assert rows[2]["error"] == "no preemptions"


def test_an_engine_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Engine, "launch", broken)
    rows = [row for check in engine_checks("cpu", dry_run=True) for row in check()]
    assert len(rows) == 2 and not any(row["ok"] for row in rows)
    assert "illegal memory access" in rows[0]["error"]


def test_on_a_gpu_every_path_is_checked() -> None:
    engines = checked("cuda", dry_run=False)
    assert {engine.deployment.attention for engine in engines} == {"triton", "hybrid"}
    assert {engine.deployment.kv_cache_dtype for engine in engines} >= {"fp8"}
    assert {engine.deployment.quantization for engine in engines} == {"none", "fp8", "int4", "int8"}
    assert all(
        engine.deployment.scheduler.async_scheduling and not engine.deployment.enforce_eager for engine in engines
    )
    assert all(engine.limit <= 0.15 for engine in engines)
