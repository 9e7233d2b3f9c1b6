"""Our schedulers in vLLM: `vllm serve MODEL --scheduler-cls tokentwin.vllmside.policy_scheduler.PolicyScheduler`.

Our scheduler object and our KV block pool make all decisions. vLLM's class around them only does the bookkeeping for
its clients; its own scheduling and KV cache manager decide nothing. The simulator and our engine run the same scheduler
object, in the plain and in the overlapped loop. Settings that the scheduler cannot follow raise UserError when vLLM
starts (`scheduler_settings.py`).
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import deque
from time import perf_counter_ns
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from tokentwin.serving.contract import Contract
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.content import TokenContent
from tokentwin.serving.kv.grouped_pool import block_tables
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import Hold, check_own_setting, find_policy
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.user_code.own_contract import contract_with
from tokentwin.serving.workload import PRIVATE, WorkloadRequest
from tokentwin.vllmside.request_tokens import RequestTokens
from tokentwin.vllmside.scheduler_settings import policy_and_settings, request_not_carried
from tokentwin.vllmside.step_rows import StepRow, StepRows

_log = init_logger("vllm.tokentwin")  # vLLM shows logs below its own name
_LABELS = ("tenant", "slo_class", "session")  # labels of a request, in its `extra_args` (in HTTP `vllm_xargs`)


class PolicyScheduler(Scheduler):
    """vLLM's bookkeeping around `ours`, the scheduler that makes the decisions.

    Raises UserError for settings that the scheduler cannot follow. In a child process of vLLM, the process exits with
    this error as its message.
    """

    kv_cache_manager: Any
    prev_step_scheduled_req_ids: set[str]
    finished_req_ids: set[str]

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, structured_output_manager: Any, block_size: int, **more: Any
    ) -> None:
        try:
            self.policy_name, self.settings = policy_and_settings(
                vllm_config, kv_cache_config, block_size, more.get("hash_block_size"), vllm.__version__
            )
            super().__init__(vllm_config, kv_cache_config, structured_output_manager, block_size, **more)
            self._known: dict[int, RequestTokens] = {}
            self._numbers: dict[str, int] = {}
            self._arrived = 0
            self._begin_anew()
        except UserError as error:
            if multiprocessing.parent_process() is None:
                raise
            sys.exit(f"tokentwin: {error}")
        self.kv_cache_manager = _OurBlocks(self, self.kv_cache_manager.coordinator)
        self._planned: deque[tuple[SchedulerOutput, StepPlan | None]] = deque()
        self._refused: list[Any] = []  # refused requests whose clients have not been informed
        self._held_back: list[Any] = []  # requests without a step while vLLM admits no new ones
        self._hold = Hold()
        self._lookups = PrefixCacheStats()
        _log.info("policy %s of tokentwin decides; its settings: %s", self.policy_name, self.settings)

    def _begin_anew(self) -> None:
        content = TokenContent(self._known, self.settings.block_size)
        check_own_setting(self.policy_name, self.settings)
        self.ours = find_policy(self.policy_name)(self.settings, content=content)
        self._contract: Contract = contract_with(self.policy_name, self.ours, self.settings)
        self._rows = StepRows(block_tables(self.ours.pool))

    # Requests that come and go

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        if lacking := request_not_carried(request):
            self._refuse(request, f"{lacking} cannot be combined with a policy of tokentwin's")
            return
        if self.pause_state is PauseState.PAUSED_NEW:
            self._held_back.append(request)
            return
        self._add(request)

    def _add(self, request: Any) -> None:
        self._arrived += 1
        self._known[self._arrived] = RequestTokens(request)
        self._numbers[request.request_id] = self._arrived
        ours = self._contract.add(self._workload_request(self._arrived, request))
        if ours.status is Status.REJECTED:
            self._forget(request.request_id)
            self._refuse(request, ours.reason)

    @staticmethod
    def _workload_request(number: int, request: Any) -> WorkloadRequest:
        """Return `request` with what a policy may know; the length of its answer is its `max_tokens`."""
        more = request.sampling_params.extra_args or {}
        labels: dict[str, Any] = {name: str(more[name]) for name in _LABELS if more.get(name) is not None}
        return WorkloadRequest(
            id=number,
            arrival_ns=int(request.arrival_time * 1e9),
            prompt=((PRIVATE, request.num_prompt_tokens),),
            output_len=request.max_tokens,
            priority=request.priority,
            skip_reading_prefix_cache=bool(getattr(request, "skip_reading_prefix_cache", False)),
            **labels,
        )

    def _refuse(self, request: Any, why: str) -> None:
        _log.error("request %s: %s", request.request_id, why)
        self._refused.append(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        ended: list[Any] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            number = self._numbers.get(request.request_id)
            if number is not None:
                self._contract.abort(number)
                self._forget(request.request_id)
        self._refused = [request for request in self._refused if not request.is_finished()]
        self._held_back = [request for request in self._held_back if not request.is_finished()]
        return ended

    def _forget(self, id: str) -> None:
        number = self._numbers.pop(id)
        del self._known[number]
        self._rows.forget(number)

    # A step

    def schedule(self, *_: Any, **__: Any) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        before, self.prev_step_scheduled_req_ids = self.prev_step_scheduled_req_ids, set()
        plan = None if self.pause_state is PauseState.PAUSED_ALL else self._plan(output, before)
        output.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        self._planned.append((output, plan))
        return output

    def _plan(self, output: SchedulerOutput, before: set[str]) -> StepPlan | None:
        """Plan a step into `output`; return None if it runs nothing. `before` has the requests of the last step."""
        plan = self._contract.schedule()
        if self._hold.is_over(perf_counter_ns(), self._contract.hold_ns):
            self._contract.hold_no_longer()
            plan = self._contract.schedule()
        rows = self._rows.make_rows(plan)  # a plan that runs nothing may have preemptions
        output.preempted_req_ids = {self._preempted(request) for request in plan.preempted}
        if not plan.tokens:
            if not plan.preempted and not any(earlier for _, earlier in self._planned):
                self._contract.must_get_on(plan)
            return None
        self._tell(output, rows, before)
        return plan

    def _preempted(self, ours: Request) -> str:
        request = self._known[ours.id].request
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED)
        return str(request.request_id)

    def _tell(self, output: SchedulerOutput, rows: list[StepRow], before: set[str]) -> None:
        """Write `rows` to `output` in the form for vLLM's workers, and update vLLM's own counts."""
        cached = CachedRequestData.make_empty()
        output.scheduled_cached_reqs = cached
        for row in rows:
            request = self._known[row.request.id].request
            id = request.request_id
            request.num_computed_tokens = row.start
            if row.admitted:
                self._admitted(request, row)
            if row.admitted and (self.use_v2_model_runner or not row.again):
                sent = [request._all_token_ids] if self.use_v2_model_runner else []
                output.scheduled_new_reqs.append(NewRequestData.from_request(request, row.blocks, *sent))
            else:
                cached.req_ids.append(id)
                cached.new_block_ids.append(row.blocks if any(row.blocks) else None)
                cached.num_computed_tokens.append(row.start)
                cached.num_output_tokens.append(row.outputs)
                if row.again:
                    cached.resumed_req_ids.add(id)
                if not self.use_v2_model_runner and id not in before:
                    cached.all_token_ids[id] = [*request.all_token_ids]
            request.num_computed_tokens += row.tokens
            request.num_in_flight_tokens += row.tokens
            request.is_prefill_chunk = not row.samples
            output.num_scheduled_tokens[id] = row.tokens
            self.prev_step_scheduled_req_ids.add(id)
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())

    def _admitted(self, request: Any, row: StepRow) -> None:
        request.status = RequestStatus.RUNNING
        known, cached = row.request.known, row.request.cached
        if self.settings.enable_prefix_caching and self.log_stats:
            self._lookups.record(num_tokens=known, num_hits=cached, preempted=row.request.preemptions > 0)
        if request.prefill_stats and not row.again:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=cached,
                num_external_cached_tokens=0,
            )
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> dict[int, Any]:
        planned, plan = self._planned.popleft()
        if planned is not scheduler_output:
            raise RuntimeError("vLLM returns a step that is not the oldest in flight")
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if plan is not None:
            live = scheduler_output.num_scheduled_tokens.keys() & self._numbers.keys()
            ended = {id: self._numbers[id] for id in sorted(live - self.requests.keys())}
            self._contract.commit(plan, ended.values())
            for id in ended:
                self._forget(id)
        if self._refused:
            self._answer_refused(outputs)
        return outputs

    def _answer_refused(self, outputs: dict[int, Any]) -> None:
        refused, self._refused = self._refused, []
        for request in refused:
            super().finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            output = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    # Calls from vLLM

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.ours.running), len(self.ours.waiting) + len(self._refused) + len(self._held_back)

    def get_num_unfinished_requests(self) -> int:
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        return len(self.ours.requests) + len(self._refused)

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state is PauseState.PAUSED_NEW:
            new = [ours.id for ours in self.ours.waiting if not ours.preemptions]
            self._held_back += [self._known[number].request for number in new]
            for number in new:
                self._contract.abort(number)
                self._forget(self._known[number].request.request_id)
        elif pause_state is PauseState.UNPAUSED:
            held_back, self._held_back = self._held_back, []
            for request in held_back:
                self._add(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes; while requests run, do nothing and return False."""
        begun = self.ours.running or any(ours.preemptions for ours in self.ours.waiting)
        if begun or any(plan for _, plan in self._planned):
            _log.warning("the prefix cache is not reset while requests run")
            return False
        waiting = [request.arrived for request in self.ours.waiting]
        self._begin_anew()
        for arrived in waiting:
            self._contract.add(arrived)
        self._lookups.reset = True
        return True


