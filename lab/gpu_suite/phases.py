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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.gpu_suite.ceilings import measure_ceilings
from lab.gpu_suite.correctness import check_kernels
from lab.gpu_suite.end_to_end import check_engines
from lab.gpu_suite.engine_benchmark import benchmark
from lab.gpu_suite.kernel_grid import kernel_grid, write_grid
from lab.gpu_suite.precompile import precompile
from lab.gpu_suite.recorded_runs import pack, record_runs, unpack
from lab.gpu_suite.suite import Phase, Work
from lab.gpu_suite.timing import find_bench
from realengine.devices.machine import describe
from realengine.engine import Engine
from realengine.models.weights import load_model_files
from serving.deployments.config import Deployment
from serving.python_process import module_command, module_environment


def validate_runs(
    runs: list[Path], out: Path, left: Callable[[], float], kernels: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each scenario in `runs`: run errors, decisions, and the message of a command that failed.

    `kernels` is the table of the engine's own kernels; None if it is not known. Each scenario is predicted by a
    calibration from the other scenarios' runs, with the commands that a user has. They run as processes, because this
    package must not import the simulator.
    """
    for name in sorted({path.name.rpartition("-")[0] for path in runs}):
        if left() < 5:
            return
        mine = [path for path in runs if path.name.rpartition("-")[0] == name]
        others = [path for path in runs if path not in mine]
        yield {"scenario": name, **_validate(mine, others, out / name, kernels)}


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
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    rungs = report["rungs"]
    return {
        "failed": failed,
        "verdict": report["verdict"],
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


def environment(work: Work) -> None:
    """Record the machine and its versions in the results."""
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


def _benchmark(work: Work, which: str, kinds: tuple[str, ...], warm: bool = True) -> None:
    deployment = getattr(work.sizes, which)
    engine = _engine(work, deployment, warm)
    for row in benchmark(engine, work.ceilings, work.sizes.benchmark, kinds, work.left):
        work.results.add(f"engine_{which}", {"model": deployment.model.removeprefix("random:"), **row})
    engine.close()


def _engine(work: Work, deployment: Deployment, warm: bool = True) -> Engine:
    engine = Engine(deployment, load_model_files(deployment.model, Path()))
    if engine.memory_report:
        work.results.set("memory", engine.memory_report)
    if warm:
        engine.warm_up()
    return engine


def runs(work: Work) -> Iterator[dict[str, Any]]:
    """Record scenarios of the large model, and yield a row for each run."""
    engine = _engine(work, work.sizes.large)
    recordings = work.scratch / "runs"
    for row in record_runs(engine, recordings, work.sizes.run_seconds, work.sizes.run_longest, work.left):
        pack(recordings / row["run"], work.out)
        yield row
    engine.close()


def kernels(work: Work) -> Iterator[dict[str, Any]]:
    device = torch.device(work.sizes.device)
    return kernel_grid(find_bench(device.type), device, work.ceilings, work.sizes.dry_run)


def _kernel_table(work: Work) -> None:
    """Write the measured kernels as a table, whether or not the phase finished."""
    results = work.results.values
    write_grid(results.get("kernels", []), work.out / "kernels.parquet", results.get("environment", {}))


def validation(work: Work) -> None:
    """Validate the archived recordings. This phase needs only them, so it may run later, on another machine."""
    recordings = unpack(work.out, work.scratch / "validated")
    if not recordings:
        raise RuntimeError("there are no recordings; the phase that records them must run first")
    work.results.set("validation", [])
    own = work.out / "kernels.parquet"
    kernels = own if own.is_file() and not work.sizes.dry_run else None
    for row in validate_runs(recordings, work.scratch / "validation", work.left, kernels):
        work.results.add("validation", row)
    failed = calibrate_all(recordings, work.scratch / "calibration", kernels)
    work.results.set("calibration_failed", failed)
    if failed is None:
        shutil.copy(work.scratch / "calibration" / "calibration.json", work.out / "calibration.json")


PHASES = (
    Phase("environment", 0.1, environment),
    Phase("ceilings", 0.3, lambda work: measure_ceilings(find_bench(work.sizes.device), work.sizes.dry_run)),
    Phase("precompile", 0.7, lambda work: precompile(work.sizes, work.left)),
    Phase("correctness", 0.5, lambda work: check_kernels(torch.device(work.sizes.device), work.sizes.dry_run)),
    Phase("end_to_end", 0.5, lambda work: check_engines(work.sizes.device, work.sizes.dry_run)),
    Phase(
        "small", 0.8, partial(_benchmark, which="small", kinds=("throughput", "decode", "prefill", "mixed", "timing"))
    ),
    # `benchmark` runs each size of decode steps before it measures it, so there is no other warm-up.
    Phase("decode", 0.7, partial(_benchmark, which="large", kinds=("decode",), warm=False)),
    Phase("large", 0.8, partial(_benchmark, which="large", kinds=("prefill", "throughput", "mixed", "timing"))),
    Phase("runs", 1.9, runs),
    Phase("kernels", 0.9, kernels, after=_kernel_table),
    Phase("validation", 0.8, validation),
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
