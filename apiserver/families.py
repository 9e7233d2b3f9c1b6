"""The metrics of a running server: those of vLLM 0.33, with its names, types, labels and buckets, and two of our own.

Between the buckets of vLLM's latencies are finer ones, about 10 % apart, because steps of 7 ms are all "up to 10 ms".

If the registry (`tokentwin.serving.metrics`) defines a metric, its help is the registry's text. vLLM's metrics for
features that this server lacks, such as adapters, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tokentwin.apiserver.exposition import Family
from tokentwin.planning.exports.vllm_buckets import REQUEST_S, STEP_TOKENS, TOKEN_S, TTFT_S, one_two_five
from tokentwin.serving.metrics import METRICS

# fmt: off
LATENESS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_DECADE = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)
# fmt: on
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
_DEFINED = {name: f"{known.label}: {known.definition}" for known in METRICS.values() for name in known.prometheus}

_SPLITS = {
    "vllm:num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "vllm:engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "vllm:prompt_tokens_by_source": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    "vllm:prompt_tokens_cached_by_source": ("source", ("device", "host", "p2p", "disk", "external_unspecified")),
    "vllm:request_success": ("finished_reason", FINISHED_REASONS),
    "vllm:admission_rejections": ("reason", ("max_num_queued_reqs", "max_num_queued_tokens")),
}
_NONE = ("", ())
_GAUGES = {
    "vllm:num_requests_running": "requests in the batch when the last step had ended",
    "vllm:num_requests_waiting": "requests queued at the scheduler when the last step had ended",
    "vllm:num_requests_waiting_by_reason": "queued requests that wait for room in the batch (capacity) or for KV from "
    "elsewhere (deferred)",
    "vllm:kv_cache_usage_perc": "KV blocks referenced / KV blocks when the last step had ended",
    "vllm:engine_sleep_state": "1 for the present state: weights on the device (awake), or moved by a sleep",
}
_FIRST = "prompt tokens of requests that have their first output token"
_COUNTERS = {
    "vllm:prefix_cache_queries": "prompt tokens looked up in the prefix cache, at first admission",
    "vllm:prefix_cache_hits": "prompt tokens found in the prefix cache, at first admission",
    "vllm:external_prefix_cache_queries": "prompt tokens looked up in KV tiers by finished requests",
    "vllm:external_prefix_cache_hits": "prompt tokens loaded from KV tiers by finished requests",
    "vllm:mm_cache_queries": "images and sounds looked up: none",
    "vllm:mm_cache_hits": "images and sounds found: none",
    "vllm:num_preemptions": _DEFINED["vllm:num_preemptions_total"],
    "vllm:prompt_tokens": _FIRST,
    "vllm:prompt_tokens_by_source": f"{_FIRST}, by where their KV came from",
    "vllm:prompt_tokens_cached": f"cached {_FIRST}",
    "vllm:prompt_tokens_cached_by_source": "prompt tokens found at first admission, by where their KV was",
    "vllm:generation_tokens": "output tokens",
    "vllm:request_success": "requests that have ended, by the reason",
}
_DRAFTS = {
    "vllm:spec_decode_num_drafts": "drafts verified",
    "vllm:spec_decode_num_draft_tokens": "draft tokens verified",
    "vllm:spec_decode_num_accepted_tokens": "draft tokens accepted",
}


def _finer(bounds: tuple[float, ...], least_ms: int, most_ms: int) -> tuple[float, ...]:
    """Return `bounds` and those of each decade that begins from `least_ms` to `most_ms`, in seconds."""
    decades = (10**power for power in range(6) if least_ms <= 10**power <= most_ms)
    return tuple(sorted({*bounds, *(step * decade / 10_000 for decade in decades for step in _DECADE)}))


_TOKEN_S = _finer(TOKEN_S, 1, 100)
_TIMES = {
    "vllm:time_to_first_token_seconds": _finer(TTFT_S, 1, 1000),
    "vllm:inter_token_latency_seconds": _TOKEN_S,
    "vllm:request_time_per_output_token_seconds": _TOKEN_S,
    "vllm:e2e_request_latency_seconds": _finer(REQUEST_S, 10, 10_000),
    "vllm:request_queue_time_seconds": REQUEST_S,
    "vllm:request_prefill_time_seconds": REQUEST_S,
    "vllm:request_decode_time_seconds": REQUEST_S,
}
_LENGTHS = {
    "vllm:request_prompt_tokens": "prompt tokens of a finished request",
    "vllm:request_generation_tokens": "output tokens of a finished request",
    "vllm:request_max_num_generation_tokens": "output tokens of the longest answer to a finished request: its only one",
    "vllm:request_params_max_tokens": "output tokens that a finished request allowed",
    "vllm:request_prefill_kv_computed_tokens": "prompt tokens of a finished request that were computed",
}

HTTP_REQUESTS = Family("http_requests", "counter", "HTTP requests by method, path and kind of status")
TOOL_PARSES = Family("vllm:tool_call_parser_invocations", "counter", "times that text was read for tool calls")
LORA_REQUESTS = Family("vllm:lora_requests_info", "gauge", "time of this list of adapters, since 1970")
CACHE_CONFIG = Family("vllm:cache_config_info", "gauge", "settings of the KV cache, as labels")
_LATENESS = "when a token was written to its client minus when the engine had it, or the twin should have"
_REFUSED = "requests refused because too many were queued"
_STALLED = "real time for which a twin paused, because its machine stalled"
_POSITIONS = "draft tokens accepted, by their position in the draft"


def _families(kind: Literal["gauge", "counter"], helps: Mapping[str, str]) -> tuple[Family, ...]:
    return tuple(Family(name, kind, help, split=_SPLITS.get(name, _NONE)) for name, help in helps.items())


OF_THE_SERVER = (
    *_families("counter", {"vllm:admission_rejections": _REFUSED, "tokentwin:stalled_seconds": _STALLED}),
    Family("tokentwin:lateness_seconds", "histogram", _LATENESS, LATENESS_S),
    Family("tokentwin:recording", "gauge", "1 while a recording is written, else 0"),
)


def _drafting(draft_tokens: int) -> tuple[Family, ...]:
    """Return the metrics of an engine whose drafts have at most `draft_tokens` tokens; positions count from 0."""
    places = ("position", tuple(map(str, range(draft_tokens))))
    by_place = Family("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", _POSITIONS, split=places)
    return (*_families("counter", _DRAFTS), by_place)


def of_an_engine(longest: int, draft_tokens: int) -> tuple[Family, ...]:
    """Return the metrics of an engine whose requests have up to `longest` tokens, and drafts up to `draft_tokens`."""
    lengths = one_two_five(longest)
    histograms = {
        **{name: (_DEFINED[name], bounds) for name, bounds in _TIMES.items()},
        "vllm:request_inference_time_seconds": ("prefill and decode time of a finished request", REQUEST_S),
        **{name: (help, lengths) for name, help in _LENGTHS.items()},
        "vllm:request_params_n": ("answers that a finished request asked for: 1", (1, 2, 5, 10, 20)),
        "vllm:request_num_preemptions": ("times a finished request was preempted", (1, 2, 3, 4, 5, 10, 20)),
        "vllm:iteration_tokens_total": (_DEFINED["vllm:iteration_tokens_total"], STEP_TOKENS),
    }
    return (
        *_families("gauge", _GAUGES),
        *_families("counter", _COUNTERS),
        *(_drafting(draft_tokens) if draft_tokens else ()),
        *(Family(name, "histogram", *fields) for name, fields in histograms.items()),
    )
