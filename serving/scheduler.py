"""The protocol of a scheduling policy, its queue of waiting requests, and the function that finds a policy by name.

A policy plans steps and is called when a step has ended. It never sees a clock, a token or a tensor, so the same object
serves the real engine and the simulator. The plain loop keeps one step in flight, the overlapped loop two, and a
pipeline of several stages more. Without `async_scheduling`, a request is not planned again while one of its sampled
tokens has not returned. With it, a decode of the request is planned no sooner than `decode_stagger` plans after the
plan that samples the token before.

The queue is ordered first come, first served, or by a key that is fixed at arrival. A policy may let requests wait for
others to join them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Protocol

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.blocks import KvBlocks
from tokentwin.serving.kv.content import Content
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.user_code.plugins import find, make
from tokentwin.serving.workload import WorkloadRequest

POLICIES = {
    "vllm": "tokentwin.serving.policies.vllm:VllmScheduler",
    "static": "tokentwin.serving.policies.static:StaticScheduler",
    "prefill-first": "tokentwin.serving.policies.prefill_first:PrefillFirstScheduler",
    "sglang": "tokentwin.serving.policies.sglang:Sglang",
    "trtllm": "tokentwin.serving.policies.trtllm:TrtllmScheduler",
    "sarathi": "tokentwin.serving.policies.sarathi:SarathiScheduler",
    "sjf": "tokentwin.serving.policies.sjf:SjfScheduler",
    "priority-ageing": "tokentwin.serving.policies.priority_ageing:PriorityAgeingScheduler",
    "edf": "tokentwin.serving.policies.edf:EdfScheduler",
    "fair": "tokentwin.serving.policies.fair:FairScheduler",
}


class WaitingQueue(Protocol):
    """Waiting requests. Iteration goes from the head to the end; the queue must not change during iteration."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def add(self, request: Request) -> None:
        """Add a new arrival."""

    def put_back(self, request: Request) -> None:
        """Put back a preempted request."""

    def remove(self, request: Request) -> None: ...
    def steps_at_head(self, head: Request, steps: int) -> int:
        """Return for how many of the next `steps` decode steps `head` stays the first to admit, if nothing arrives.

        The simulator skips this number of steps. 0 is always a valid answer.
        """


class FcfsQueue(deque[Request]):
    """A queue with arrivals at the end and preempted requests at the front."""

    def add(self, request: Request) -> None:
        self.append(request)

    def put_back(self, request: Request) -> None:
        self.appendleft(request)

    def remove(self, request: Request) -> None:
        if self and self[0] is request:  # nearly always
            self.popleft()
        else:
            super().remove(request)

    def steps_at_head(self, head: Request, steps: int) -> int:
        return steps


class OrderedQueue:
    """A queue with the smallest `key` first, preempted or not. Keys never change, and no two requests share one."""

    def __init__(self, key: Callable[[Request], tuple[Any, ...]]) -> None:
        self._requests: list[Request] = []
        self._key = key

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._key)

    put_back = add

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, self._key(request), key=self._key)]

    def steps_at_head(self, head: Request, steps: int) -> int:
        return steps


def by_priority(request: Request) -> tuple[int, int, str]:
    """Return the sort key of vLLM's priority policy. vLLM's ids are strings, so "10" comes before "9"."""
    return request.priority, request.arrived.arrival_ns, str(request.id)


class Hold:
    """A timer of the wait for more requests: it starts when requests begin to wait so that others can join them."""

    def __init__(self) -> None:
        self._since_ns: int | None = None

    @property
    def waits(self) -> bool:
        """True if any request waits."""
        return self._since_ns is not None

    def is_over(self, now_ns: int, hold_ns: int) -> bool:
        """Return whether requests have waited for `hold_ns`; a `hold_ns` of 0 means that none of them waits."""
        if not hold_ns:
            self._since_ns = None
            return False
        if self._since_ns is None:
            self._since_ns = now_ns
        return now_ns - self._since_ns >= hold_ns


class Scheduler(Protocol):
    """A policy. `running` is in order of admission; `requests` holds every request that has not ended.

    The constructor raises UserError if the policy does not support its `config` (`speculative`, for example). A policy
    may plan nothing while requests wait, so that more requests can join them. It then has an attribute `hold_ns`: if
    nothing changes for this time, the loop calls its method `hold_no_longer`, and then `schedule`.
    """

    config: SchedulerConfig
    pool: KvBlocks
    requests: dict[int, Request]
    running: dict[int, Request]
    waiting: WaitingQueue
    decodes: DecodeSet

    def __init__(
        self, config: SchedulerConfig, *, shares_prefixes: bool = True, content: Content | None = None
    ) -> None: ...

    def add(self, arrived: WorkloadRequest) -> Request:
        """Queue a request and return it. A request that can never fit has status REJECTED and a reason."""

    def schedule(self) -> StepPlan:
        """Plan the next step. A plan with no tokens is not run and not committed."""

    def commit(self, plan: StepPlan, stopped: Collection[int] = ()) -> list[Request]:
        """End `plan`, the oldest plan in flight; return the requests that finished with it.

        `stopped` holds the ids of requests that ended early with their sampled token (EOS or a stop string).
        """

    def abort(self, id: int) -> Request | None:
        """Drop a request at once, wherever it is, and return it; None if it has ended already."""

    def steady_steps(self) -> int:
        """Return how many of the next plans will certainly be the decode set alone, if no request arrives.

        Only the last of these plans may give a member its last token. In the overlapped loop, where the step in flight
        is such a plan, too, none of them may. A policy that cannot tell returns 0.
        """

    def skip(self, steps: int) -> list[Request]:
        """Make and commit `steps` steady plans at once; return the requests that finished with the last one.

        If a step was in flight, it is committed too, and the last of the new plans is in flight instead.
        """


def check_own_setting(policy: str, config: SchedulerConfig) -> None:
    """Raise UserError if `config` lacks the setting without which the policy would only be first come, first served."""
    if policy == "edf" and not config.edf_ttft_ms:
        remedy = "is missing; policy edf needs TTFT bounds in ms by SLO class, e.g. {chat: 300, batch: 20000}"
        raise UserError("scheduler.edf_ttft_ms", None, remedy)


def find_policy(name: str) -> Callable[..., Scheduler]:
    """Return a function that makes schedulers of the policy `name`: a known name or `package.module:Class`.

    The function takes the arguments of `Scheduler`. It raises UserError if the constructor of a user's own policy fails
    or writes to its settings.
    """
    calls = ("add", "schedule", "commit", "abort", "steady_steps", "skip")
    policy: Callable[..., Scheduler] = find("policy", name, POLICIES, calls)
    return policy if name in POLICIES else partial(make, "policy", name, policy)
