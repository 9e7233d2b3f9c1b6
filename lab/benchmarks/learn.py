"""How well `tokentwin learn` finds out what hidden servers are, and predicts traffic that it never saw.

Each server is drawn at random: engine, GPU, model, limits, KV blocks, step times, and the time outside of the engine.
It answers on the virtual clock, with 1 % noise in each step. The learner gets model, GPU and parallelism. Then both
serve two workloads of another kind than the questions, with other rates, lengths and shared prefixes, and the same
closed loop for the throughput at saturation. `python -m lab.benchmarks.learn --outcomes FILE [--servers 30]`; stopped,
the same command goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from lab.benchmarks.hidden_servers import HiddenServer, hidden_server
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.learner import Learner
from tokentwin.planning.learn.proof import proof_rows, spread_pct
from tokentwin.planning.learn.questions import Bounds, Question
from tokentwin.planning.learn.session import interval_of, late_ms_of
from tokentwin.planning.learn.twin import Setting, Twin
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest

_BOUNDS = Bounds(concurrency=256, longest=16_384)
_CLIENTS = 64
_REQUESTS = 240
_TARGETS_PCT = {"mean": 3.0, "p50": 3.0, "p99": 8.0}  # largest error that is aimed at
_BY_FIGURE = ("errors_pct", "floors_pct")
_BLOCKS_WITHIN = 0.02  # relative error up to which the number of KV blocks counts as right


class Outcome(NamedTuple):
    """What was learnt of one server.

    Attributes:
        right: True, False or None (no question reached it) by setting
        errors_pct: error of each figure of the unseen workloads
        floors_pct: difference of each figure between two runs of the server
        inside: whether each figure lies in its 90 % interval
        saturation_pct: error of the throughput of a closed loop
        server_s, cpu_s: time of all answers, and CPU time of the learner
        memory_mb: largest memory of the process while it learnt, which also simulated the server
    """

    seed: int
    right: dict[str, bool | None]
    errors_pct: dict[tuple[str, str, str], float]
    floors_pct: dict[tuple[str, str, str], float]
    inside: list[bool]
    saturation_pct: float
    server_s: float
    cpu_s: float
    memory_mb: float


def outcome(seed: int) -> Outcome:
    """Learn the hidden server with this seed, and try the twin."""
    server = hidden_server(seed)
    began = process_time()
    learner = Learner(server, server.stated(), server.gpu, _BOUNDS)
    twin = learner.learn()
    cpu_s = process_time() - began
    interval, late_ms = interval_of(learner, twin), late_ms_of(learner, twin)
    memory_mb = getrusage(RUSAGE_SELF).ru_maxrss / 1024
    errors: dict[tuple[str, str, str], float] = {}
    floors: dict[tuple[str, str, str], float] = {}
    inside = []
    for question in _unseen(server, seed):
        answer = server.ask(question)
        again = spread_pct(answer, server.ask(replace(question, name=f"{question.name} again")))
        floors |= {(question.name, *figure): pct for figure, pct in again.items()}
        for metric, statistic, real, said, low, high in proof_rows(twin, answer, interval, late_ms):
            errors[question.name, metric, statistic] = 100 * (said / real - 1)
            inside.append(low <= real <= high)
    loop = server.ask(_loop(_REQUESTS, 700, 120))
    saturation = 100 * (_last_ns(loop.tokens_ns) / _last_ns(_simulated(twin, loop)) - 1)
    right, server_s = _right(server, learner, twin), _seconds(learner.answers)
    return Outcome(seed, right, errors, floors, inside, saturation, server_s, cpu_s, memory_mb)


def _right(server: HiddenServer, learner: Learner, twin: Twin) -> dict[str, bool | None]:
    right: dict[str, bool | None] = {}
    expected = Setting.of(server.deployment)._asdict()
    for name, value in twin.setting._asdict().items():
        if name in learner.findings.assumed | learner.findings.undecided or (
            name == "router" and learner.replicas == 1
        ):
            right[name] = None
        elif name in learner.findings.at_least:
            right[name] = None if expected[name] >= learner.findings.at_least[name] else False
        elif name == "num_blocks":
            tokens = value * twin.setting.block_size
            right[name] = abs(tokens / (expected[name] * expected["block_size"]) - 1) <= _BLOCKS_WITHIN
        else:
            right[name] = value == expected[name]
    return right


def _unseen(server: HiddenServer, seed: int) -> Iterator[Question]:
    """Yield two workloads: chats with shared system prompts, and long prompts that come in bursts."""
    draw = np.random.default_rng(seed)
    for name, prompt, output, share, burst in (("chats", 500, 180, 300, 1), ("bursts", 2200, 50, 0, 6)):
        loop = server.ask(_loop(_REQUESTS, prompt + share, output))
        second = _last_ns(loop.tokens_ns) / _REQUESTS / draw.uniform(0.3, 0.7)
        gaps = np.where(np.arange(_REQUESTS) % burst == 0, draw.exponential(second * burst, _REQUESTS), 0)
        arrivals = np.cumsum(gaps).astype(int).tolist()
        prompts = np.clip(draw.lognormal(np.log(prompt), 0.7, _REQUESTS), 16, 8000).astype(int).tolist()
        outputs = np.clip(draw.lognormal(np.log(output), 0.6, _REQUESTS), 4, 1500).astype(int).tolist()
        requests = []
        for number in range(_REQUESTS):
            shared = ((f"system {number % 3}", share),) if share else ()
            own = (PRIVATE, prompts[number])
            requests.append(WorkloadRequest(number, arrivals[number], (*shared, own), outputs[number]))
        yield Question(name, "", Workload(requests, name, shares_prefixes=bool(share)))


def _loop(count: int, prompt: int, output: int) -> Question:
    requests = [WorkloadRequest(number, 0, ((PRIVATE, prompt),), output) for number in range(count)]
    return Question("saturation", "", Workload(requests, "loop", concurrency=_CLIENTS, shares_prefixes=False))


def _simulated(twin: Twin, answer: Answer) -> dict[int, Any]:
    (said,) = twin.answers([answer])
    return said.tokens_ns


def _last_ns(tokens_ns: dict[int, Any]) -> int:
    return max(int(times[-1]) for times in tokens_ns.values())


def _seconds(answers: Sequence[Answer]) -> float:
    return sum(_last_ns(answer.tokens_ns) for answer in answers if answer.tokens_ns) / 1e9


def _shares(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "| setting | right | wrong | not reached |"
    yield "|---|---|---|---|"
    for name in Setting._fields:
        said = [one.right[name] for one in outcomes]
        yield f"| {name} | {said.count(True)} | {said.count(False)} | {said.count(None)} |"


def _errors(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "| latency | statistic | median error | 90 % of errors below | largest | median floor | within target |"
    yield "|---|---|---|---|---|---|---|"
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for statistic in _TARGETS_PCT:
            figure = (metric, statistic)
            off, floor = (
                np.abs([pct for one in outcomes for name, pct in getattr(one, field).items() if name[1:] == figure])
                for field in _BY_FIGURE
            )
            usual, most = np.percentile(off, (50, 90))
            met = 100 * np.mean(off <= _TARGETS_PCT[statistic])
            yield (
                f"| {metric} | {statistic} | {usual:.1f} % | {most:.1f} % | {off.max():.1f} % | "
                f"{np.median(floor):.1f} % | {met:.0f} % |"
            )


def _kept(path: Path) -> Iterator[Outcome]:
    """Yield the outcomes in a file of JSON lines."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        for field in _BY_FIGURE:
            row[field] = {tuple(name.split("/")): value for name, value in row[field].items()}
        yield Outcome(**row)


