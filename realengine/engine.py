"""A continuous-batching engine in the plain loop: one step in flight.

The shared scheduler decides, this runs what it decided: make the tensors, run the model, sample, report back. Every
phase is timed, because these times are what calibration fits and the simulator is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

import torch

from realengine.attention import find_attention
from realengine.batch import make_batch
from realengine.kv_cache import KvCache
from realengine.model import Model
from realengine.sampling import SamplingParams, sample
from realengine.sequence import TokenSequence
from realengine.token_content import TokenContent
from realengine.weights import ModelFiles
from serving.config import Deployment
from serving.decode_buckets import DECODE_BUCKETS, padded
from serving.errors import UserError
from serving.kv_blocks import blocks_for
from serving.request import Request, Status
from serving.scheduler import Scheduler, find_policy
from serving.step_plan import Row, StepPlan
from serving.workload import WorkloadRequest


class Load(NamedTuple):
    """What the scheduler holds, after planning."""

    running: int
    waiting: int
    used_blocks: int
    waiting_blocks: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step that ran. Times are `perf_counter_ns`: planned, planning done, launched, computed, sampled."""

    plan: StepPlan
    rows: list[Row]
    sampled: list[Request]
    finished: list[Request]
    stopped: list[int]
    load: Load
    plan_ns: int
    scheduled_ns: int
    start_ns: int
    computed_ns: int
    end_ns: int


class Engine:
    """A model, its KV cache and the shared scheduler. `reset` makes it as new, keeping the weights.

    Raises UserError when the deployment asks for something the model or the machine cannot do.
    """

    def __init__(self, deployment: Deployment, files: ModelFiles) -> None:
        if deployment.scheduler.async_scheduling:
            raise UserError("scheduler.async_scheduling", True, "the CPU engine runs the plain loop; set it to false")
        scheduler = deployment.scheduler
        if scheduler.policy == "priority" and scheduler.enable_prefix_caching and not scheduler.forget_withdrawn:
            raise UserError(
                "scheduler.forget_withdrawn",
                False,
                "under policy priority a block could be reused that was never computed, as in vLLM; set it to true",
            )
        if deployment.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device", "cuda", "this machine has no CUDA device; use cpu")
        if deployment.scheduler.max_model_len > files.spec.max_positions:
            raise UserError(
                "scheduler.max_model_len",
                deployment.scheduler.max_model_len,
                f"{files.spec.name} has {files.spec.max_positions} positions; lower it",
            )
        torch.set_num_threads(deployment.threads)
        self.deployment = deployment
        self.spec = files.spec
        self.source = files.source
        self.folder = files.folder
        self.attention = find_attention(deployment.attention)
        self._config = deployment.scheduler
        device, dtype = torch.device(deployment.device), getattr(torch, deployment.dtype)
        self.model = Model(files.spec, files.state, dtype, device)
        try:
            self.kv = KvCache(files.spec, self._config.num_blocks, self._config.block_size, dtype, device)
        except RuntimeError:  # torch's out of memory
            slots = self._config.num_blocks * self._config.block_size
            need = slots * files.spec.kv_bytes_per_token(dtype.itemsize) / 1e9
            raise UserError(
                "scheduler.num_blocks", self._config.num_blocks, f"needs {need:,.1f} GB of KV cache; lower it"
            ) from None
        self.sequences: dict[int, TokenSequence] = {}
        self.scheduler: Scheduler
        self.reset()

    def reset(self) -> None:
        """Forget every request and every cached prefix."""
        self.sequences.clear()
        content = TokenContent(self.sequences, self._config.block_size)
        self.scheduler = find_policy(self.deployment.policy)(self._config, content=content)

    def add(
        self,
        arrived: WorkloadRequest,
        prompt: Sequence[int],
        *,
        forced: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int], bool] | None = None,
    ) -> Request:
        """Queue a request with token ids `prompt`; see `TokenSequence` for the rest."""
        request = self.scheduler.add(arrived)
        if request.status is not Status.REJECTED:
            self.sequences[request.id] = TokenSequence(
                request, prompt, forced=forced, sampling=sampling, stop_ids=stop_ids, on_token=on_token
            )
        return request

    def abort(self, id: int) -> Request | None:
        """Drop a request between steps."""
        self.sequences.pop(id, None)
        return self.scheduler.abort(id)

    def step(self) -> Step | None:
        """Plan and run one step; None when there is nothing to run."""
        plan_ns = perf_counter_ns()
        plan = self.scheduler.schedule()
        while plan.preempted and not plan.tokens:
            plan = self.scheduler.schedule()
        if not plan.tokens:
            return None
        rows = plan.rows()
        scheduled_ns = perf_counter_ns()
        sequences = [self.sequences[row.request.id] for row in rows]
        batch = make_batch(rows, [s.tokens for s in sequences], self._config.block_size, self.model.device)
        start_ns = perf_counter_ns()
        logits = self.model.forward(batch, self.kv, self.attention)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        computed_ns = perf_counter_ns()
        sampling = [sequences[i] for i in batch.sampled_rows]
        tokens = sample(logits[: len(sampling)], [s.sampling for s in sampling], [s.output_len for s in sampling])
        end_ns = perf_counter_ns()
        load = self._load()
        pairs = list(zip(sampling, tokens, strict=True))
        stopped = [sequence.request.id for sequence, token in pairs if sequence.append(token)]
        finished = self.scheduler.commit(plan, stopped)
        for request in finished:
            del self.sequences[request.id]
        sampled = [sequence.request for sequence in sampling]
        return Step(plan, rows, sampled, finished, stopped, load, plan_ns, scheduled_ns, start_ns, computed_ns, end_ns)

    def _load(self) -> Load:
        scheduler, pool = self.scheduler, self.scheduler.pool
        demand = sum(blocks_for(request.known, self._config.block_size) for request in scheduler.waiting)
        return Load(len(scheduler.running), len(scheduler.waiting), pool.total - pool.free, demand)

    def warm_up(self) -> None:
        """Run every decode bucket and a few prefill sizes once, so that nothing is first in a measured run."""
        for rows in [b for b in DECODE_BUCKETS if b <= padded(self._config.max_num_seqs)]:
            self.run_dummy([1] * rows)
        size = 16
        while size <= self._config.max_num_batched_tokens:
            self.run_dummy([size])
            size *= 2

    def run_dummy(self, sizes: Sequence[int]) -> int:
        """One forward pass over rows of the dummy request, `sizes` tokens each; its time in nanoseconds."""
        block_size = self._config.block_size
        rows = []
        for size in sizes:
            request = Request(WorkloadRequest(-1, 0, (("", size),), 1))
            request.blocks = [0] * -(-size // block_size)
            rows.append(Row(request, 0, size, True))
        began = perf_counter_ns()
        batch = make_batch(rows, [[0] * size for size in sizes], block_size, self.model.device)
        logits = self.model.forward(batch, self.kv, self.attention)
        logits.argmax(-1).tolist()
        return perf_counter_ns() - began
