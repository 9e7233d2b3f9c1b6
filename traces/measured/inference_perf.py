"""Stages of kubernetes-sigs/inference-perf: one `stage_N_lifecycle_metrics.json` for each request rate.

The files have only distributions, so the workload is rebuilt from the settings of the load: a constant rate, prompts of
one length, and a maximum number of requests in flight. Latencies are the client's in seconds, including HTTP. The tool
counts output tokens by tokenising the text again, and measures gaps between streamed chunks instead of tokens. TPOT is
therefore computed as (E2E - TTFT) / (tokens - 1).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest, prompt_of
from tokentwin.traces.measured.json_file import MANY, JsonFile
from tokentwin.traces.measured.run import MeasuredRun, saturated

_STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}


class InferencePerf(Settings):
    """The stages in one folder, and the settings of the client.

    Attributes:
        max_in_flight: maximum number of outstanding requests of the client: workers x concurrency of a worker
        shared_prefixes, users, shared_prefix_tokens: settings of `shared_prefix` data: number of system prompts, number
            of users of each (who take turns), and tokens of a system prompt; the rest of a prompt belongs to its user
            alone
    """

    format: Literal["inference-perf"] = "inference-perf"
    folder: str
    output_tokens: int = Field(ge=2, description="tokens generated for each request; end-of-sequence is ignored")
    max_in_flight: int | None = Field(None, ge=1)
    shared_prefixes: int = Field(0, ge=0)
    users: int = Field(1, ge=1)
    shared_prefix_tokens: int = Field(0, ge=0)

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. A run is a stage and is named `stage N`."""
        folder = data / self.folder
        stages = {int(match[1]): path for path in folder.glob("stage_*") if (match := _STAGE.fullmatch(path.name))}
        if not stages:
            raise UserError("measured.folder", str(folder), "has no stage_N_lifecycle_metrics.json")
        return [self._run(f"stage {n}", JsonFile(stages[n])) for n in sorted(stages)]

    def _run(self, name: str, file: JsonFile) -> MeasuredRun:
        count = int(file.number("successes.count", 1, MANY))
        offered = file.number("load_summary.requested_rate", 1e-3)
        prompt = round(file.number("successes.prompt_len.mean", 1, MANY))
        requests = [
            WorkloadRequest(id_, round(id_ * 1e9 / offered), self._prompt(id_, prompt), self.output_tokens)
            for id_ in range(count)
        ]
        shares = self.shared_prefixes > 0 and self.shared_prefix_tokens > 0
        workload = Workload(requests, name=name, concurrency=self.max_in_flight, shares_prefixes=shares)
        failed = int(file.number("failures.count"))
        caution = f"{failed} requests failed and are left out" if failed else ""
        figures = self._figures(file, offered)
        return MeasuredRun(name, workload, figures, caution=caution, by_client=True, offered_per_s=offered)

    def _prompt(self, id_: int, tokens: int) -> tuple[Segment, ...]:
        if not self.shared_prefixes or not self.shared_prefix_tokens:
            return ((PRIVATE, tokens),)
        shared = min(self.shared_prefix_tokens, tokens)
        system, user = id_ % self.shared_prefixes, id_ // self.shared_prefixes % self.users
        return prompt_of((f"system {system}", shared), (f"user {user} of {system}", tokens - shared))

    def _figures(self, file: JsonFile, offered: float) -> dict[str, float]:
        latencies = {}
        for theirs, ours in _STATISTICS.items():
            latencies[f"ttft_ms.{ours}"] = 1e3 * file.number(f"successes.latency.time_to_first_token.{theirs}")
            latencies[f"e2e_ms.{ours}"] = 1e3 * file.number(f"successes.latency.request_latency.{theirs}")
        latencies["tpot_ms.mean"] = (latencies["e2e_ms.mean"] - latencies["ttft_ms.mean"]) / (self.output_tokens - 1)
        rate = file.number("successes.throughput.requests_per_sec")
        return latencies | {"request_throughput": rate, "saturated": saturated(rate, offered)}


_STAGE = re.compile(r"stage_(\d+)_lifecycle_metrics\.json(\.gz)?")
