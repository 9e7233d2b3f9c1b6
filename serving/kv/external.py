"""KV that lies outside an engine's own blocks: in slower memory, or in another engine.

A scheduler asks how much KV of a waiting request could be loaded instead of computed. If there is any, the request gets
blocks for it and waits, loading, while others pass it; when the data are there it goes first. The rules are those of
vLLM's KV connectors. The implementation decides what a transfer costs, and when it ends.
"""

from __future__ import annotations

from typing import Protocol

from serving.errors import UserError
from serving.request import Request
from serving.scheduler import Scheduler
from serving.workload import WorkloadRequest


class ExternalKv(Protocol):
    """The KV outside an engine, as its scheduler uses it."""

    @property
    def synchronous(self) -> bool:
        """True if the step that admits a request loads its KV, instead of a transfer that other requests pass."""
        ...

    def matched(self, request: Request, cached: int) -> int:
        """Return how many tokens after the first `cached` can be loaded.

        With `cached` they are at most `known` tokens, or `known - 1` if loads are synchronous. The scheduler calls this
        whenever it considers a waiting request, so it must change nothing.
        """
        ...

    def load(self, request: Request, start: int, tokens: int) -> None:
        """Begin to load `tokens` tokens from `start` on; the request has blocks for them, and is loading.

        Answer once, and not before this call returns, by the scheduler's `loaded` or `load_failed`. Answer also if the
        request has been aborted meanwhile, since its blocks are free only then. If loads are synchronous, the request
        runs, and needs no answer.
        """
        ...

    def admitted(self, request: Request) -> None:
        """Record that `request` runs now, with its cached or loaded tokens."""
        ...

    def keeps(self, request: Request) -> bool:
        """Return whether the blocks of `request`, which has its last token, are still needed, until `release`."""
        ...


class ExternalScheduler(Scheduler, Protocol):
    """A policy that can load KV, and keep it for another engine."""

    def connect(self, external: ExternalKv) -> None:
        """Ask `external` from now on."""
        ...

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        """Queue a request whose first `outputs` tokens another engine has sampled."""
        ...

    def loaded(self, request: Request) -> None:
        """Let the request run: the KV that `ExternalKv.load` loads is there."""
        ...

    def load_failed(self, request: Request) -> None:
        """Let the request wait again, without KV: the load has failed."""
        ...

    def release(self, request: Request) -> None:
        """Free the blocks that `ExternalKv.keeps` kept."""
        ...


def connect(scheduler: Scheduler, external: ExternalKv) -> None:
    """Make `scheduler` use `external`. Raises UserError if its policy cannot."""
    calls = ("connect", "loaded", "load_failed", "release")
    if not all(hasattr(scheduler, call) for call in calls):
        remedy = f"cannot load KV from outside, which takes {', '.join(calls)}; derive it from VllmScheduler"
        raise UserError("policy", type(scheduler).__name__, remedy)
    scheduler.connect(external)  # type: ignore[attr-defined]
