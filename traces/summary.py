"""A summary of a workload: rates, burstiness, lengths, and possible prefix reuse.

It reads the requests once and keeps three numbers per request, so a million requests need little memory.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.tables import Distribution

_ROOT = 0


class PrefixReuse:
    """The prefixes of all requests so far, as a tree.

    `hit` must get the requests in order. It returns the number of tokens that a request shares with earlier ones.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, str, int], int] = {}
        self._longest: dict[tuple[int, str], int] = {}

    def hit(self, request: WorkloadRequest) -> int:
        """Return the number of prompt tokens that `request` shares with earlier requests, and add its tokens."""
        hit, matching = 0, True
        node = self._nodes.setdefault((_ROOT, request.adapter, 0), len(self._nodes) + 1) if request.adapter else _ROOT
        for name, tokens in request.content:
            if name == PRIVATE:  # no other request shares these or the following tokens
                return hit
            known = self._nodes.get((node, name, tokens))
            if matching:
                # The prefixes differ within this segment, unless another request continues at its end.
                longest = self._longest.get((node, name), 0)
                hit += min(tokens, longest)
                matching = known is not None
            node = self._add(node, name, tokens) if known is None else known
        # The last token of an output is never computed by the model, so no cache has it.
        self._longest[node, f"out:{request.id}"] = max(request.output_len - 1, 0)
        return hit

    def _add(self, node: int, name: str, tokens: int) -> int:
        if self._longest.get((node, name), 0) < tokens:
            self._longest[node, name] = tokens
        child = self._nodes[node, name, tokens] = len(self._nodes) + 1
        return child


_MINUTE_NS = 60_000_000_000


@dataclass(frozen=True)
class WorkloadSummary:
    """The summary of a workload. A rate or ratio is None if it is undefined (one request, or no time span).

    Attributes:
        prompt, output: distributions of the numbers of tokens of a request
        interarrival_cv: coefficient of variation (standard deviation / mean) of gaps between arrivals; 1 for Poisson
            arrivals
        sessions: number of conversations, each of which has one turn or more
        waiting: number of requests that are sent only after the answer to the turn before
        think_s: mean seconds from that answer to the request
        until_s: seconds during which users send requests; None if the requests are a number
        peak_minute_ratio: ratio of the requests in the busiest minute to the mean requests per minute
        tied_share: fraction of gaps that are zero; a large fraction is a sign of quantised timestamps
        prefix_hit_rate: fraction of prompt tokens that an infinite prefix cache would have
        prefix_block_hit_rate: fraction of blocks of `block_size` tokens that such a cache would have completely (a
            prompt's partial last block counts if its last token is in the cache)
        adapters: number of requests by LoRA adapter; empty if no request has one
        items: number of images, videos and clips of audio; `item_tokens` are their placeholder tokens
        repeated_items: number of them whose content an earlier one has
    """

    name: str
    requests: int
    concurrency: int | None
    shares_prefixes: bool
    sessions: int
    waiting: int
    think_s: float | None
    until_s: float | None
    span_s: float
    request_rate: float | None
    input_token_rate: float | None
    output_token_rate: float | None
    interarrival_cv: float | None
    tied_share: float | None
    peak_minute: int
    peak_minute_ratio: float | None
    prompt: Distribution
    output: Distribution
    prompt_tokens: int
    output_tokens: int
    block_size: int
    prefix_hit_tokens: int
    prefix_hit_rate: float
    prefix_hit_blocks: int
    prefix_block_hit_rate: float
    tenants: dict[str, int]
    slo_classes: dict[str, int]
    adapters: dict[str, int]
    items: int = 0
    item_tokens: int = 0
    repeated_items: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(workload: Workload, block_size: int = 16) -> WorkloadSummary:
    """Return the summary of `workload`. Raises UserError if it has no requests."""
    arrivals, prompts, outputs = array("q"), array("q"), array("q")
    tenants: dict[str, int] = {}
    slo_classes: dict[str, int] = {}
    adapters: dict[str, int] = {}
    reuse = PrefixReuse()
    seen_items: set[tuple[str, int]] = set()
    items = item_tokens = repeated_items = 0
    hit_tokens = hit_blocks = blocks = 0
    sessions: set[str] = set()
    think_ns: list[int] = []
    for request in workload.requests:
        arrivals.append(request.arrival_ns)
        prompts.append(request.prompt_len)
        outputs.append(request.output_len)
        tenants[request.tenant] = tenants.get(request.tenant, 0) + 1
        slo_classes[request.slo_class] = slo_classes.get(request.slo_class, 0) + 1
        sessions.add(request.session)
        if request.think_ns is not None:
            think_ns.append(request.think_ns)
        adapters[request.adapter] = adapters.get(request.adapter, 0) + 1
        blocks += -(-request.prompt_len // block_size)
        for item in request.items:
            items, item_tokens = items + 1, item_tokens + item.tokens
            repeated_items += (item.content, item.tokens) in seen_items
            if item.content:
                seen_items.add((item.content, item.tokens))
        if workload.shares_prefixes:
            hit = reuse.hit(request)
            hit_tokens += hit
            whole = hit == request.prompt_len
            hit_blocks += -(-hit // block_size) if whole else hit // block_size
    if not arrivals:
        raise UserError("trace", workload.name, "holds no requests")
    times = np.frombuffer(arrivals, dtype=np.int64)
    span_ns = int(times[-1] - times[0])
    per_second = 1e9 / span_ns if span_ns else None
    gaps = np.diff(times)
    _, by_minute = np.unique((times - times[0]) // _MINUTE_NS, return_counts=True)
    peak = int(by_minute.max())
    prompt_tokens, output_tokens = sum(prompts), sum(outputs)
    return WorkloadSummary(
        name=workload.name,
        requests=len(times),
        concurrency=workload.concurrency,
        shares_prefixes=workload.shares_prefixes,
        sessions=len(sessions - {""}),
        waiting=len(think_ns),
        until_s=None if workload.until_ns is None else workload.until_ns / 1e9,
        think_s=sum(think_ns) / len(think_ns) / 1e9 if think_ns else None,
        span_s=span_ns / 1e9,
        request_rate=len(times) * per_second if per_second else None,
        input_token_rate=prompt_tokens * per_second if per_second else None,
        output_token_rate=output_tokens * per_second if per_second else None,
        interarrival_cv=float(gaps.std() / gaps.mean()) if span_ns else None,
        tied_share=float((gaps == 0).mean()) if len(gaps) else None,
        peak_minute=peak,
        peak_minute_ratio=peak / (len(times) * _MINUTE_NS / span_ns) if span_ns >= _MINUTE_NS else None,
        prompt=Distribution.from_values(np.frombuffer(prompts, dtype=np.int64)),
        output=Distribution.from_values(np.frombuffer(outputs, dtype=np.int64)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_size=block_size,
        prefix_hit_tokens=hit_tokens,
        prefix_hit_rate=hit_tokens / prompt_tokens,
        prefix_hit_blocks=hit_blocks,
        prefix_block_hit_rate=hit_blocks / blocks,
        tenants=tenants,
        slo_classes=slo_classes,
        adapters={} if set(adapters) == {""} else adapters,
        items=items,
        item_tokens=item_tokens,
        repeated_items=repeated_items,
    )
