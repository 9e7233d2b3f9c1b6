"""The command: `python -m realengine.gpu_suite --out DIR --minutes 8 [--dry-run]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """0 when every phase ran, every kernel was right and every decision was reproduced; 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m realengine.gpu_suite", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="directory for at most eight files")
    parser.add_argument("--minutes", type=float, default=8.0, help="time to finish in")
    parser.add_argument("--dry-run", action="store_true", help="all of it in miniature, on the CPU")
    parser.add_argument("--commit", default="", help="what to record as the commit, where there is no git")
    asked = parser.parse_args()
    if not 0 < asked.minutes <= 600:
        print(f"error: minutes {asked.minutes}: must be above 0 and at most 600", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError:
        print("error: torch: not installed; pip install 'tokentwin[engine]'", file=sys.stderr)
        return 2
    if not asked.dry_run and not torch.cuda.is_available():
        print("error: cuda: this machine has no CUDA device; add --dry-run to run in miniature", file=sys.stderr)
        return 2
    if asked.out.exists() and not asked.out.is_dir():
        print(f"error: out {asked.out}: is no directory; choose another", file=sys.stderr)
        return 2

    from realengine.gpu_suite.page import faults, table
    from realengine.gpu_suite.sizes import dry_sizes, gpu_sizes
    from realengine.gpu_suite.suite import Suite

    if asked.dry_run:
        torch.set_num_threads(1)
    sizes = dry_sizes() if asked.dry_run else gpu_sizes(asked.minutes)
    suite = Suite(asked.out, asked.minutes, sizes, asked.commit or _commit())
    suite.run()
    print(table(suite.results.found))
    found = faults(suite.results.found)
    for fault in found:
        print(f"FAULT {fault}")
    return 1 if found else 0


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # an image without git
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
