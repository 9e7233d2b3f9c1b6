"""The time that `tokentwin plan` takes for a typical query, and its answer.

    python -m lab.benchmarks.plan AzureLLMInferenceTrace_conv.csv [--rate-scale 4] [--jobs 2]

The query: Llama-3.1-70B, an hour of conversation traffic, three GPU types by three tensor-parallel sizes, one policy.
Times are those of the whole command in a fresh process, with imports and reading the trace. CPU time divided by the
number of jobs is the time that the command takes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[2]
QUERY = ("--model", "Llama-3.1-70B", "--gpu", "H100,H200,A100-80G", "--tp", "2,4,8")
SLOS = ("--slo", "ttft_ms p99<=1000", "--slo", "tpot_ms p95<=50")


def main() -> None:
    """Run the query once and print wall time, CPU time of all processes, and the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate-scale", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--format", choices=("table", "json"), default="table", help="json also computes curves")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "tokentwin", "plan", str(arguments.trace.resolve()), *QUERY, *SLOS]
    command += ["--rate-scale", str(arguments.rate_scale), "--jobs", str(arguments.jobs), "--format", arguments.format]
    began = perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    wall_s = perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{wall_s:.1f} s wall, {used.ru_utime + used.ru_stime:.1f} s CPU, {arguments.jobs} jobs")
    if arguments.format == "table":
        print(*done.stdout.splitlines()[:2], sep="\n")
    else:
        answer = json.loads(done.stdout)
        print(f"{answer['answer']}\n{answer['requests']:,} requests, {answer['trials']} fleets tried in the search")


if __name__ == "__main__":
    main()