class _OurBlocks:
    """A KV cache manager for vLLM's bookkeeping, with the numbers of our pool; it allocates and frees nothing."""

    def __init__(self, scheduler: PolicyScheduler, coordinator: Any) -> None:
        self._scheduler = scheduler
        self.coordinator = coordinator  # vLLM reads the block sizes from it

    @property
    def block_pool(self) -> _OurBlocks:
        """The object with the numbers of blocks; as in vLLM's pool, one block is never used."""
        return self

    @property
    def num_gpu_blocks(self) -> int:
        return self._scheduler.ours.pool.total + 1

    def get_num_free_blocks(self) -> int:
        return self._scheduler.ours.pool.free

    @property
    def usage(self) -> float:
        pool = self._scheduler.ours.pool
        return 1 - pool.free / pool.total

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        made, self._scheduler._lookups = self._scheduler._lookups, PrefixCacheStats()
        return made

    def estimate_cached_tokens(self, request: Any) -> int:
        number = self._scheduler._numbers.get(request.request_id)
        ours = self._scheduler.ours.requests.get(number or 0)
        return ours.full_blocks(self._scheduler.block_size) * self._scheduler.block_size if ours else 0

    def free(self, request: Any) -> None:
        pass

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        pass

    def take_events(self) -> None:
        return None
