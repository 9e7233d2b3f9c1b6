"""The command: `python -m lab.gpu_suite --out DIR [--only smoke] [--dry-run]`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType


def main() -> int:
    """Return 0 if nothing failed, every planned check was made and held, and every decision was reproduced; else 1."""
    arguments = _arguments()
    out: Path = arguments.validate or arguments.out
    if arguments.minutes is not None and not 0 < arguments.minutes <= 600:
        return _refused(f"minutes {arguments.minutes}: must be above 0 and at most 600")
    if out.exists() and not out.is_dir():
        return _refused(f"out {out}: is not a directory; choose another")
    if arguments.validate and not any(out.glob("recordings-*.tar")):
        return _refused(f"validate {out}: holds no recordings-N.tar; give the directory that a run of the suite wrote")
    try:
        import torch
    except ImportError:
        return _refused("torch: not installed; pip install 'tokentwin[engine]'")
    from lab.gpu_suite.page import faults, table, unchecked, undone, verdict
    from lab.gpu_suite.phases import GROUPS, PHASES, chosen
    from lab.gpu_suite.results import FILE
    from lab.gpu_suite.sizes import dry_sizes, gpu_sizes
    from lab.gpu_suite.suite import Suite, run_apart

    try:
        phases = chosen("validation" if arguments.validate else arguments.only, arguments.skip)
    except ValueError as error:
        names = ", ".join([*GROUPS, *(phase.name for phase in PHASES)])
        return _refused(f"phase {error}: does not exist; choose from {names}")
    if not phases:
        return _refused("skip: no phase is left to run; skip fewer")
    on_cpu = arguments.dry_run or arguments.validate
    minutes = arguments.minutes or (_CPU_MINUTES if on_cpu else sum(phase.minutes for phase in phases))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ended)  # also ends the phase under way
    if not on_cpu and not run_apart(_need_cuda, _LOOKING_S, lambda why: None):
        return _refused("cuda: this machine has no CUDA device; add --dry-run to run in miniature")
    torch.set_num_threads(1)  # threads do not survive a fork
    sizes = dry_sizes() if on_cpu else gpu_sizes()
    suite = Suite(out, phases, minutes, sizes, arguments.commit or _commit(), adding=bool(arguments.validate))
    suite.run()
    results = suite.results.values
    print(table(results))
    wrong = faults(results)
    for fault in wrong:
        print(f"FAULT {fault}")
    for missing in undone(results):
        print(f"NOT DONE {missing}")
    print(verdict(results))
    print(f"results: {out / FILE}", file=sys.stderr)
    return 1 if wrong or unchecked(results) else 0


_CPU_MINUTES = 60.0  # limit of a dry run or a validation: no GPU waits for them
_LOOKING_S = 60.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.gpu_suite", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="directory to write the results to (at most eight files)")
    where.add_argument("--validate", type=Path, metavar="DIR", help="only validate the recordings of an earlier run")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time limit in minutes; by default the time that the phases need, 10 minutes for all",
    )
    parser.add_argument(
        "--only", default="", metavar="PHASE,...", help="run only these phases; smoke takes three minutes"
    )
    parser.add_argument("--skip", default="", metavar="PHASE,...", help="leave these phases out")
    parser.add_argument("--dry-run", action="store_true", help="run everything in small sizes on the CPU")
    parser.add_argument("--commit", default="", help="commit to record, if git is not available")
    return parser.parse_args()


def _refused(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


def _need_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(1)


def _ended(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # an image without git
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
