"""The phases of the suite, most valuable first. Each works even if earlier phases failed.

The headline figures come before the long grid of kernel times. Recordings come before the results that can be computed
from them later, on another machine.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from lab.gpu_suite.ceilings import ceilings
from lab.gpu_suite.compare import comparisons
from lab.gpu_suite.correctness import checks
from lab.gpu_suite.end_to_end import engine_checks
from lab.gpu_suite.engine_benchmark import benchmark
from lab.gpu_suite.kernel_grid import grid, write_grid
from lab.gpu_suite.precompile import precompile
from lab.gpu_suite.recorded_runs import Pace, RunSizes, pack, recordings, unpack
from lab.gpu_suite.suite import Phase, Work
from lab.gpu_suite.timing import find_bench
from lab.gpu_suite.units import OutOfTime, Unit
from tokentwin.realengine.devices.machine import describe
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.weights import load_model_files
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.python_process import module_command, module_environment


def validations(
    runs: list[Path], out: Path, left: Callable[[], float], kernels: Path | None = None
) -> list[Callable[[], list[dict[str, Any]]]]:
    """Return the validation of each scenario in `runs`.

    Its row has run errors, decisions, and the message of a command that failed. `kernels` is the table of the engine's
    own kernels; None if it is not known. Each scenario is predicted by a calibration from the other scenarios' runs,
    with the commands that a user has. They run as processes, because this package must not import the simulator.
    """

    def one(name: str) -> list[dict[str, Any]]:
        if left() < 5:
            raise OutOfTime
        mine = [path for path in runs if path.name.rpartition("-")[0] == name]
        others = [path for path in runs if path not in mine]
        return [{"scenario": name, **_validate(mine, others, out / name, kernels)}]

    return [partial(one, name) for name in sorted({path.name.rpartition("-")[0] for path in runs})]


def calibrate_all(runs: list[Path], out: Path, kernels: Path | None = None) -> str | None:
    """Make one calibration from every run, in `out`; return an error message, or None."""
    own = [] if kernels is None else ["--kernels", str(kernels)]
    return _tokentwin("calibrate", "--force", "-o", str(out), *_from(runs), *own)


def _validate(mine: list[Path], others: list[Path], out: Path, kernels: Path | None) -> dict[str, Any]:
    calibration = out / "calibration"
    failed = calibrate_all(others, calibration, kernels)
    if failed is None:
        failed = _tokentwin("validate", *map(str, mine), "-c", str(calibration), "-o", str(out), "--force")
    if not (out / "report.json").is_file():
        return {"failed": failed}
    errors_pct = json.loads((calibration / "calibration.json").read_text(encoding="utf-8")).get("unseen_error_pct", {})
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    rungs = report["rungs"]
    return {
        "failed": failed,
        "verdict": report["verdict"],
        "prices": min(errors_pct, key=errors_pct.__getitem__, default=""),
        "disturbed": report["disturbed"],
        "decisions_identical": rungs["replay"]["identical"],
        "decisions": rungs["replay"]["steps"],
        "regimes": rungs["step"]["regimes"],
        "rows": rungs["run"]["rows"],
        "extrapolated_share": report["extrapolated_share"],
    }


def _from(paths: list[Path]) -> list[str]:
    return [argument for path in paths for argument in ("--from-recordings", str(path))]


def _tokentwin(*arguments: str) -> str | None:
    """Run a `tokentwin` command; return the end of its message if it failed, else None."""
    command, where = module_command("tokentwin", *arguments), module_environment()
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"


def environment(work: Work) -> list[Unit]:
    """Record the machine and its versions in the results."""

    def look() -> None:
        about: dict[str, Any] = dict(describe(work.sizes.device))
        about |= {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": work.commit,
            "platform": platform.platform(),
            "dry_run": work.sizes.dry_run,
        }
        if work.sizes.device == "cuda":
            about["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
            about["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(0))
            command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
            with suppress(OSError):  # an image without nvidia-smi
                about["clocks"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        work.results.set("environment", about)

    return [look]


def _benchmark(work: Work, which: str, kinds: tuple[str, ...], warm: bool = True) -> list[Unit]:
    deployment = work.sizes.deployments[which]
    about = {"model": deployment.model.removeprefix("random:")}
    if deployment.quantization != "none":
        about["quantization"] = deployment.quantization

    def measure(one: Callable[[], dict[str, Any]]) -> None:
        work.results.add(f"engine_{which}", {**about, **one()})

    engine = _engine(work, deployment, warm)
    return [partial(measure, one) for one in benchmark(engine, work.ceilings, work.sizes.benchmark, kinds)]


def _engine(work: Work, deployment: Deployment, warm: bool = True) -> Callable[[], Engine]:
    """Return a function that makes the engine at its first call; the process's end is the engine's end."""

    @cache
    def engine() -> Engine:
        made = Engine(deployment, load_model_files(deployment.model, Path()))
        if made.memory_report:
            work.results.set("memory", made.memory_report)
        if warm:
            made.warm_up()
        return made

    return engine


def runs(work: Work) -> list[Unit]:
    """Record scenarios of the large model, and yield a row for each run."""
    sizes = RunSizes(work.sizes.run_seconds, work.sizes.run_longest)
    pace = work.results.values.get("pace")
    into = work.scratch / "runs"

    def kept(record: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for row in record():
            if "pace" in row:  # another process of this phase goes on at the same pace
                work.results.set("pace", row["pace"])
                continue
            pack(into / row["run"], work.out)
            yield row

    engine = _engine(work, work.sizes.deployments["large"])
    return [partial(kept, one) for one in recordings(engine, into, sizes, Pace(**pace) if pace else None, work.left)]


def kernels(work: Work) -> list[Unit]:
    device = torch.device(work.sizes.device)
    return [*grid(find_bench(device.type), device, work.ceilings, work.sizes.dry_run)]


def compare(work: Work) -> list[Unit]:
    device = torch.device(work.sizes.device)
    return [*comparisons(find_bench(device.type), device, work.sizes.dry_run)]


def _kernel_table(work: Work) -> None:
    """Write the measured kernels as a table, whether or not the phase finished."""
    results = work.results.values
    write_grid(results.get("kernels", []), work.out / "kernels.parquet", results.get("environment", {}))


def validation(work: Work) -> list[Unit]:
    """Validate the archived recordings. This phase needs only them, so it may run later, on another machine."""
    recorded = unpack(work.out, work.scratch / "validated")
    own = work.out / "kernels.parquet"
    kernels = own if own.is_file() and not work.sizes.dry_run else None

    def calibrate() -> None:
        if not recorded:
            raise RuntimeError("there are no recordings; the phase that records them must run first")
        if failed := calibrate_all(recorded, work.scratch / "calibration", kernels):
            raise RuntimeError(failed)
        shutil.copy(work.scratch / "calibration" / "calibration.json", work.out / "calibration.json")

    return [*validations(recorded, work.scratch / "validation", work.left, kernels), calibrate]


_OF_OTHERS = ("decode", "prefill", "throughput")
PHASES = (
    Phase("environment", 0.1, environment),
    Phase("ceilings", 0.3, lambda work: ceilings(find_bench(work.sizes.device), work.sizes.dry_run)),
    Phase("precompile", 0.7, lambda work: [partial(precompile, work.sizes, work.left)]),
    Phase("correctness", 0.5, lambda work: checks(torch.device(work.sizes.device), work.sizes.dry_run)),
    Phase("end_to_end", 0.5, lambda work: engine_checks(work.sizes.device, work.sizes.dry_run)),
    Phase(
        "small",
        1.0,
        partial(_benchmark, which="small", kinds=("throughput", "greedy", "decode", "prefill", "mixed", "timing")),
    ),
    # `benchmark` runs each size of decode steps before it measures it, so there is no other warm-up.
    Phase("decode", 0.7, partial(_benchmark, which="large", kinds=("decode",), warm=False)),
    Phase(
        "large", 0.8, partial(_benchmark, which="large", kinds=("prefill", "throughput", "mixed", "timing", "greedy"))
    ),
    Phase("runs", 1.8, runs),
    Phase("kernels", 0.8, kernels, after=_kernel_table),
    Phase("compare", 0.4, compare),
    Phase("mixture", 0.7, partial(_benchmark, which="mixture", kinds=_OF_OTHERS, warm=False)),
    Phase("fp8", 0.5, partial(_benchmark, which="fp8", kinds=_OF_OTHERS, warm=False)),
    Phase("int4", 0.5, partial(_benchmark, which="int4", kinds=_OF_OTHERS, warm=False)),
    Phase("validation", 0.7, validation),
)
GROUPS = {"smoke": ("environment", "ceilings", "precompile", "correctness", "end_to_end", "decode")}


def chosen(only: str, skip: str) -> list[Phase]:
    """Return the phases in `only` (or all) that are not in `skip`; raise ValueError for an unknown name.

    Both are comma-separated names of phases or groups.
    """
    groups = GROUPS | {phase.name: (phase.name,) for phase in PHASES}

    def named(names: str) -> set[str]:
        asked = [name for name in names.split(",") if name]
        for name in asked:
            if name not in groups:
                raise ValueError(name)
        return {phase for name in asked for phase in groups[name]}

    wanted = (named(only) or set(groups)) - named(skip)
    return [phase for phase in PHASES if phase.name in wanted]
