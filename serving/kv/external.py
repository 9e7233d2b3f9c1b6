"""KV that lies outside an engine's own blocks: in slower memory, or in another engine.

A scheduler asks how much of a waiting request could be loaded instead of computed. If anything, the request gets blocks
for it and waits, loading, while others pass it; when the data are there it goes first. The rules are those of vLLM's
KV connectors. What a transfer costs, and when it ends, is the implementation's affair.
"""

from __future__ import annotations

from typing import Protocol

from serving.errors import UserError
from serving.request import Request
from serving.scheduler import Scheduler
from serving.workload import WorkloadRequest


class ExternalKv(Protocol):
    """What a scheduler asks of KV outside its engine, and tells it."""

    @property
    def synchronous(self) -> bool:
        """Whether the step that admits a request loads its KV, instead of a transfer that others pass."""
        ...

    def matched(self, request: Request, found: int) -> int:
        """Tokens after the first `found` that can be loaded; with `found` at most `known`, or `known - 1` where loads
        are synchronous.

        Called whenever a waiting request is considered, so it must change nothing.
        """
        ...

    def load(self, request: Request, start: int, tokens: int) -> None:
        """Begin to load `tokens` tokens from `start` on; the request has blocks for them, and is loading.

        To be answered, once and not before this call returns, by the scheduler's `loaded` or `load_failed`: also when
        the request has been aborted meanwhile, since its blocks are free only then. Where loads are synchronous, the
        request runs, and nothing is to be answered.
        """
        ...

    def admitted(self, request: Request) -> None:
        """`request` runs now, with whatever was found or loaded."""
        ...

    def keeps(self, request: Request) -> bool:
        """Whether the blocks of `request`, which has its last token, are still needed, until `release`."""
        ...


class ExternalScheduler(Scheduler, Protocol):
    """A policy that can load KV, and keep it for somebody else."""

    def connect(self, external: ExternalKv) -> None:
        """Ask `external` from now on."""
        ...

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        """Queue a request, of which another engine has sampled the first `outputs` tokens."""
        ...

    def loaded(self, request: Request) -> None:
        """The KV that `ExternalKv.load` loads is there: the request can run."""
        ...

    def load_failed(self, request: Request) -> None:
        """It never will be there: the request waits again, with nothing."""
        ...

    def release(self, request: Request) -> None:
        """The blocks that `ExternalKv.keeps` kept are needed no more."""
        ...


def connect(scheduler: Scheduler, external: ExternalKv) -> None:
    """Make `scheduler` use `external`. Raises UserError if its policy cannot."""
    calls = ("connect", "loaded", "load_failed", "release")
    if not all(hasattr(scheduler, call) for call in calls):
        remedy = f"cannot load KV from outside, which takes {', '.join(calls)}; derive it from VllmScheduler"
        raise UserError("policy", type(scheduler).__name__, remedy)
    scheduler.connect(external)  # type: ignore[attr-defined]
