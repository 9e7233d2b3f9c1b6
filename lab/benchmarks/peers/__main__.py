"""The CPU time of our simulator and of others on the same requests, as ratios.

    python -m lab.benchmarks.peers AzureLLMInferenceTrace_conv.csv --install
    python -m lab.benchmarks.peers TRACE --inference-lab DIR --vidur CHECKOUT --vidur-python PYTHON --blis BINARY
    python -m lab.benchmarks.peers TRACE --dynosim V/bin/python --mooncake conversation_trace.jsonl

All simulators run one engine with the same limits, Llama 3 8B on an H100. Only DynoSim simulates fleets, on whole
traces (`dynosim.py` says how to install it). `--install` fetches inference-lab by npm into a directory that is removed
again. A peer without an option is left out, with a message. After each run of a peer, our simulator runs the same
requests. The ratios of these pairs are shown by median, minimum and maximum. The last line is JSON.

The adapters of inference-lab and DynoSim were run with the real simulators, those of Vidur and BLIS were not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lab.benchmarks.peers.simulators import (
    PACKAGE,
    Blis,
    DynoSim,
    InferenceLab,
    Peer,
    PeerFailed,
    PeerRun,
    Vidur,
    timed,
)
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.workload import Workload
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.formats.trace_file import read_workload
from tokentwin.traces.reshape import reshaped

TWIN = "lab.benchmarks.peers.twin"
LIMITS = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=131_072, num_blocks=27_000)
RECORDS = ("summary", "tokens", "steps")
_FLEETS = LIMITS.model_copy(update={"max_num_batched_tokens": 8192})  # limits of DynoSim's fleets
OUR_HANDICAPS = (
    "Python; a step is priced from tables of kernels, and decides as vLLM 0.33 does",
    "summary: requests only; tokens: when each token came as well; steps: every step in addition."
    " Runs of decode steps are taken in one leap",
    "the recording on disk is in the CPU time",
)


class Case(NamedTuple):
    """A peer with its workload and limits."""

    peer: Peer
    workload: Workload
    limits: SchedulerConfig


@dataclass(frozen=True)
class Pair:
    """A peer's run, and our runs on the same requests, by what our run records (a key of `twin.RECORDS`)."""

    peer: PeerRun
    ours: dict[str, dict[str, float]]


def run_ours(workload: Workload, case: Case, records: str, scratch: Path) -> dict[str, float]:
    """Return CPU seconds of our process and of the simulation in it, and the simulation's results."""
    trace, given, out = scratch / "trace.parquet", scratch / "limits.json", scratch / f"run-{records}"
    write_parquet(workload, trace)
    given.write_text(case.limits.model_dump_json())
    printed, cpu_s = timed([sys.executable, "-m", TWIN, *map(str, (trace, given, records, out, case.peer.replicas))])
    return {"process_cpu_s": cpu_s, **json.loads(printed)}


def pairs(case: Case, runs: int) -> Iterator[Pair]:
    """Yield `runs` pairs: a run of the peer, then ours on the requests that it simulated."""
    for _ in range(runs):
        theirs = case.peer.run(case.workload, case.limits)
        with TemporaryDirectory() as scratch:
            ours = {records: run_ours(theirs.workload, case, records, Path(scratch)) for records in RECORDS}
        yield Pair(theirs, ours)


def summary(case: Case, made: Sequence[Pair]) -> dict[str, Any]:
    """Return medians of seconds and ratios over the pairs, and how much work each side did."""
    first = made[0]
    requests = list(first.peer.workload.requests)
    result: dict[str, Any] = {
        "peer": case.peer.name,
        "block_size": case.limits.block_size,
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_len for request in requests),
        "output_tokens": sum(request.output_len for request in requests),
        "process_cpu_s": statistics.median(pair.peer.process_cpu_s for pair in made),
        "simulation_cpu_s": _median(pair.peer.simulation_cpu_s for pair in made),
        "simulated_s": first.peer.simulated_s,
        "ours": {},
    }
    for records in RECORDS:
        ours = [pair.ours[records] for pair in made]
        result["ours"][records] = {
            "steps": ours[0]["steps"],
            "simulated_s": ours[0]["simulated_s"],
            "process_cpu_s": statistics.median(run["process_cpu_s"] for run in ours),
            "simulation_cpu_s": statistics.median(run["simulation_cpu_s"] for run in ours),
            "process_ratios": sorted(
                pair.peer.process_cpu_s / run["process_cpu_s"] for pair, run in zip(made, ours, strict=True)
            ),
            "simulation_ratios": sorted(
                pair.peer.simulation_cpu_s / run["simulation_cpu_s"]
                for pair, run in zip(made, ours, strict=True)
                if pair.peer.simulation_cpu_s is not None
            ),
        }
    return result


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show(peer: Peer, result: dict[str, Any], console: Console) -> None:
    tokens = f"{result['prompt_tokens']:,} prompt and {result['output_tokens']:,} output tokens"
    title = f"{result['requests']:,} requests, {tokens}, blocks of {result['block_size']}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("process\nCPU s", "simulation\nCPU s", "requests\n/ CPU s", "process\nratio", "simulation\nratio"):
        table.add_column(heading, justify="right")
    table.add_row(peer.name, *_row(result, result["requests"]))
    for records, ours in result["ours"].items():
        ratios = map(_middle, (ours["process_ratios"], ours["simulation_ratios"]))
        table.add_row(f"ours, {records}", *_row(ours, result["requests"]), *ratios)
    console.print(table)
    for records, ours in result["ours"].items():
        spreads = [f"{name} {_spread(ours[f'{name}_ratios'])}" for name in ("process", "simulation")]
        console.print(f"  ratios to ours, {records}: {', '.join(spreads)}", highlight=False)
    ends = {peer.name: result["simulated_s"], "ours": result["ours"]["summary"]["simulated_s"]}
    said = ", ".join(f"{name} {end:,.0f} s" for name, end in ends.items() if end is not None)
    console.print(f"  the last request ends after: {said}", highlight=False)
    for line in peer.handicaps:
        console.print(f"  {peer.name}: {line}", highlight=False, soft_wrap=True)
    if not peer.tried:
        console.print(f"  {peer.name}: this adapter had not been run before; see that it ran what was asked")


