"""The requests with which policies and routers are checked. They are equal on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tokentwin.serving.workload import Segment, WorkloadRequest

MS = 1_000_000


def requests(
    seed: int, count: int, every_ms: int, prompt: tuple[int, int], output: tuple[int, int]
) -> list[WorkloadRequest]:
    """Return requests of three tenants, two SLO classes and three priorities; no two arrive together."""
    chance = random.Random(seed)
    return [
        WorkloadRequest(
            id,
            id * every_ms * MS + chance.randrange(every_ms * MS),
            (("", chance.randint(*prompt)),),
            chance.randint(*output),
            priority=chance.randrange(3),
            tenant=chance.choice("aab"),
            slo_class=chance.choice(["chat", "batch"]),
        )
        for id in range(count)
    ]


def talks(asked: list[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Yield the requests with a common system prompt; half of them also continue an earlier prompt and its answer."""
    for request in asked:
        before: tuple[Segment, ...] = (("system", 40),)
        if request.id % 2:
            earlier = asked[request.id // 2]
            before = (*before, (f"user{earlier.id}", earlier.prompt_len), (f"out:{earlier.id}", earlier.output_len))
        yield replace(request, prompt=(*before, (f"user{request.id}", request.prompt_len)))
