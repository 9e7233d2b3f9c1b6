"""Traces of single requests (journeys), recorded for clients that ask for them with the header `X-Journey: 1`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentwin.serving.kv.blocks import blocks_for

_KEPT = 64  # maximum number of traces kept; the oldest is dropped first
_MOST_STEPS = 5000  # maximum number of steps kept in one trace
_TIMES = (
    "received_ns",
    "arrival_ns",
    "scheduled_ns",
    "first_token_ns",
    "finish_ns",
    "first_text_ns",
    "first_sent_ns",
    "last_text_ns",
    "last_sent_ns",
)


class Journeys:
    """The traces of the last requests that asked for one, by the name of the answer."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_name: dict[str, dict[str, Any]] = {}
        self._under_way: dict[int, dict[str, Any]] = {}

    def begin(self, id: int, name: str, prompt_tokens: int, received_ns: int) -> None:
        """Start to trace request `id`, whose answer is called `name`."""
        if name in self._by_name or len(self._by_name) >= _KEPT:
            dropped = self._by_name.pop(name if name in self._by_name else next(iter(self._by_name)))
            self._under_way = {other: kept for other, kept in self._under_way.items() if kept is not dropped}
        self._by_name[name] = self._under_way[id] = {
            "status": "under way",
            "replica": None,
            "prompt_tokens": prompt_tokens,
            "prefix_hit_tokens": None,
            "times": {"received_ns": received_ns},
            "steps": [],
        }

    def step(self, row: Mapping[str, Any]) -> None:
        if not self._under_way:
            return
        ids = row.get("row_ids") or ()
        for id in self._under_way.keys() & set(ids):
            journey = self._under_way[id]
            steps = journey["steps"]
            if len(steps) == _MOST_STEPS:
                continue
            tokens = row["row_tokens"][ids.index(id)]
            computed = (steps[-1]["computed"] if steps else 0) + tokens
            journey["replica"] = row["replica"]
            journey["times"].setdefault("scheduled_ns", row["start_ns"])
            steps.append(
                {
                    "step": row["step"],
                    "start_ns": row["start_ns"],
                    "end_ns": row["end_ns"],
                    "rows": len(ids),
                    "mates": [other for other in ids if other != id],
                    "tokens": tokens,
                    "computed": computed,
                    "blocks": blocks_for(computed, self._block_size),
                }
            )

    def end(self, row: Mapping[str, Any]) -> None:
        """Complete the trace of a request, if it is traced, with its row of the dataset `requests`."""
        if (journey := self._under_way.pop(row["request_id"], None)) is None:
            return
        hit = row.get("prefix_hit_tokens") or 0
        journey.update(status=row["status"], replica=row["replica"], prefix_hit_tokens=hit)
        journey["times"].update({name: row[name] for name in _TIMES if row.get(name) is not None})
        for step in journey["steps"]:
            step["blocks"] = blocks_for(step["computed"] + hit, self._block_size)

    def find(self, name: str) -> dict[str, Any] | None:
        """Return the trace of the request whose answer is called `name`; None if it was not traced."""
        return self._by_name.get(name)
