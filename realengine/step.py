"""A step of the engine: its launch on the device, and its results after it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tokentwin.realengine.adapters import StepAdapters
from tokentwin.realengine.devices.device import Mark, OpTimes, Pending
from tokentwin.realengine.logit_rules import Logprob, PromptLogprob
from tokentwin.realengine.sampling import TokenLogprobs
from tokentwin.realengine.step_input import Layout
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import Row, StepPlan


class Launched:
    """A step that was launched on the device.

    Times are on `perf_counter_ns` and valid after `wait`. If steps are not timed, all times are the end of the wait.

    Attributes:
        graph: True if the step was run as a graph
        speed: mean of the device's speed before and after the step; None if speed is not measured
        logits: `[S, vocab]` logits after masks and changes, valid from `wait` to the next step; None unless they are
            kept
        copying: marks before and after the copies of LoRA adapters into slots; None without a copy
        scored: by index of the given row, position in the prompt of the first token with a logprob, and the logprobs;
            valid after `wait`
        pooled: by sample, final hidden state `[hidden]` in float32 on the host, of each pooling request; valid after
            `wait`
    """

    def __init__(self, layout: Layout, tokens: torch.Tensor, graph: bool, expert_tokens: torch.Tensor | None) -> None:
        self.layout = layout
        self.graph = graph
        self.pending: Pending | None = None
        self.marks: list[Mark] = []
        self.times: OpTimes | None = None
        self.speed: float | None = None
        self.logits: torch.Tensor | None = None
        self.token_logprobs: TokenLogprobs | None = None
        self.copying: tuple[Mark, Mark] | None = None
        self.pooled: dict[int, torch.Tensor] = {}
        self.scored: dict[int, tuple[int, list[PromptLogprob]]] = {}
        self._tokens = tokens
        self._expert_tokens = expert_tokens
        self._seen_ns = 0

    def done(self) -> bool:
        return self.pending is not None and self.pending.done()

    def wait(self) -> list[int]:
        """Wait for the step; return the sampled tokens `[S]` in the order of the layout's samples."""
        assert self.pending is not None
        self.pending.wait()
        self._seen_ns = perf_counter_ns()
        tokens: list[int] = self._tokens[: self.layout.samples].tolist()
        return tokens

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The logprob of each token, with the maximum number of alternatives that a request wanted; valid after `wait`.

        None if no request wanted logprobs.
        """
        return None if self.token_logprobs is None else self.token_logprobs.on_host()

    @property
    def expert_tokens(self) -> NDArray[np.int32] | None:
        """The number of tokens that each expert got, `[layers, experts]`; None in a dense model.

        It is valid from `wait` until the third launch after this one.
        """
        return None if self._expert_tokens is None else self._expert_tokens.numpy()

    @property
    def start_ns(self) -> int:
        return self._passed(0)

    @property
    def computed_ns(self) -> int:
        return self._passed(1)

    @property
    def end_ns(self) -> int:
        return self._passed(2)

    @property
    def thread_ns(self) -> int | None:
        """CPU time of the thread that computed the step; None if no CPU thread did, or if steps are not timed."""
        began, *_, ended = (mark.thread_ns for mark in self.marks) if self.marks else (None, None)
        return None if began is None or ended is None else ended - began

    @property
    def copy_ns(self) -> int:
        """Device time, before `start_ns`, of copies of LoRA adapters into slots."""
        return 0 if self.copying is None else self.copying[1].ns() - self.copying[0].ns()

    def _passed(self, mark: int) -> int:
        return self.marks[mark].ns() if self.marks else self._seen_ns

    @property
    def op_ns(self) -> dict[str, int] | None:
        """Device time of each operation in ns; None if operations are not timed."""
        return self.times.totals() if self.times is not None else None


class Transfer(NamedTuple):
    """A copy of KV that has ended: into the device's memory if `reads`, else out of it; times on `perf_counter_ns`."""

    reads: bool
    size_bytes: int
    submitted_ns: int
    began_ns: int
    ended_ns: int


class Attempt(NamedTuple):
    """A plan with nothing to run, made at `plan_ns` while `in_flight` steps were under way.

    `loaded` and `released` are the ids of requests reported to the scheduler since the plan before; see `TierEvents`.
    """

    plan_ns: int
    in_flight: int
    loaded: list[int]
    released: list[int]


class TierEvents(NamedTuple):
    """The events of the KV tier since the step before was launched.

    Attributes:
        loaded: ids of requests whose KV has been loaded, in order; they are reported to the scheduler first
        released: ids of ended requests whose blocks have been copied out; they are reported to the scheduler next
        attempts: plans with nothing to run, if there were new events to consider or if they began loads
        loads: loads that began: id of the request, number of tokens, and True if it was preempted before
        transfers: copies that were seen to have ended
    """

    loaded: list[int]
    released: list[int]
    loads: list[tuple[int, int, bool]]
    transfers: list[Transfer]
    attempts: list[Attempt]


