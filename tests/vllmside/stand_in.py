"""A stand-in for vLLM's scheduler as the recorder sees it, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def request(name: str, prompt: int, max_tokens: int, hashes: list[bytes] | None = None, **more: Any) -> Any:
    """Return a request that has just arrived."""
    made = SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_tokens=prompt, max_tokens=max_tokens, arrival_time=100.0,
        block_hashes=hashes or [], priority=0, use_structured_output=False, skip_reading_prefix_cache=False,
        num_computed_tokens=0, is_prefill_chunk=False, num_preemptions=0, spec_token_ids=[],
        status=SimpleNamespace(name="WAITING"), num_output_tokens=0,
    )  # fmt: skip
    made.__dict__.update(more)
    made.is_finished = lambda: made.status.name.startswith("FINISHED")
    return made


class Scheduler:
    """The part of vLLM's scheduler that the recorder reads."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        pool = SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 7)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.requests), 0

    def plan(self, tokens: dict[str, int], new: dict[str, int] | None = None, **more: Any) -> Any:
        """Return a step with these tokens; `new` are admitted requests, with the number of tokens found of each."""
        for name, count in tokens.items():
            one = self.requests[name]
            one.num_computed_tokens = max(one.num_computed_tokens, (new or {}).get(name, 0)) + count
            one.is_prefill_chunk = one.num_computed_tokens < one.num_tokens
        admitted = [SimpleNamespace(req_id=name, num_computed_tokens=found) for name, found in (new or {}).items()]
        again = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        given = {"scheduled_spec_decode_tokens": {}, "has_structured_output_requests": False, **more}
        return SimpleNamespace(
            num_scheduled_tokens=tokens, scheduled_new_reqs=admitted, scheduled_cached_reqs=again, **given
        )

    def outputs(self, tokens: dict[str, int], finished: dict[str, str] | None = None) -> list[Any]:
        """Return what clients are sent: a number of tokens each; requests in `finished` have that status."""
        sent = []
        for name, count in tokens.items():
            one = self.requests[name]
            one.num_tokens += count
            one.num_output_tokens += count
            status = (finished or {}).get(name)
            if status is not None:
                one.status = SimpleNamespace(name=status)
                del self.requests[name]
            sent.append(SimpleNamespace(request_id=name, new_token_ids=[7] * count, finish_reason=status))
        return [SimpleNamespace(outputs=sent)]
