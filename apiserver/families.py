"""The metrics of a running server: vLLM 0.33's, by its names, types, labels and buckets, and two of ours.

A metric that the registry defines (`serving.metrics`) is described in its words. Of vLLM's, those are left out that a
server of text without adapters never shows.
"""

from __future__ import annotations

from apiserver.exposition import Family
from planning.exports.vllm_buckets import REQUEST_S, STEP_TOKENS, TOKEN_S, TTFT_S, one_two_five
from serving.metrics import METRICS

# fmt: off
LATENESS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# fmt: on
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
_DEFINED = {name: f"{known.label}: {known.definition}" for known in METRICS.values() for name in known.prometheus}

_GAUGES = (
    Family("vllm:num_requests_running", "gauge", "requests in the batch when the last step had ended"),
    Family("vllm:num_requests_waiting", "gauge", "requests queued at the scheduler when the last step had ended"),
    Family(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "queued requests that wait for room in the batch (capacity) or for KV from elsewhere (deferred)",
        split=("reason", ("capacity", "deferred")),
    ),
    Family("vllm:kv_cache_usage_perc", "gauge", "KV blocks referenced / KV blocks when the last step had ended"),
    Family(
        "vllm:engine_sleep_state",
        "gauge",
        "awake is always 1: these engines never sleep",
        split=("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    ),
)
_COUNTERS = (
    Family("vllm:prefix_cache_queries", "counter", "prompt tokens looked up in the prefix cache, at first admission"),
    Family("vllm:prefix_cache_hits", "counter", "prompt tokens found in the prefix cache, at first admission"),
    Family("vllm:external_prefix_cache_queries", "counter", "prompt tokens looked up in KV tiers by finished requests"),
    Family("vllm:external_prefix_cache_hits", "counter", "prompt tokens loaded from KV tiers by finished requests"),
    Family("vllm:mm_cache_queries", "counter", "images and sounds looked up: none"),
    Family("vllm:mm_cache_hits", "counter", "images and sounds found: none"),
    Family("vllm:num_preemptions", "counter", _DEFINED["vllm:num_preemptions_total"]),
    Family("vllm:prompt_tokens", "counter", "prompt tokens of requests that have their first output token"),
    Family(
        "vllm:prompt_tokens_by_source",
        "counter",
        "prompt tokens of requests that have their first output token, by where their KV came from",
        split=("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    ),
    Family(
        "vllm:prompt_tokens_cached",
        "counter",
        "cached prompt tokens of requests that have their first output token",
    ),
    Family(
        "vllm:prompt_tokens_cached_by_source",
        "counter",
        "prompt tokens found at first admission, by where their KV was",
        split=("source", ("device", "host", "p2p", "disk", "external_unspecified")),
    ),
    Family("vllm:generation_tokens", "counter", "output tokens"),
    Family(
        "vllm:request_success",
        "counter",
        "requests that have ended, by the reason",
        split=("finished_reason", FINISHED_REASONS),
    ),
)
_TIMES = {
    "vllm:time_to_first_token_seconds": TTFT_S,
    "vllm:inter_token_latency_seconds": TOKEN_S,
    "vllm:request_time_per_output_token_seconds": TOKEN_S,
    "vllm:e2e_request_latency_seconds": REQUEST_S,
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

CACHE_CONFIG = Family("vllm:cache_config_info", "gauge", "settings of the KV cache, as labels")
OF_THE_SERVER = (
    Family(
        "vllm:admission_rejections",
        "counter",
        "requests refused because too many were queued",
        split=("reason", ("max_num_queued_reqs", "max_num_queued_tokens")),
    ),
    Family(
        "tokentwin:lateness_seconds",
        "histogram",
        "when a token was written to its client minus when the engine had it, or the twin should have",
        LATENESS_S,
    ),
    Family("tokentwin:recording", "gauge", "1 while a recording is written, else 0"),
)


def _drafting(draft_tokens: int) -> tuple[Family, ...]:
    """Those of an engine whose drafts have at most so many tokens; positions count from 0."""
    return (
        Family("vllm:spec_decode_num_drafts", "counter", "drafts verified"),
        Family("vllm:spec_decode_num_draft_tokens", "counter", "draft tokens verified"),
        Family("vllm:spec_decode_num_accepted_tokens", "counter", "draft tokens accepted"),
        Family(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "counter",
            "draft tokens accepted, by their position in the draft",
            split=("position", tuple(map(str, range(draft_tokens)))),
        ),
    )


def of_an_engine(longest: int, draft_tokens: int) -> tuple[Family, ...]:
    """Those of each engine: its requests have at most `longest` tokens, and drafts, if any, `draft_tokens`."""
    histograms = [
        *(Family(name, "histogram", _DEFINED[name], bounds) for name, bounds in _TIMES.items()),
        Family(
            "vllm:request_inference_time_seconds",
            "histogram",
            "prefill and decode time of a finished request",
            REQUEST_S,
        ),
        *(Family(name, "histogram", help, one_two_five(longest)) for name, help in _LENGTHS.items()),
        Family("vllm:request_params_n", "histogram", "answers that a finished request asked for: 1", (1, 2, 5, 10, 20)),
        Family(
            "vllm:request_num_preemptions",
            "histogram",
            "times a finished request was preempted",
            (1, 2, 3, 4, 5, 10, 20),
        ),
        Family("vllm:iteration_tokens_total", "histogram", _DEFINED["vllm:iteration_tokens_total"], STEP_TOKENS),
    ]
    return (*_GAUGES, *_COUNTERS, *(_drafting(draft_tokens) if draft_tokens else ()), *histograms)
