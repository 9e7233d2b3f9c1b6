"""A step of the engine: on its way through the device, and with its results after it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from realengine.devices.device import Mark, OpTimes, Pending
from realengine.logit_rules import Logprob
from realengine.sampling import TokenLogprobs
from realengine.step_input import Layout
from serving.request import Request
from serving.step_plan import Row, StepPlan


class Launched:
    """A step that was handed to the device.

    Times are `perf_counter_ns`, valid after `wait`; if steps are not timed, all are the time at which the wait ended.

    Attributes:
        graph: whether it was replayed as a graph
        speed: mean of the device's speed before and after it; None if it is not measured
        logits: `[S, vocab]`, masked and changed, after `wait` and until the next step; None unless they are kept
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
        self._tokens = tokens
        self._expert_tokens = expert_tokens
        self._seen_ns = 0

    def done(self) -> bool:
        return self.pending is not None and self.pending.done()

    def wait(self) -> list[int]:
        """Wait, and return the sampled tokens `[S]`, in the order of the layout's samples."""
        assert self.pending is not None
        self.pending.wait()
        self._seen_ns = perf_counter_ns()
        tokens: list[int] = self._tokens[: self.layout.samples].tolist()
        return tokens

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The logprob of each token, beside as many others as any request wanted; valid after `wait`.

        None if no request wanted it.
        """
        return None if self.token_logprobs is None else self.token_logprobs.on_host()

    @property
    def expert_tokens(self) -> NDArray[np.int32] | None:
        """Tokens that each expert got `[layers, experts]`; None in a dense model.

        They are valid from `wait` to the third launch after.
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
        """CPU time of the thread that computed it; None if the CPU did not compute it, or steps are not timed."""
        began, *_, ended = (mark.thread_ns for mark in self.marks) if self.marks else (None, None)
        return None if began is None or ended is None else ended - began

    def _passed(self, mark: int) -> int:
        return self.marks[mark].ns() if self.marks else self._seen_ns

    @property
    def op_ns(self) -> dict[str, int] | None:
        """Device time by operation, if it was measured."""
        return self.times.totals() if self.times is not None else None


class Transfer(NamedTuple):
    """A copy that has ended, into the device's memory (`reads`) or out of it; times on `perf_counter_ns`."""

    reads: bool
    size_bytes: int
    submitted_ns: int
    began_ns: int
    ended_ns: int


class Attempt(NamedTuple):
    """A plan that ran nothing, at `plan_ns` with `in_flight` steps under way.

    `loaded` and `released` are the messages to the scheduler since the plan before; see `TierEvents`.
    """

    plan_ns: int
    in_flight: int
    loaded: list[int]
    released: list[int]


class TierEvents(NamedTuple):
    """The events since the step before was launched.

    Attributes:
        loaded: requests whose KV had come, in order; the scheduler hears of them first
        released: requests whose blocks had been written after their end; the scheduler hears of them next
        attempts: plans that ran nothing, if they had any news to consider, or began to load
        loads: loads that began: request, number of tokens, and whether after a preemption
        transfers: copies that were seen to have ended
    """

    loaded: list[int]
    released: list[int]
    loads: list[tuple[int, int, bool]]
    transfers: list[Transfer]
    attempts: list[Attempt]


class Load(NamedTuple):
    """The scheduler's requests and blocks after planning."""

    running: int
    waiting: int
    used_blocks: int
    waiting_blocks: int
    longest_free_blocks: int | None = None


_NOTHING = Load(0, 0, 0, 0)


@dataclass(slots=True)
class Step:
    """A step of the engine.

    Times are on `perf_counter_ns`: planning begun, planned, tensors made; then, on the device, begun, computed, sampled
    and, with drafts, drafted.

    Attributes:
        preempted_ns: time of each preemption since the step launched before, by request id; some plans do nothing else
        compiled_ns: likewise, time at which a grammar was seen to be compiled
        launched: None while it waits for the drafts that it verifies
        prepare_ns: host time making its tensors, which are ready at `prepared_ns`
        launch_ns: host time spent handing it to an asynchronous device, from `prepared_ns` on; 0 for another
        mask_ns: host time for the masks of its samples, within `prepare_ns`
        host_ns: host time for this step since the host was last free, which the overlapped loop hides; None in the
            plain
        tier: events between the engine's blocks and host memory until it was launched; None without a tier

    Known once it has `ended`:
        sampled: requests that got tokens, once for each token
        stopped: ids of the requests that one of these tokens ended
        accepted: number of accepted draft tokens, by request that had some to verify
        proposed: number of new draft tokens, by request that got a token and goes on; None without drafts
        draft_ns: part of the time to `end_ns` that proposed drafts for the next step; None without drafts. In the
            overlapped loop it includes verification and the next step's tensors, which wait for it

    The rest is as in `Launched`, with the time of drafting in `end_ns` and `thread_ns`.
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

    sampled: list[Request] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    accepted: dict[int, int] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)
    proposed: Mapping[int, int] | None = None
    draft_ns: int | None = None
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
        """Return this step with its results; drafting took `draft_thread_ns` of the host's own thread."""
        launched = self.launched
        assert launched is not None
        self.finished, self.proposed, self.draft_ns = finished, proposed, draft_ns
        self.start_ns, self.computed_ns = launched.start_ns, launched.computed_ns
        self.end_ns = launched.end_ns + (draft_ns or 0)
        self.op_ns, self.graph, self.speed = launched.op_ns, launched.graph, launched.speed
        self.thread_ns = None if launched.thread_ns is None else launched.thread_ns + draft_thread_ns
        self.expert_tokens = launched.expert_tokens
        return self

    @property
    def launching_ns(self) -> int:
        """The part of `start_ns` to `end_ns` in which the host was still handing the step over.

        The device may have waited then: its own time lies between the whole without this part and the whole. If this is
        0, the device had all of the step before it began, and the whole is device time.
        """
        launched_ns = self.prepared_ns + self.launch_ns
        return max(min(launched_ns, self.end_ns) - self.start_ns, 0) if self.launch_ns else 0
