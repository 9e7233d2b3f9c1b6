"""Rungs 1 to 3 on the recorded runs, by the same commands that a user has.

Each scenario is predicted by a calibration that has never seen it: one fitted to all the other scenarios' runs. The
commands run as processes, because this package must not import the simulator.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serving.python_process import module_command, module_environment


def validate_runs(runs: list[Path], out: Path, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yield a row for each scenario in `runs`: run errors, decisions, and the message of a command that failed."""
    for name in sorted({path.name.rpartition("-")[0] for path in runs}):
        if left() < 5:
            return
        mine = [path for path in runs if path.name.rpartition("-")[0] == name]
        others = [path for path in runs if path not in mine]
        yield {"scenario": name, **_validate(mine, others, out / name)}


def calibrate_all(runs: list[Path], out: Path) -> str | None:
    """Make one calibration from every run, in `out`; return an error message, or None."""
    return _tokentwin("calibrate", "--force", "-o", str(out), *_from(runs))


def _validate(mine: list[Path], others: list[Path], out: Path) -> dict[str, Any]:
    calibration = out / "calibration"
    failed = _tokentwin("calibrate", "--force", "-o", str(calibration), *_from(others))
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
    """Run a verb; return its last words if it failed."""
    command, where = module_command("tokentwin", *arguments), module_environment()
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