def _keep(path: Path, one: Outcome) -> None:
    row = one._asdict()
    for field in _BY_FIGURE:
        row[field] = {"/".join(name): value for name, value in row[field].items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first", type=int, default=100, help="seed of the first server")
    parser.add_argument("--outcomes", type=Path, required=True, help="file with the servers that are done; it grows")
    given = parser.parse_args()
    outcomes = list(_kept(given.outcomes))
    done = {one.seed for one in outcomes}
    seeds = [seed for seed in range(given.first, given.first + given.servers) if seed not in done]
    with get_context("spawn").Pool(given.processes, maxtasksperchild=1) as pool:
        for one in pool.imap(outcome, seeds):
            outcomes.append(one)
            _keep(given.outcomes, one)
            print(_line(one), flush=True)
    for line in (*_shares(outcomes), "", *_errors(outcomes), ""):
        print(line)
    inside = np.mean([inside for one in outcomes for inside in one.inside])
    saturation = [abs(one.saturation_pct) for one in outcomes]
    print(f"in their 90 % interval: {100 * inside:.0f} % of the figures")
    print(f"throughput at saturation: off by {np.median(saturation):.1f} % (median), at most {max(saturation):.1f} %")
    print(f"time of the server: {max(one.server_s for one in outcomes):.0f} s at most")
    print(f"CPU time of the learner: {np.median([one.cpu_s for one in outcomes]):.0f} s in the median")
    print(f"memory of the learner: {max(one.memory_mb for one in outcomes):.0f} MB at most")


def _line(one: Outcome) -> str:
    wrong = [name for name, right in one.right.items() if right is False]
    worst = max(one.errors_pct.items(), key=lambda item: abs(item[1]))
    return (
        f"server {one.seed}: wrong {wrong or 'nothing'}; worst {' '.join(worst[0])} {worst[1]:+.1f} %; "
        f"{one.server_s:.0f} s of the server, {one.cpu_s:.0f} s of CPU"
    )


if __name__ == "__main__":
    main()
