"""The protocol of a scheduling policy, and the search for one by name.

A policy plans a step, hears when it has ended, and never sees a clock, a token or a tensor: that is why the same object
serves the real engine and the simulator. The plain loop keeps one step in flight, the overlapped loop two. Over
pipeline stages there are more. Without `async_scheduling` no step may be planned for a request behind one of its tokens
that has not returned. With it, none in fewer than `decode_stagger` plans after the plan that samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from serving.decode_set import DecodeSet
from serving.deployments.config import SchedulerConfig
from serving.kv.blocks import KvBlocks
from serving.kv.content import Content
from serving.request import Request
from serving.step_plan import StepPlan
from serving.user_code.plugins import find, make
from serving.waiting import WaitingQueue
from serving.workload import WorkloadRequest

POLICIES = {
    "vllm": "serving.policies.vllm:VllmScheduler",
    "static": "serving.policies.static:StaticScheduler",
    "prefill-first": "serving.policies.prefill_first:PrefillFirstScheduler",
    "sglang": "serving.policies.sglang:SglangScheduler",
    "trtllm": "serving.policies.trtllm:TrtllmScheduler",
    "sarathi": "serving.policies.sarathi:SarathiScheduler",
    "sjf": "serving.policies.sjf:SjfScheduler",
    "priority-ageing": "serving.policies.priority_ageing:PriorityAgeingScheduler",
    "edf": "serving.policies.edf:EdfScheduler",
    "fair": "serving.policies.fair:FairScheduler",
}


class Scheduler(Protocol):
    """A policy. `running` is in order of admission; `requests` holds every request that has not ended.

    A policy that does not support its `config` (`speculative`, say) raises UserError when it is made. A policy that
    plans nothing though requests wait, so that more may come, has a number `hold_ns`: if nothing changes for so long,
    its method `hold_no_longer` is called, and then `schedule`.
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
        """Queue a request. One that can never fit comes back with status REJECTED and the reason."""

    def schedule(self) -> StepPlan:
        """Plan the next step. A plan with no tokens is not run and not committed."""

    def commit(self, plan: StepPlan, stopped: Collection[int] = ()) -> list[Request]:
        """End `plan`, the oldest in flight; return the requests that finished with it.

        `stopped` names requests whose sampled token ended them early (EOS, a stop string).
        """

    def abort(self, id: int) -> Request | None:
        """Drop a request at once, wherever it is, and return it; None if it has ended already."""

    def steady_steps(self) -> int:
        """Return how many coming plans are certain to be the decode set and nothing else, if nothing arrives.

        Only the last of them may be the last of some member. In the overlapped loop, where the step in flight is such a
        plan, too, none is. A policy that cannot tell returns 0.
        """

    def skip(self, steps: int) -> list[Request]:
        """Plan `steps` such plans and commit as many, at once; return the requests that finished with the last.

        A step that was in flight makes way for the last of them.
        """


def find_policy(name: str) -> Callable[..., Scheduler]:
    """Return the maker of schedulers of the policy called `name`, or at `package.module:Class`.

    Its arguments are as in `Scheduler`. It raises UserError if the policy's constructor fails.
    """
    calls = ("add", "schedule", "commit", "abort", "steady_steps", "skip")
    policy: Callable[..., Scheduler] = find("policy", name, POLICIES, calls)
    return policy if name in POLICIES else partial(make, "policy", name, policy)
