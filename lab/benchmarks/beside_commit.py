"""The CPU time of the simulator beside that of an earlier commit, both with a compiled core, in alternating runs.

    python -m lab.benchmarks.beside_commit 11ae30c4 conversation_trace.jsonl [--replicas 8] [--rounds 5]

The commit is checked out and compiled in a temporary folder. Both simulate the trace with requests only, as `peers`
does. The table shows medians of whole processes and of simulations alone, and the ratio of ours to the earlier one with
the least and the greatest of the pairs. The last line is JSON. `peers --dynosim` gives the ratio to DynoSim.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lab.benchmarks.peers.simulators import timed
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.tables import print_table

ROOT = Path(__file__).parents[2]
PROGRAMS = ("lab/benchmarks/peers/twin.py", "benchmarks/peer_twin.py")  # its present and its earlier place
LIMITS = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=131_072, num_blocks=24_000)
SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "block_size")
MEASURED = ("process_cpu_s", "simulation_cpu_s")


def run(checkout: Path, trace: Path, replicas: int, scratch: Path) -> dict[str, float]:
    """Return the CPU seconds of one run of the simulator in `checkout`."""
    program = next(checkout / place for place in PROGRAMS if (checkout / place).exists())
    limits = scratch / "limits.json"
    limits.write_text(json.dumps(LIMITS.model_dump(include={*SETTINGS})))
    with TemporaryDirectory(dir=scratch) as out:
        command = [sys.executable, str(program), str(trace), str(limits), "summary", f"{out}/run", str(replicas)]
        printed, cpu_s = timed(command, cwd=checkout, env={"PYTHONPATH": str(checkout)})
    return {"process_cpu_s": cpu_s, **json.loads(printed.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("trace", type=Path, help="a trace in any format that tokentwin reads")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="number of pairs of runs")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        earlier, trace = Path(folder, "earlier"), options.trace.resolve()
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(earlier), options.commit], cwd=ROOT, check=True
        )
        try:
            for checkout in (earlier, ROOT):
                subprocess.run([sys.executable, "compile_core.py"], cwd=checkout, check=True)
            pairs = [
                [run(checkout, trace, options.replicas, Path(folder)) for checkout in (ROOT, earlier)]
                for _ in range(options.rounds)
            ]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(earlier)], cwd=ROOT, check=True)
    result: dict[str, dict[str, Any]] = {}
    for name in MEASURED:
        ratios = sorted(ours[name] / theirs[name] for ours, theirs in pairs)
        now, before = (round(median(pair[side][name] for pair in pairs), 2) for side in (0, 1))
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        result[name] = {"ours": now, options.commit: before, "ratio": spread}
    print_table(["", *result[MEASURED[0]]], [[name, *map(str, row.values())] for name, row in result.items()])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