class Load(NamedTuple):
    """The numbers of requests and KV blocks in the scheduler after planning."""

    running: int
    waiting: int
    used_blocks: int
    waiting_blocks: int
    longest_free_blocks: int | None = None


_NOTHING = Load(0, 0, 0, 0)


@dataclass(slots=True)
class Step:
    """A step of the engine, from its plan to its results.

    Times are on `perf_counter_ns`: `plan_ns` is the start of planning, `scheduled_ns` its end, and `prepared_ns` the
    end of making tensors. On the device `start_ns` is the start, `computed_ns` the time at which logits are computed,
    and `end_ns` the end of sampling and, with drafts, of drafting.

    Attributes:
        preempted_ns: time of each preemption since the step before was launched, by request id; several plans can
            contribute
        compiled_ns: by request id, time at which the engine noticed that a grammar was compiled, since the step before
        launched: the launched step; None while the step waits for the drafts that it verifies
        prepare_ns: host time for making the tensors
        launch_ns: host time for the launch on an asynchronous device, from `prepared_ns` on; 0 on other devices
        mask_ns: host time for the masks of its samples, which is part of `prepare_ns`
        host_ns: host time for this step since the host was last free, which the overlapped loop hides; None in the
            plain loop
        tier: events of the KV tier until this step was launched; None without a tier
        adapters: the step's LoRA adapters; None if it has none. Their `load_ns` is part of `prepare_ns`

    Known once it has `ended`:
        sampled: requests that got tokens, one entry for each token
        stopped: ids of requests that one of these tokens ended
        accepted: number of accepted draft tokens, by id of each request with drafts to verify
        proposed: number of new draft tokens, by id of each request that got a token and goes on; None without drafts
        draft_ns: time, at the end of the step, for proposing the next drafts; None without drafts. In the overlapped
            loop it includes verification and the making of the next step's tensors
        copy_ns: device time, before `start_ns`, of copies of LoRA adapters into slots

    Other fields are as in `Launched`, but `end_ns` and `thread_ns` include the time of drafting.
    """

    plan: StepPlan
    rows: list[Row]
    plan_ns: int
    scheduled_ns: int
    preempted_ns: dict[int, int]
    compiled_ns: dict[int, int] = field(default_factory=dict)
    load: Load = _NOTHING
    sampled_rows: list[int | None] = field(default_factory=list)
    launched: Launched | None = None
    prepared_ns: int = 0
    prepare_ns: int = 0
    launch_ns: int = 0
    host_ns: int | None = None
    mask_ns: int = 0
    tier: TierEvents | None = None
    adapters: StepAdapters | None = None

    sampled: list[Request] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    accepted: dict[int, int] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)
    proposed: Mapping[int, int] | None = None
    draft_ns: int | None = None
    copy_ns: int = 0
    start_ns: int = 0
    computed_ns: int = 0
    end_ns: int = 0
    op_ns: dict[str, int] | None = None
    graph: bool = False
    thread_ns: int | None = None
    speed: float | None = None
    expert_tokens: NDArray[np.int32] | None = None

    def ended(
        self, finished: list[Request], proposed: Mapping[int, int] | None, draft_ns: int | None, draft_thread_ns: int
    ) -> Step:
        """Store the results and return this step; `draft_thread_ns` is the host thread's CPU time for drafting."""
        launched = self.launched
        assert launched is not None
        self.finished, self.proposed, self.draft_ns = finished, proposed, draft_ns
        self.start_ns, self.computed_ns = launched.start_ns, launched.computed_ns
        self.end_ns = launched.end_ns + (draft_ns or 0)
        self.op_ns, self.graph, self.speed = launched.op_ns, launched.graph, launched.speed
        self.thread_ns = None if launched.thread_ns is None else launched.thread_ns + draft_thread_ns
        self.expert_tokens, self.copy_ns = launched.expert_tokens, launched.copy_ns
        return self

    @property
    def launching_ns(self) -> int:
        """The time between `start_ns` and `end_ns` in which the host was still launching the step.

        The device may have been idle while the host was launching. So the device time of the step is at most `end_ns -
        start_ns`, and at least this duration minus `launching_ns`. If `launching_ns` is 0, the launch was complete
        before the step began, and the whole duration is device time.
        """
        launched_ns = self.prepared_ns + self.launch_ns
        return max(min(launched_ns, self.end_ns) - self.start_ns, 0) if self.launch_ns else 0
