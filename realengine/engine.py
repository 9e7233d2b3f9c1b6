"""A continuous-batching engine: the shared scheduler plans steps, and a runner computes them.

In the plain loop at most one step is in flight. In the overlapped loop there are two: while the device runs step N, the
host hands out the tokens of step N-1 and plans step N+1. Every phase is timed. Calibration fits these times, and the
simulator's times are compared with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, reduce
from time import perf_counter_ns, thread_time_ns
from typing import Any

from tokentwin.realengine.adapters import Adapters
from tokentwin.realengine.devices.memory import KvBudget
from tokentwin.realengine.drafters import Drafter, find_drafter, propose
from tokentwin.realengine.grammar_compiler import GrammarCompiler, Grammars
from tokentwin.realengine.host_tier import HostTier
from tokentwin.realengine.models.adapter_files import AdapterFiles
from tokentwin.realengine.models.weights import ModelFiles
from tokentwin.realengine.parallel.ranks import Ranks
from tokentwin.realengine.runnable import check_deployment
from tokentwin.realengine.runner import ModelRunner
from tokentwin.realengine.seating import Seating, WaitingDemand
from tokentwin.realengine.sequence import TokenSequence, masks_of_rows
from tokentwin.realengine.step import Load, Step
from tokentwin.realengine.step_input import pack
from tokentwin.realengine.verification import VerifiedTokens, verify_step
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.content import TokenContent
from tokentwin.serving.kv.contiguous_pool import longest_free
from tokentwin.serving.kv.grouped_pool import block_tables
from tokentwin.serving.kv.tiered_blocks import tier_blocks
from tokentwin.serving.policies.drafts import judge_drafts
from tokentwin.serving.policies.sglang_scheduler import SglangScheduler
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import Hold, Scheduler, check_own_setting, find_policy
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.user_code.own_contract import contract_with
from tokentwin.serving.workload import WorkloadRequest

_CLOSED = "was closed; make another"


class Engine:
    """A model, its KV cache and the shared scheduler.

    The attribute `deployment` is the deployment that runs; `limit` can lower its settings. If `gpu_memory_utilization`
    was set, `num_blocks` is the number of blocks that fits, and `memory_report` explains it. `draft` is the files of
    the draft model, if there is one. `adapters` are the LoRA adapters; None without the setting `lora`. Raises
    UserError when the deployment asks for something that the model or the machine cannot do.

    After an error in `launch` or `finish` a plan was made but not run, so the requests are lost. From then on both
    methods raise UserError until `reset` is called. If ranks were also lost, only `close` is possible.
    """

    def __init__(self, deployment: Deployment, files: ModelFiles, draft: ModelFiles | None = None) -> None:
        deployment = check_deployment(deployment, files.spec)
        self._in_flight: deque[Step] = deque()
        self.spec = files.spec
        self.source = files.source
        self.folder = files.folder
        parallel = deployment.tensor_parallel_size > 1
        self.runner: ModelRunner | Ranks = Ranks(deployment, files) if parallel else ModelRunner(deployment, files)
        self._runners = [self.runner]  # the target model's runner, and a draft model's if there is one
        self._compiler = GrammarCompiler()
        self.memory_report = ""
        self._drafter: Drafter | None = None
        self.tier: HostTier | None = None
        self.adapters: Adapters | None = None
        try:
            if deployment.lora is not None and self.runner.slots is not None:
                files_of_adapters = AdapterFiles(deployment.lora, files.spec)
                self.adapters = Adapters(deployment.lora, files_of_adapters, self.runner.slots)
            self._drafter = find_drafter(deployment, files.spec, draft)
            if self._drafter is not None and self._drafter.runner is not None:
                self._runners.append(self._drafter.runner)
            self.deployment = self._fit_memory(deployment)
            self._config = self.deployment.scheduler
            for runner in self._runners:
                runner.allocate(self._config.num_blocks)
            self._make_tier()
        except BaseException:
            self.close()
            raise
        self._depth = 2 if self._config.async_scheduling else 1
        self._unusable = ""  # reason why no step may run
        self.sequences: dict[int, TokenSequence] = {}
        self.scheduler: Scheduler
        self.reset()

    def _fit_memory(self, deployment: Deployment) -> Deployment:
        if deployment.gpu_memory_utilization is None:
            return deployment
        budgets = [runner.budget(deployment.gpu_memory_utilization) for runner in self._runners]
        budget = reduce(KvBudget.beside, budgets)
        budget.check(deployment.scheduler)
        self.memory_report = budget.explain()
        sized = deployment.rescheduled(num_blocks=budget.num_blocks)
        return sized.model_copy(update={"gpu_memory_utilization": None})

    def _make_tier(self) -> None:
        """Allocate the host memory of `kv_tiers`, and set its `kv_bytes_per_token` to the sum over all ranks."""
        config = self.deployment.kv_tiers
        if config is None:
            return
        target, *drafts = (runner.kv.block_bytes for runner in self._runners)
        self._block_bytes = target * self.deployment.tensor_parallel_size + sum(drafts)
        (slots,) = tier_blocks(config, self._block_bytes)
        for runner in self._runners:
            runner.keep_in_host(slots)
        config = config.model_copy(update={"kv_bytes_per_token": self._block_bytes // self._config.block_size})
        self.deployment = self.deployment.model_copy(update={"kv_tiers": config})

    @property
    def tier_name(self) -> str | None:
        """The name of the engine's KV tier; None without one."""
        return None if self.deployment.kv_tiers is None else self.deployment.kv_tiers.tiers[0].name

    @property
    def notes(self) -> dict[str, Any]:
        """Notes about the engine for a recording, in addition to its deployment; see `tokentwin.traces.recording`."""
        attention = self.runner.attention.name
        notes: dict[str, Any] = {"attention": attention, "model": self.source, "memory": self.memory_report}
        if self.spec.num_experts:
            notes["experts"] = {"experts": self.spec.num_experts, "topk": self.spec.experts_per_token}
        return notes

    def reset(self) -> None:
        """Forget all requests and cached prefixes, but keep the weights.

        It waits for the steps in flight and drops their results and errors. Raises UserError if the engine was closed.
        """
        if self._unusable == _CLOSED:
            raise UserError("engine", "closed", _CLOSED)
        while self._in_flight:
            if (launched := self._in_flight.popleft().launched) is not None:
                with suppress(Exception):
                    launched.wait()
        self._unusable = ""
        if self.tier is not None:
            self.tier.close()
        self.sequences.clear()
        self._leaving: set[int] = set()
        self._demand = WaitingDemand(self._config)
        self._preempted_ns: dict[int, int] = {}
        self._compiled_ns: dict[int, int] = {}
        self._compiler.close()
        self._host_free_ns: int | None = None
        self._hold = Hold()
        content = TokenContent(self.sequences, self._config.block_size)
        name, settings = self.deployment.policy, self.deployment.staged_settings
        check_own_setting(name, settings)
        self.scheduler = find_policy(name)(settings, content=content)
        if self.adapters is not None:
            self.adapters.reset()
            if not hasattr(self.scheduler, "adapters"):
                remedy = "knows no slots for adapters; derive it from VllmScheduler, or leave lora out"
                raise UserError("policy", name, remedy)
        self._seating = Seating(self._config, block_tables(self.scheduler.pool))
        self._policy = contract_with(name, self.scheduler, settings)
        if (tiers := self.deployment.kv_tiers) is not None:
            copies = [runner.copy for runner in self._runners]
            self.tier = HostTier(copies, tiers, self._block_bytes, self._config, content, self._policy)
            self._policy.connect(self.tier)
        speculative = self._config.speculative
        self._verified = VerifiedTokens(speculative.num_speculative_tokens if speculative and self._depth > 1 else 0)
        if self._drafter is not None:
            self._drafter.reset()
            judge_drafts(self.scheduler, self._verified)

    def limit(self, **scheduler: int | bool) -> None:
        """Lower settings of the scheduler, as far as this engine's buffers allow, and `reset`.

        Raises UserError for a setting that would need larger buffers or another engine.
        """
        allowed = {"num_blocks", "max_num_seqs", "max_num_batched_tokens", "scheduler_reserve_full_isl"}
        for name, value in scheduler.items():
            if name not in allowed or value > getattr(self._config, name):
                raise UserError(f"scheduler.{name}", value, "cannot change in an engine that is made; make another")
        settings = {**self._config.model_dump(), **scheduler}
        limited = parse(SchedulerConfig, settings, where="scheduler")
        self.deployment = self.deployment.model_copy(update={"scheduler": limited})
        self.reset()

    def close(self) -> None:
        """End all threads, processes and graphs of the engine; this also works after an error.

        It may be called more than once. The engine cannot be used afterwards.
        """
        self._unusable = _CLOSED
        self._in_flight.clear()
        self._compiler.close()
        if (grammars := self.__dict__.pop("grammars", None)) is not None:
            grammars.close()
        for runner in reversed(self._runners):
            runner.close()

    def add(self, arrived: WorkloadRequest, prompt: Sequence[int], *, grammar: str = "", **tokens: Any) -> Request:
        """Queue a request with token ids `prompt`; `tokens` are further arguments of `TokenSequence`.

        A `structured` request comes with a `grammar`, as `tokentwin.realengine.grammar` writes it, and waits until that
        is compiled. Raises UserError for a LoRA adapter that does not exist or that the engine cannot run.
        """
        if arrived.adapter:
            self.check_adapters([arrived.adapter])
        grammars = self.grammars if grammar else None
        request = self._policy.add(arrived)
        if request.status is not Status.REJECTED:
            self._forget_left(request.id)
            self.sequences[request.id] = TokenSequence(request, prompt, **tokens)
            if grammars is not None:
                self._compiler.compile(request, grammars, grammar)
            self._demand.wait(request)
        return request

    def check_adapters(self, names: Iterable[str]) -> None:
        """Raise UserError for the first of the LoRA adapters `names` that does not exist or that cannot run.

        An engine without the setting `lora` rejects requests with adapters, so it checks nothing.
        """
        if self.adapters is not None:
            self.adapters.check(names)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of grammars for this model's vocabulary.

        Raises UserError if the model has no tokenizer, or if llguidance is not installed.
        """
        if self.folder is None:
            remedy = "has no tokenizer, without which tokens have no text; use smollm2 or a model folder"
            raise UserError("model", self.source, remedy)
        return Grammars(self.folder, self.spec.vocab_size, self.spec.eos_ids)

    def abort(self, id: int) -> Request | None:
        """Abort a request and return it, or None if the scheduler does not have it; call this between steps."""
        request = self._policy.abort(id)
        if self.tier is not None:
            self.tier.must_settle = True
        if id in self._policy.leaving:
            self._leaving.add(id)
            self.sequences[id].mute()
        else:
            self._forget(id)
        return request

    def _forget_left(self, again: int = -1) -> None:
        """Forget the aborted requests that the scheduler kept for one more step and has left, or that come `again`."""
        for id in [id for id in self._leaving if id == again or id not in self._policy.leaving]:
            self._leaving.remove(id)
            self._forget(id)

    def _forget(self, id: int) -> None:
        self.sequences.pop(id, None)
        self._compiler.drop(id)
        if self._drafter is not None:
            self._drafter.leave(id)
        self._seating.leave(id)
        self._demand.leave(id)

    # The loop: launch steps while there is room, finish the oldest, and repeat

    @property
    def has_room(self) -> bool:
        """True if another step may be launched before one is finished.

        A step with masks is not overlapped, because the masks of the next step depend on its tokens.
        """
        return len(self._in_flight) < self._depth and not any(flight.plan.masked_rows for flight in self._in_flight)

    @property
    def may_get_work(self) -> bool:
        """True if a later `launch` may find work although no new request arrives.

        This is so while KV is being copied from or to host memory, while grammars are being compiled, and while a
        policy holds requests back for a limited time.
        """
        return self._hold.waits or self._compiler.busy or (self.tier is not None and self.tier.busy)

    def launch(self) -> Step | None:
        """Plan a step and hand it to the device; return None when there is nothing to run.

        Raises UserError if the device or a rank cannot run the step, and if an earlier error has left the engine
        unusable.
        """
        with self._whole_steps():
            return self._launch()

    def finish(self) -> Step | None:
        """Wait for the oldest step in flight and hand out its tokens; return None when none is in flight.

        Raises the same errors as `launch`.
        """
        with self._whole_steps():
            return self._finish()

    @contextmanager
    def _whole_steps(self) -> Iterator[None]:
        """Make the engine unusable after an error in the block.

        After an error in the middle of a step the scheduler and the device disagree, so no other step may follow.
        """
        if self._unusable:
            raise UserError("engine", "closed" if self._unusable == _CLOSED else "stopped", self._unusable)
        try:
            yield
        except BaseException as error:
            self._unusable = (
                f"an error has lost its requests: {error or type(error).__name__}; reset it, or make another"
            )
            raise

    def _launch(self) -> Step | None:
        if self._compiler.busy:
            self._take_grammars()
        plan_ns = perf_counter_ns()
        plan = self._next_plan(plan_ns)
        if not plan.tokens:
            if self.tier is not None:
                self.tier.attempted(plan_ns)
            if not self._in_flight:
                self._policy.must_get_on(plan)
            self._host_free_ns = None
            return None
        rows = plan.rows()
        if self.tier is not None:
            self.tier.before_step(plan, [flight.launched for flight in self._in_flight if flight.launched])
        flight = Step(plan, rows, plan_ns, perf_counter_ns(), self._preempted_ns, self._compiled_ns)
        if self._drafter is None or not self._in_flight:
            # with drafts it is handed over later, when the step under way has verified and drafted
            self._hand_over(flight, flight.scheduled_ns)
        flight.load = self._load()
        now = perf_counter_ns()
        flight.host_ns = now - (self._host_free_ns or plan_ns) if self._depth > 1 else None
        self._host_free_ns = now
        flight.tier = None if self.tier is None else self.tier.events()
        self._preempted_ns, self._compiled_ns = {}, {}
        self._in_flight.append(flight)
        return flight

    def _next_plan(self, plan_ns: int) -> StepPlan:
        """Return the next plan; it has no tokens if there is nothing to run, even after the end of a hold."""
        if self.tier is not None:
            self.tier.poll()  # once per step, because a recording states which copies had ended by `plan_ns`
        plan = self._plan()
        if self._hold.is_over(plan_ns, self._policy.hold_ns):
            self._policy.hold_no_longer()
            plan = self._plan()
        while plan.preempted and not plan.tokens and not self._in_flight:
            plan = self._plan()
        return plan

    def _take_grammars(self, wait: bool = False) -> None:
        for request, grammar in self._compiler.compiled(wait):
            self.sequences[request.id].grammar = grammar
            self._compiled_ns[request.id] = perf_counter_ns()

    def _hand_over(self, flight: Step, began_ns: int) -> None:
        """Make the tensors of a planned step from `began_ns` on, and hand the step to the device."""
        rows, masking_ns = flight.rows, perf_counter_ns()
        sequences = [self.sequences.get(row.request.id) for row in rows]
        masks = masks_of_rows(rows, sequences, self.spec.vocab_size) if flight.plan.masked_rows else [()] * len(rows)
        flight.mask_ns = perf_counter_ns() - masking_ns if flight.plan.masked_rows else 0
        seating, adapters = self._seating, flight.plan.adapters if self.adapters is not None else None
        plain, others = (None, list(range(len(rows)))) if adapters else seating.plain(rows, sequences)
        inputs = [seating.row(rows[number], sequences[number], masks[number]) for number in others]
        if self.adapters is not None and adapters:
            flight.adapters = self.adapters.ready(adapters)
            slots = [flight.adapters.slots.get(row.request.arrived.adapter) for row in rows]
            inputs = [given._replace(slot=slot) for given, slot in zip(inputs, slots, strict=True)]
        padding = seating.padding(flight.plan)
        others += range(len(rows), len(rows) + len(padding))
        tiles, config = self.runner.attention.tiles, self._config
        packed = pack(inputs + padding, config.block_size, config.max_num_seqs, tiles, plain, others)
        flight.prepared_ns = perf_counter_ns()
        flight.prepare_ns = flight.prepared_ns - began_ns
        flight.sampled_rows = packed.sample_rows
        copies = () if flight.adapters is None else flight.adapters.copies
        flight.launched = self.runner.launch(packed.step._replace(copies=copies) if copies else packed.step)
        flight.launch_ns = perf_counter_ns() - flight.prepared_ns if self.runner.device.asynchronous else 0

    def _plan(self) -> StepPlan:
        plan_start_ns = perf_counter_ns()
        plan = self._policy.schedule()
        if self.tier is not None and plan.preempted:
            self.tier.must_settle = True
        if self._leaving:
            self._forget_left()
        self._seating.follow(plan)
        self._demand.follow(plan)
        if self._drafter is not None:
            for request in plan.preempted:
                self._drafter.leave(request.id)
        self._preempted_ns.update((request.id, plan_start_ns) for request in plan.preempted)
        return plan

    def _finish(self) -> Step | None:
        if not self._in_flight:
            return None
        flight = self._in_flight.popleft()
        plan, launched = flight.plan, flight.launched
        assert launched is not None
        tokens = launched.wait()
        self._host_free_ns = perf_counter_ns()
        thread_ns = thread_time_ns()
        verify_step(flight, tokens, self.sequences, isinstance(self.scheduler, SglangScheduler))
        self._verified.accepted_tokens = flight.accepted
        proposed, draft_ns = self._draft(flight, flight.stopped)
        draft_thread_ns = thread_time_ns() - thread_ns if draft_ns is not None else 0
        finished = self._policy.commit(plan, flight.stopped)
        for request in dict.fromkeys(flight.sampled):
            self._demand.returned(request)
        for request in finished:
            self._forget(request.id)
        if self._leaving:
            self._forget_left()
        return flight.ended(finished, proposed, draft_ns, draft_thread_ns)

    def _draft(self, flight: Step, stopped: Collection[int]) -> tuple[dict[int, int] | None, int | None]:
        """Propose the drafts that the next step verifies; return their lengths by request id, and the time taken in ns.

        Then the step's full blocks, including the draft model's, are copied to the tier. In the overlapped loop the
        next step was planned for the maximum number of drafts and waits for them; it is then handed to the device.
        """
        began_ns = perf_counter_ns()
        proposed = None
        if self._drafter is not None:
            proposed = propose(self._drafter, flight.rows, stopped, self.sequences, self._seating)
        ended_ns = perf_counter_ns()
        if self.tier is not None:
            self.tier.step_ended()
        if proposed is None:
            return None, None
        if self._depth == 1:
            for row in flight.rows:
                row.request.proposed = proposed.get(row.request.id, 0)
            return proposed, ended_ns - began_ns
        if self._in_flight and self._in_flight[0].launched is None:
            self._hand_over(self._in_flight[0], perf_counter_ns())
            ended_ns = self._in_flight[0].prepared_ns
        most = self._verified.planned
        return {row.request.id: most for row in flight.rows if row.samples}, ended_ns - (self._host_free_ns or began_ns)

    def step(self) -> Step | None:
        """Launch steps while there is room and finish the oldest step; return None when there is nothing to run.

        No request can arrive during this call, so a policy that waits for more requests starts with those that it has.
        """
        while self.has_room and self.launch():
            pass
        if not self._in_flight and self._hold.waits:
            self._policy.hold_no_longer()
            return self.step()
        if not self._in_flight and self._compiler.busy:
            self._take_grammars(wait=True)
            return self.step()
        return self.finish()

    def _load(self) -> Load:
        scheduler, pool = self.scheduler, self.scheduler.pool
        used, longest = pool.total - pool.free, longest_free(pool)
        return Load(len(scheduler.running), len(scheduler.waiting), used, self._demand.blocks, longest)

    # Work outside of a run

    def warm_up(self) -> None:
        """Run steps of all sizes, the largest first, so that a measured run executes no code for the first time."""
        for runner in self._runners:
            runner.warm_up()

    def time_operations(self) -> None:
        """Time every operation of every step from now on; steps then run slower and without graphs."""
        self.runner.time_operations()

    def watch_speed(self) -> None:
        """Measure the device's speed between steps from now on, which takes up to 2 % of the time."""
        self.runner.watch_speed()

    def run_dummy(self, sizes: Sequence[int]) -> int:
        """Run one step with a row of the dummy request for each number of tokens in `sizes`; return its time in ns."""
        return self.runner.dummy_step(list(sizes))
