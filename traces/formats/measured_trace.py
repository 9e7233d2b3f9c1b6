"""Reports of load generators, read as traces of the requests that were sent.

If a report has several runs, `report.json#2` is the run with index 2. Prompts share no tokens, because no report states
which tokens they share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload

if TYPE_CHECKING:
    from tokentwin.traces.measured.run import MeasuredRun

AIPERF_EXPORT = "profile_export.jsonl"
_LOG = logging.getLogger("tokentwin")


class MeasuredTraceReader:
    """A trace reader for one format of measured runs.

    Attributes:
        name: the name of the format
        marks: names of fields that a report has within its first 64 KiB
        runs: function that reads the runs in a report
    """

    def __init__(self, name: str, marks: Sequence[str], runs: Callable[[Path], list[MeasuredRun]]) -> None:
        self.name = name
        self._marks = [f'"{mark}"'.encode() for mark in marks]
        self._runs = runs

    def matches(self, head: bytes) -> bool:
        """Return True if a file that begins with `head` is a report in this format."""
        return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and all(mark in head for mark in self._marks)

    def read(self, path: Path, number: int | None = None) -> Workload:
        """Return the requests of the run with index `number`; the index may be left out if there is only one run.

        Logs a warning about missing data, such as failed requests. Raises UserError if the report is damaged or has too
        few runs.
        """
        runs = self._runs(path)
        if number is None and len(runs) > 1:
            raise UserError("trace", str(path), f"holds {len(runs)} runs; give one of them: {_choices(path, runs)}")
        if number is not None and number >= len(runs):
            raise UserError("trace", f"{path}#{number}", f"must be one of {_choices(path, runs)}")
        run = runs[number or 0]
        if run.caution:
            _LOG.warning("%s: %s", path.name, run.caution)
        return run.workload


def _choices(path: Path, runs: Sequence[MeasuredRun]) -> str:
    numbered = [f"{path.name}#{number}" for number in range(len(runs))]
    return ", ".join(numbered)


# The functions import their formats late, because these imports take longer than a short simulation.


def _bench_serve(path: Path) -> list[MeasuredRun]:
    from tokentwin.traces.measured.bench_serve import BenchServe
    from tokentwin.traces.measured.json_file import JsonFile

    if JsonFile(path).get("input_lens") is None:
        remedy = "has no lengths of requests; run vllm bench serve with --save-result --save-detailed"
        raise UserError("trace", str(path), remedy)
    return BenchServe(files=(path.name,)).read(path.parent)


def _guidellm(path: Path) -> list[MeasuredRun]:
    from tokentwin.traces.measured.guidellm import GuideLlm

    return GuideLlm(file=path.name).read(path.parent)


def _aiperf(path: Path) -> list[MeasuredRun]:
    from tokentwin.traces.measured.aiperf import AiPerf

    if path.name != AIPERF_EXPORT:
        remedy = f"is what AIPerf exports; call it {AIPERF_EXPORT} again, beside its profile_export_aiperf.json"
        raise UserError("trace", str(path), remedy)
    return AiPerf(folder=".").read(path.parent)


BENCH_SERVE = MeasuredTraceReader("vllm bench serve", ("total_input_tokens", "request_throughput"), _bench_serve)
GUIDELLM = MeasuredTraceReader("GuideLLM", ("benchmarks",), _guidellm)
AIPERF = MeasuredTraceReader("AIPerf", ("metadata", "metrics", "benchmark_phase"), _aiperf)
