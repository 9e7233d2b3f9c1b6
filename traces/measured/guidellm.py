"""Reports of GuideLLM with `kind=json`, which have a run for each benchmark, with its requests.

https://github.com/vllm-project/guidellm. Start times are seconds since the epoch, and latencies are from the request's
own start. The strategies `synchronous` and `concurrent` are closed loops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.traces.measured.json_file import MANY, JsonFile
from tokentwin.traces.measured.run import MeasuredRun, Observed, run_of_requests


class GuideLlm(Settings):
    """The benchmarks in one file; a benchmark's prompts share their first `shared_prefix_tokens` tokens."""

    format: Literal["guidellm"] = "guidellm"
    file: str
    shared_prefix_tokens: int = Field(0, ge=0)

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. A run's name is its index and strategy. TTFT and E2E are the client's."""
        report = JsonFile(data / self.file)
        benchmarks = report.get("benchmarks")
        if not isinstance(benchmarks, list) or not benchmarks:
            raise UserError("measured.file", str(report.path), "holds no benchmarks")
        return [self._run(report, f"benchmarks.{at}", at) for at in range(len(benchmarks))]

    def _run(self, report: JsonFile, path: str, number: int) -> MeasuredRun:
        answered = report.get(f"{path}.requests.successful")
        if not isinstance(answered, list) or not answered:
            raise report.error(f"{path}.requests.successful", answered, "must hold at least one answered request")
        kinds = (report.get(f"{path}.requests.{kind}") for kind in ("errored", "incomplete"))
        others = sum(len(kind) for kind in kinds if isinstance(kind, list))
        paths = [f"{path}.requests.successful.{at}" for at in range(len(answered))]
        starts_s = {request: report.number(f"{request}.request_start_time") for request in paths}
        paths.sort(key=lambda request: starts_s[request])
        observed = [_observed(report, request, id_, starts_s[paths[0]]) for id_, request in enumerate(paths)]
        strategy = report.get(f"{path}.config.strategy.type_")
        rate = None
        if report.get(f"{path}.config.strategy.rate") is not None:
            rate = report.number(f"{path}.config.strategy.rate", 1e-6)
        return run_of_requests(
            f"{number} {strategy}",
            observed,
            _slots(report, path, strategy),
            self.shared_prefix_tokens,
            caution=f"{others} requests failed or were cut off, and are left out" if others else "",
            by_client=True,
            offered_per_s=rate,
        )


def _slots(report: JsonFile, path: str, strategy: str) -> int | None:
    """Return the concurrency of a closed loop; None for a strategy that sends at given times."""
    if strategy == "synchronous":
        return 1
    return int(report.number(f"{path}.config.strategy.streams", 1, MANY)) if strategy == "concurrent" else None


def _observed(report: JsonFile, path: str, id_: int, start_s: float) -> Observed:
    arrival_ns = round(1e9 * (report.number(f"{path}.request_start_time") - start_s))
    ttft_ns = round(1e6 * report.number(f"{path}.time_to_first_token_ms"))
    e2e_ns = round(1e9 * report.number(f"{path}.request_latency"))
    if ttft_ns > e2e_ns:
        raise report.error(f"{path}.time_to_first_token_ms", ttft_ns / 1e6, "must not exceed request_latency")
    prompt, outputs = (int(report.number(f"{path}.{name}", 1, MANY)) for name in ("prompt_tokens", "output_tokens"))
    return Observed(id_, prompt, outputs, arrival_ns, arrival_ns + ttft_ns, arrival_ns + e2e_ns)
