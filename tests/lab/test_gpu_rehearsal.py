"""A rehearsal of a GPU's first minutes: the whole suite in miniature, with faults planted in every phase.

The suite must end within its time, keep what it measured, and say on its page what it did not do.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

import torch

from lab.gpu_suite import phases as suite_phases
from lab.gpu_suite.page import faults, page, undone
from lab.gpu_suite.phases import PHASES
from lab.gpu_suite.results import Results, load, progress_of
from lab.gpu_suite.sizes import dry_sizes
from lab.gpu_suite.suite import GRACE_S, Phase, Suite, Work
from lab.gpu_suite.units import Unit

pytestmark = [pytest.mark.engine, pytest.mark.deep]

# The state of the phase's process, as that of a GPU's context and clock: a new process begins with None.
STATE: dict[str, Any] = {"lost": False, "clock": None}


def illegal_access(unit: Unit, work: Work) -> Iterable[Any]:
    """As in a check that catches what a launch raises: later calls of this process would fail, too."""
    STATE["lost"] = True
    return ()


def out_of_memory(unit: Unit, work: Work) -> Iterable[Any]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def dead(unit: Unit, work: Work) -> Iterable[Any]:
    """Kill the engine's rank if it has several, else this process, as a machine that has no memory left."""
    ranks = multiprocessing.active_children()
    for rank in ranks:
        rank.kill()
    if not ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    return unit() or ()


def slow_clock(unit: Unit, work: Work) -> Iterable[Any]:
    STATE["clock"] = 0.5
    return unit() or ()


def hang(unit: Unit, work: Work) -> Iterable[Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return ()


def slow_compilation(unit: Unit, work: Work) -> Iterable[Any]:
    time.sleep(max(work.left(), 0) + 0.1)
    return unit() or ()


PASSING = (illegal_access, out_of_memory, dead, slow_clock)  # a phase goes on after these
ENDING = (hang, slow_compilation)
SAID = {
    illegal_access: "LostContext",
    out_of_memory: "OutOfMemoryError: CUDA out of memory",
    dead: "ended by SIGKILL",
    slow_clock: "measured at a clock below 60%",
    hang: "killed: not done after",
    slow_compilation: "done",
}


def planted(number: int, phase: Phase) -> tuple[Phase, Callable[[int], dict[int, Callable[..., Any]]]]:
    """Return a phase with a fault in every second of its first units, and a function from its number of units to them.

    The first fault is another one in each phase. The last one ends the phase.
    """
    turned = [*PASSING[number % len(PASSING) :], *PASSING[: number % len(PASSING)], ENDING[number % len(ENDING)]]

    def placed(units: int) -> dict[int, Callable[..., Any]]:
        return dict(zip(range(1 if units > 1 else 0, units, 2), turned, strict=False))

    def units(work: Work) -> list[Unit]:
        STATE["clock"] = 0.98 if number % 3 else None  # every third phase has no NVML
        made = list(phase.units(work))
        for place, fault in placed(len(made)).items():
            made[place] = partial(fault, made[place], work)
        return made

    return phase._replace(units=units), placed


def commands(verb: str, *arguments: str) -> None:
    """Stand in for the command line, which has tests of its own and takes minutes here."""
    if verb == "calibrate":
        out = Path(arguments[arguments.index("-o") + 1])
        out.mkdir(parents=True, exist_ok=True)
        (out / "calibration.json").write_text("{}", encoding="utf-8")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, float]:
    out, minutes = tmp_path_factory.mktemp("rehearsal"), 8.0
    sizes = dry_sizes()
    ranks = sizes.deployments["small"].model_copy(update={"tensor_parallel_size": 2})
    sizes = sizes._replace(deployments=sizes.deployments | {"small": ranks})
    # a phase that is to hang or to be slow gets little time, or the rehearsal would take as long as the suite
    made = [planted(number, phase._replace(minutes=0.5))[0] for number, phase in enumerate(PHASES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.gpu_suite.suite.find_clock", lambda device: lambda: STATE["clock"])
        patch.setattr("lab.gpu_suite.suite.context_is_lost", lambda: STATE["lost"])
        patch.setattr(suite_phases, "_tokentwin", commands)
        Suite(out, made, minutes, sizes, grace_s=1.0).run()
    Results(out).set("environment", {"gpu": "a made-up GPU"})
    return load(out), out, 60 * minutes


def test_the_suite_ends_within_its_time(rehearsed: tuple[dict[str, Any], Path, float]) -> None:
    results, _, seconds = rehearsed
    assert results["seconds"] < seconds + GRACE_S
    assert all(f"{phase.name}_seconds" in results for phase in PHASES)


@pytest.mark.parametrize("number", range(len(PHASES)))
def test_every_fault_is_named_and_costs_only_its_unit(
    number: int, rehearsed: tuple[dict[str, Any], Path, float]
) -> None:
    results, phase = rehearsed[0], PHASES[number]
    progress = progress_of(results, phase.name)
    faulty = planted(number, phase)[1](progress.units)
    reached = {place: fault for place, fault in faulty.items() if place < progress.begun}
    assert progress.units > 0 and reached
    said = [*faults(results), *undone(results)]
    of_phase = [line for line in said if line.startswith(phase.name)]
    text = page(results)
    for place, fault in reached.items():
        if fault is slow_clock and number % 3 == 0:
            continue
        assert any(SAID[fault] in line for line in of_phase) or fault is dead, (place, fault, of_phase)
        assert fault is slow_clock or fault is slow_compilation or f"{phase.name}, unit {place + 1}:" in text
    without = sum(fault in (out_of_memory, dead, hang) for fault in reached.values())
    if phase.name != "precompile":  # which counts launches
        assert progress.done == progress.begun - without
    assert ("not known" in text.split(f"| {phase.name} |")[1].split("\n")[0]) == (progress.clock is None)


def test_what_was_measured_is_kept(rehearsed: tuple[dict[str, Any], Path, float]) -> None:
    results, out, _ = rehearsed
    assert len(results["ceilings"]) >= 2 and len(results["correctness"]) > 4 and len(results["kernels"]) > 4
    assert len(results["runs"]) == len({row["run"] for row in results["runs"]}) >= 2
    assert (out / "kernels.parquet").is_file() and list(out.glob("recordings-*.tar"))
    for name in ("small", "large", "mixture", "fp8", "int4"):
        assert results[f"engine_{name}"], name
    assert "All checks held" not in page(results)
