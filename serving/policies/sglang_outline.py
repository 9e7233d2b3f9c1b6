"""An outline of SGLang's rules on vLLM's blocks, for what `sglang_scheduler.py` does not cover.

Prompts and decodes never share a step (no `--enable-mixed-chunk`), and prompts come first. The scheduler looks for new
requests after every step with prompts, when nothing runs, and otherwise once in `scheduler_recv_interval` decode steps
(`SchedulerRecvSkipper`). SGLang's retraction of requests, and its estimate that outputs are shorter than their limit,
are not modelled: preemption and admission are as in `vllm`.
"""

from __future__ import annotations

from typing import Any

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.prefill_first import PrefillFirstScheduler
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import WorkloadRequest


class SglangOutline(PrefillFirstScheduler):
    """A scheduler with prefill first, which looks for new requests only at intervals."""

    def __init__(self, config: SchedulerConfig, **engine: Any) -> None:
        super().__init__(config, **engine)
        usual = {"schedule_policy": "fcfs", "priority_scheduling_preemption_threshold": None}
        for name, value in usual.items():
            if (stated := getattr(config, name)) != value:
                remedy = "is known only to SGLang's exact policy, which this deployment cannot have; leave it out"
                raise UserError(f"scheduler.{name}", stated, remedy)
        self._unseen: set[int] = set()
        self._decoded = 0  # steps since the policy last looked for requests

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        request = super().add(arrived, outputs)
        if request.id in self.requests:
            self._unseen.add(request.id)
        return request

    def head(self) -> Request | None:
        request = super().head()
        return None if request is None or request.id in self._unseen else request

    def schedule(self) -> StepPlan:
        if self._decoded >= self.config.scheduler_recv_interval or not self.running:
            self._look()
        plan = super().schedule()
        self._decoded += bool(plan.tokens)
        if plan.prefill_tokens:
            self._look()
        return plan

    def steady_steps(self) -> int:
        if not self._unseen:
            return super().steady_steps()
        return min(super().steady_steps(), max(self.config.scheduler_recv_interval - self._decoded, 0))

    def skip(self, steps: int) -> list[Request]:
        self._decoded = (self._decoded + steps - 1) % self.config.scheduler_recv_interval + 1
        return super().skip(steps)

    def _look(self) -> None:
        self._unseen.clear()
        self._decoded = 0
