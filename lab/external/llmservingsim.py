"""Runs of LLMServingSim's vLLM bench: `requests.jsonl` beside `workload_hashed.jsonl`.

https://github.com/casys-kaist/LLMServingSim. Arrivals are epoch seconds on the client's clock, the other times
monotonic seconds on the engine's. The smallest time from arrival to queueing is taken as the difference of the clocks.
Prompts are chains of 16-token block ids: equal ids mean equal blocks after equal prefixes. Output lengths are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest, shares_prefixes
from tokentwin.traces.formats.rows import Row, json_rows
from tokentwin.traces.measured.run import MeasuredRun, Observed, figures_of_requests

BLOCK_TOKENS = 16
SECOND_NS = 10**9


class LlmServingSim(Settings):
    """One run in one folder."""

    format: str
    folder: str
    requests: str = "requests.jsonl"
    workload: str = "workload_hashed.jsonl"

    def read(self, data: Path) -> list[MeasuredRun]:
        """Read the run; see `MeasuredFormat`. TTFT counts from the client's arrival, as the simulator's does."""
        folder = data / self.folder
        measured, offered = list(json_rows(folder / self.requests)), list(json_rows(folder / self.workload))
        if not measured or len(measured) != len(offered):
            remedy = f"has {len(measured)} requests, but {self.workload} has {len(offered)}"
            raise UserError("requests", str(folder / self.requests), remedy)
        start = min(row.time_ns("arrival_time", SECOND_NS) for row in measured)
        clocks = min(row.time_ns("queued_ts", SECOND_NS) - row.time_ns("arrival_time", SECOND_NS) for row in measured)
        pairs = [_request(*pair, start, start + clocks) for pair in zip(measured, offered, strict=True)]
        pairs.sort(key=lambda pair: (pair[0].arrival_ns, pair[0].id))
        requests = [request for request, _ in pairs]
        workload = Workload(requests, name=folder.name, shares_prefixes=shares_prefixes(requests))
        return [MeasuredRun("all", workload, figures_of_requests([observed for _, observed in pairs]))]


def _request(row: Row, offered: Row, start: int, engine_start: int) -> tuple[WorkloadRequest, Observed]:
    """Return one request and its observed times; `start` and `engine_start` are the run's start on both clocks."""
    prompt, outputs = row.integer("input_toks", 1), row.integer("output_toks", 1)
    if (offered.integer("input_toks", 1), offered.integer("output_toks", 1)) != (prompt, outputs):
        raise offered.error("input_toks", offered.fields["input_toks"], f"differs from the request in {row.path.name}")
    id_ = row.line - 1
    arrival_ns = row.time_ns("arrival_time", SECOND_NS) - start
    first, last = (row.time_ns(name, SECOND_NS) - engine_start for name in ("first_token_ts", "last_token_ts"))
    if not arrival_ns <= first <= last:
        raise row.error("first_token_ts", row.fields["first_token_ts"], "must lie between arrival and last token")
    return (
        WorkloadRequest(id_, arrival_ns, tuple(_segments(offered, prompt)), outputs),
        Observed(id_, prompt, outputs, arrival_ns, first, last),
    )


def _segments(row: Row, prompt: int) -> Iterator[Segment]:
    """Yield full prompt blocks by their ids, then the rest of the prompt as a private segment.

    Ids of the output's blocks may follow those of the prompt.
    """
    full, ids = prompt // BLOCK_TOKENS, row.items("hash_ids_16")
    if (said := row.integer("n_prompt_blocks_16", 0, default=full)) != full:
        raise row.error("n_prompt_blocks_16", said, f"must be {full}, or be left out")
    if len(ids) < full:
        raise row.error("hash_ids_16", f"{len(ids)} ids", f"must have one for each of the {full} full prompt blocks")
    for id_ in ids[:full]:
        yield f"h{id_}", BLOCK_TOKENS
    if prompt % BLOCK_TOKENS:
        yield PRIVATE, prompt % BLOCK_TOKENS