def _row(run: dict[str, Any], requests: int) -> tuple[str, ...]:
    alone = run["simulation_cpu_s"]
    process = f"{run['process_cpu_s']:.2f}"
    if alone is None:
        return process, "", f"{requests / run['process_cpu_s']:,.0f}"
    return process, f"{alone:.2f}", f"{requests / alone:,.0f}"


def _middle(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.1f}" if ratios else ""


def _spread(ratios: Sequence[float]) -> str:
    return f"{ratios[0]:.1f} to {ratios[-1]:.1f}" if ratios else "not known"


def install(stack: ExitStack) -> Path:
    """Install inference-lab from npm, in a directory that `stack` removes."""
    where = stack.enter_context(TemporaryDirectory())
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
    subprocess.run(command, cwd=where, check=True, stdout=subprocess.DEVNULL)
    return Path(where) / "node_modules" / PACKAGE


def cases(options: argparse.Namespace, stack: ExitStack, console: Console) -> Iterator[Case]:
    """Yield the cases of the peers that were given, and print a line about each other peer."""
    whole = read_workload(options.trace)
    workload = reshaped(whole, limit=options.requests, rate_scale=options.rate_scale)
    if options.dynosim:
        yield Case(DynoSim(options.dynosim, 4), whole, _FLEETS.model_copy(update={"num_blocks": 24_000}))
        for block_size, blocks in ((64, 6_000), (16, 24_000)) if options.mooncake else ():
            limits = _FLEETS.model_copy(update={"block_size": block_size, "num_blocks": blocks})
            yield Case(DynoSim(options.dynosim, 8), read_workload(options.mooncake), limits)
        if not options.mooncake:
            console.print("DynoSim on Mooncake: not given; --mooncake FILE, its conversation trace")
    else:
        console.print("DynoSim: not given; --dynosim PYTHON of an environment with ai-dynamo (dynosim.py)")
    package = install(stack) if options.install else options.inference_lab
    if package:
        yield Case(InferenceLab(package), workload, LIMITS)
    else:
        console.print(f"inference-lab: not given; --install, or --inference-lab DIR with the npm package {PACKAGE}")
    if options.vidur:
        yield Case(Vidur(options.vidur, options.vidur_python), workload, LIMITS)
    else:
        console.print("Vidur: not given; --vidur CHECKOUT of microsoft/vidur, --vidur-python with its requirements")
    if options.blis:
        yield Case(Blis(options.blis), workload, LIMITS)
    else:
        console.print("BLIS: not given; --blis BINARY, built in a checkout of inference-sim/inference-sim")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace in any format that tokentwin reads")
    parser.add_argument(
        "--requests", type=int, default=3000, help="number of requests from the trace's start; default 3,000"
    )
    parser.add_argument("--rate-scale", type=float, default=1.0, help="multiply the arrival rate")
    parser.add_argument("--runs", type=int, default=3, help="number of pairs of runs; default 3")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--inference-lab", type=Path, metavar="DIR", help=f"folder of the npm package {PACKAGE}")
    source.add_argument("--install", action="store_true", help="fetch the package of --inference-lab with npm")
    parser.add_argument("--vidur", type=Path, metavar="CHECKOUT")
    parser.add_argument("--vidur-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--blis", type=Path, metavar="BINARY")
    parser.add_argument("--dynosim", type=Path, metavar="PYTHON", help="Python of an environment with ai-dynamo")
    parser.add_argument("--mooncake", type=Path, metavar="TRACE", help="for DynoSim: Mooncake's conversation trace")
    options = parser.parse_args()
    console = Console()
    results = []
    with ExitStack() as stack:
        for case in cases(options, stack, console):
            try:
                results.append(summary(case, list(pairs(case, options.runs))))
            except PeerFailed as failed:
                console.print(f"{case.peer.name}: {failed}")
            else:
                show(case.peer, results[-1], console)
    for line in OUR_HANDICAPS:
        console.print(f"  ours: {line}", highlight=False, soft_wrap=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
