"""How OpenAI's API and vLLM's metrics name the end of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apiserver.messages import Add


def finish_reason(row: Mapping[str, Any], asked: Add) -> str:
    """`stop`, `length` or `abort`, by the row of a request; empty for one that was refused."""
    if row["status"] == "rejected":
        return ""
    if row["status"] != "finished":
        return "abort"
    return "stop" if row["reason"] or row["output_tokens"] < asked.max_tokens else "length"
