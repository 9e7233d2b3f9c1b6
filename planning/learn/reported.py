"""What a server reports of itself: settings in its metrics or in SGLang's `/server_info`, and counters of its steps."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from tokentwin.planning.learn.answers import Counted
from tokentwin.traces.measured.prometheus import labels_of, total_of

_CACHE = "vllm:cache_config_info"
_PATIENCE_S = 10.0
_OURS = "tokentwin:recording"  # a metric of our server alone, which imitates vLLM's and may have any policy


def read_page(url: str, key: SecretStr | None) -> str:
    """Return the text at `url`. Raises OSError or ValueError if there is none."""
    headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:
        return str(response.read().decode("utf-8", "replace"))


def vllm_settings(metrics: str) -> dict[str, Any]:
    """Return the settings of `Setting` that a scrape of vLLM or of our server reports; empty if there are none."""
    labels = next(iter(labels_of(_CACHE, metrics)), {})
    settings: dict[str, Any] = {}
    if (blocks := labels.get("num_gpu_blocks", "")).isdigit():
        settings["num_blocks"] = int(blocks)
    if (size := labels.get("block_size", "")).isdigit():
        settings["block_size"] = int(size)
    if (cached := labels.get("enable_prefix_caching", "")) in ("True", "False"):
        settings["enable_prefix_caching"] = cached == "True"
    if labels and _OURS not in metrics:
        settings["policy"] = "vllm"
    if (count := engines(metrics)) > 1:
        settings["replicas"] = count
    return settings


def engines(metrics: str) -> int:
    """Return the number of engines whose metrics these are; 1 if they do not say."""
    return max(len({labels.get("engine") for labels in labels_of(_CACHE, metrics)}), 1)


def sglang_settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `Setting` in the answer of SGLang's `/server_info`; empty for another server."""
    if "disable_radix_cache" not in info:
        return {}
    settings: dict[str, Any] = {"policy": "sglang", "enable_prefix_caching": not info["disable_radix_cache"]}
    if isinstance(overlap := info.get("disable_overlap_schedule"), bool):
        settings["async_scheduling"] = not overlap
    named = {
        "max_num_batched_tokens": "chunked_prefill_size",
        "max_num_seqs": "max_running_requests",
        "block_size": "page_size",
        "replicas": "dp_size",
    }
    for name, theirs in named.items():
        if _counts(value := info.get(theirs)):
            settings[name] = value
    if _counts(tokens := info.get("max_total_num_tokens")):
        settings["num_blocks"] = tokens // settings.get("block_size", 1)
    return settings


def sglang_blocks(metrics: str) -> dict[str, Any]:
    """Return the settings of `Setting` that a scrape of SGLang reports; empty if there are none.

    SGLang has gauges of its pages from 0.5.11 on, before that labels.
    """
    labels = next(iter(labels_of("sglang:cache_config_info", metrics)), {})
    settings: dict[str, Any] = {}
    for name, theirs in {"block_size": "page_size", "num_blocks": "num_pages"}.items():
        gauge = f"sglang:{theirs}"
        ranks, total = labels_of(gauge, metrics), total_of(gauge, metrics)
        if ranks and total:
            settings[name] = round(total / len(ranks))  # every rank reports the same
        elif (label := labels.get(theirs, "")).isdigit():
            settings[name] = int(label)
    return {"policy": "sglang", **settings} if settings else {}


def counted(before: str, after: str) -> Counted | None:
    """Return what the server counted between two scrapes; None if it counts no steps."""
    names = ("vllm:iteration_tokens_total_count", "vllm:num_preemptions_total")
    first, last = ([total_of(name, text) for name in names] for text in (before, after))
    if first[0] is None or last[0] is None:
        return None
    return Counted(round(last[0] - first[0]), round((last[1] or 0) - (first[1] or 0)))


def running(metrics: str) -> int:
    """Return the number of requests that run while vLLM's or SGLang's metrics are read; 0 if these do not say."""
    seen = (total_of(name, metrics) for name in ("vllm:num_requests_running", "sglang:num_running_reqs"))
    return round(next((count for count in seen if count is not None), 0))


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
