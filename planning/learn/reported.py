"""The settings that a server states in its `/metrics`, and how to get them."""

from __future__ import annotations

import urllib.request
from typing import Any

from pydantic import SecretStr

from traces.measured.prometheus import labels_of

_CACHE = "vllm:cache_config_info"  # vLLM and our own server describe their KV cache in its labels
_PATIENCE_S = 10.0


def read_page(url: str, key: SecretStr | None) -> str:
    """Return the text at `url`. Raises OSError or ValueError if there is none."""
    headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:
        return str(response.read().decode("utf-8", "replace"))


def reported_settings(metrics: str) -> dict[str, Any]:
    """Return the settings of the KV cache that the metrics state, by their names in a deployment."""
    labels = next(iter(labels_of(_CACHE, metrics)), {})
    settings: dict[str, Any] = {}
    for name, label in (("num_blocks", "num_gpu_blocks"), ("block_size", "block_size")):
        if labels.get(label, "").isdigit():
            settings[name] = int(labels[label])
    if (cached := labels.get("enable_prefix_caching", "")) in ("True", "False"):
        settings["enable_prefix_caching"] = cached == "True"
    return settings


def engines(metrics: str) -> int:
    """Return the number of engines whose metrics these are; 1 if they do not say."""
    return max(len({labels.get("engine") for labels in labels_of(_CACHE, metrics)}), 1)
