"""The runner of packed steps on one device, with its buffers, model, KV cache, graphs and sampling.

It knows nothing of requests and policies. Steps finish in the order in which they are launched. On an asynchronous
device the next step may be launched while one runs. A sampled token that the host has not seen yet reaches the next
step through its request's *seat* on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch

from tokentwin.realengine.attention.backend import find_attention
from tokentwin.realengine.attention.kv_cache import FP8, KvCache
from tokentwin.realengine.devices.device import OpTimes
from tokentwin.realengine.devices.machine import find_device
from tokentwin.realengine.devices.memory import KvBudget, memory_for
from tokentwin.realengine.devices.speed import Speed
from tokentwin.realengine.host_tier import Copy, HostMemory
from tokentwin.realengine.logit_rules import LogitChanges, PromptLogprob
from tokentwin.realengine.models.layer_ops import LayerOps
from tokentwin.realengine.models.lora_slots import LoraSlots
from tokentwin.realengine.models.model import Model
from tokentwin.realengine.models.weights import ModelFiles
from tokentwin.realengine.parallel.tensor_parallel import COLLECTIVES, Collective, own_experts, shard_spec, shard_state
from tokentwin.realengine.sampling import MOST_LOGPROBS, changed_logits, logprobs_of
from tokentwin.realengine.step import Launched
from tokentwin.realengine.step_graphs import StepGraphs, largest_layout, mixed_steps, pad
from tokentwin.realengine.step_input import Batch, Layout, RowInput, ScoredTokens, StepInput, pack
from tokentwin.serving.answers.figures import shown_gib
from tokentwin.serving.cost_model import DECODE_BUCKETS, padded
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.kv_layout import layers_of_a_group
from tokentwin.serving.deployments.lora import adapter_elements
from tokentwin.serving.deployments.weight_types import GROUP_SIZE, weight_width
from tokentwin.serving.errors import UserError

_SCORED_AT_A_TIME = 64  # tokens of a prompt whose logits are in memory at the same time
_HOST_BUFFERS = 3  # two steps in flight, and one being written


class _HostBuffer(NamedTuple):
    step: torch.Tensor
    tokens: torch.Tensor
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    expert_tokens: torch.Tensor | None


class ModelRunner:
    """The runner of one rank; call `allocate` before the first step is launched."""

    def __init__(self, deployment: Deployment, files: ModelFiles, collective: Collective | None = None) -> None:
        self._collective = collective or Collective()
        torch.set_num_threads(deployment.threads)
        self.deployment = deployment
        self.device = find_device(deployment, self._collective.rank)
        self._config: SchedulerConfig = deployment.scheduler
        self._dtype: torch.dtype = getattr(torch, deployment.dtype)
        self._kv_dtype = FP8 if deployment.kv_cache_dtype == "fp8" else self._dtype
        rank, size, experts = self._collective.rank, self._collective.size, deployment.enable_expert_parallel
        self.spec = shard_spec(files.spec, size, experts)
        self._own = own_experts(files.spec, rank, size) if experts else None
        self.attention = find_attention(deployment, self.spec, self.device)
        self._timing = False
        speculative = self._config.speculative
        self._keeps_logits = speculative is not None and speculative.draft_sample_method == "probabilistic"
        self._stamping = True
        self._speed: Speed | None = None
        self._speed_before: float | None = None
        self._times: OpTimes | None = None  # times of the step that the device is running
        mixed = self.attention.capturable == "always" and self.device.torch_device.type == "cuda"
        self._graphs = StepGraphs(self.device, mixed)
        need, free = self._weight_bytes(files) + self._slot_bytes(), self.device.memory().free
        if need > free:  # checked now, because on the CPU the process would be killed in the middle of loading
            remedy = f"has {shown_gib(need)} of weights, but only {shown_gib(free)} of memory are free"
            raise UserError("model", deployment.model, remedy)
        with self._memory_for("weights"), torch.inference_mode(), self.device.current():
            where = self.device.torch_device
            self.slots = None if deployment.lora is None else LoraSlots(deployment.lora, self._dtype, where)
            state = shard_state(files.weights(self._dtype, where), rank, size, self._own)
            self.model = Model(
                self.spec,
                state,
                self._dtype,
                where,
                self._ops(),
                self.attention,
                quantization=deployment.quantization,
                collective=self._collective,
                own=self._own,
                slots=self.slots,
            )
            del state
            self._last_tokens = torch.zeros(self._config.max_num_seqs + 1, dtype=torch.int32, device=where)
            numbers, samples = self._sizes()
            self._buffer = torch.zeros(numbers, dtype=torch.int32, device=where)
            counts = self.model.expert_tokens
            self._host = [
                _HostBuffer(
                    self.device.host_buffer(numbers),
                    self.device.host_buffer(samples),
                    (
                        self.device.host_buffer(samples),
                        self.device.host_buffer(samples * MOST_LOGPROBS),
                        self.device.host_buffer(samples * MOST_LOGPROBS),
                    ),
                    None if counts is None else self.device.host_buffer(counts.numel()).view(counts.shape),
                )
                for _ in range(_HOST_BUFFERS)
            ]
        self._launches = 0
        self._host_memory: HostMemory | None = None
        self.kv: KvCache

    def _weight_bytes(self, files: ModelFiles) -> int:
        """Return the number of bytes that loading the weights takes.

        Weights are quantised one by one as they are read. But random weights are all made before they are quantised,
        and the reference operations expand packed weights and experts to the model's type.
        """
        spec, size = self.spec, self._dtype.itemsize
        if self._own is not None:
            spec = spec.model_copy(update={"num_experts": len(self._own)})
        kept = spec.checkpoint_quantization if self.deployment.quantization == "none" else self.deployment.quantization
        if kept == "none" or files.is_random or (kept in GROUP_SIZE and not self._in_triton):
            return spec.weight_bytes(size)
        wide = spec.embedding_parameters
        if not self._in_triton:
            wide += spec.moe_layers * spec.num_experts * spec.expert_parameters
        return int((spec.parameters - wide) * weight_width(kept, spec, self.deployment)) + wide * size

    def _slot_bytes(self) -> int:
        lora = self.deployment.lora
        return 0 if lora is None else lora.max_loras * adapter_elements(self.spec, lora, 1) * self._dtype.itemsize

    @property
    def _in_triton(self) -> bool:
        """True if our kernels do the small operations: with our attention, or on a GPU without torch's attention."""
        name = self.attention.name
        return name in ("triton", "hybrid") or (name != "torch" and self.device.torch_device.type == "cuda")

    def _ops(self) -> LayerOps:
        if not self._in_triton:
            return LayerOps(self.spec)
        from tokentwin.realengine.models.triton_ops import TritonOps

        return TritonOps(self.spec)

    def _sizes(self) -> tuple[int, int]:
        """Return the maximum size of a step's buffer in int32 numbers, and the maximum number of its samples."""
        config = self._config
        drafts = config.speculative.num_speculative_tokens if config.speculative else 0
        decodes, tokens = padded(config.max_num_seqs), config.max_num_batched_tokens
        groups = max(len(config.kv_groups), 1)
        rows = decodes + config.max_num_seqs
        most = Layout(decodes, rows, decodes + tokens, decodes + config.max_num_seqs * (1 + drafts), tokens, groups)
        blocks = groups * rows * -(-config.max_model_len // config.block_size)
        layouts = (most, largest_layout(config.max_num_batched_tokens, groups))
        return max(layout.places()["blocks"].start for layout in layouts) + blocks, most.samples

    # Memory

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache; raise UserError if the memory does not suffice."""
        self.release_graphs()
        with self._memory_for("kv", num_blocks), self.device.current():
            where, scales = self.device.torch_device, self.model.kv_scales if self._kv_dtype == FP8 else None
            size, groups = self._config.block_size, self._config.kv_groups
            self.kv = KvCache(self.spec, num_blocks, size, self._kv_dtype, where, scales, groups)

    def keep_in_host(self, slots: int) -> None:
        """Allocate room for `slots` blocks in host memory; raise UserError if the memory does not suffice."""
        self._host_memory = HostMemory(slots, self.kv, self.device.torch_device)

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        """Begin to copy each `(block, slot)` of `pairs`: from the slot in host memory if `reads`, else to the slot."""
        assert self._host_memory is not None
        return self._host_memory.copy(pairs, reads)

    def budget(self, utilization: float) -> KvBudget:
        """Return the memory budget, measured with a trial run of the largest step and trial captures of graphs."""
        self.allocate(2)
        activations = self.device.peak_bytes(lambda: self.dummy_step(self._largest_step()))
        before = self.device.memory()
        graphs = 0
        if self._captures:
            graphs = self._graphs.memory(self.buckets()[::-1], self._mixed_steps(), self.dummy_step)
        used = before.total - before.free
        return KvBudget(before.total, used, activations, graphs, utilization, self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        spec, config = self.spec, self._config
        layers = layers_of_a_group(spec) if config.kv_groups else spec.num_layers
        return config.block_size * spec.kv_bytes_per_token(self._kv_dtype.itemsize) * layers // spec.num_layers

    def _memory_for(self, what: str, num_blocks: int = 0) -> AbstractContextManager[None]:
        return memory_for(what, self.deployment, num_blocks, self._block_bytes)

    # Steps

    def time_operations(self) -> None:
        """Time every operation of steps from now on; the steps then run without graphs."""
        self._timing = True

    def keep_logits(self) -> None:
        """Keep each step's logits `[S, vocab]` in its `Launched` from now on, until the next step."""
        self._keeps_logits = True

    def watch_speed(self) -> None:
        """Measure the device's speed between steps from now on, which takes up to 2 % of the time."""
        if self._speed is None:
            self._speed = self.device.speed(self.model.piece())

    def time_steps(self, timed: bool) -> None:
        """Set whether steps are timed on the device (default: True); False serves to measure the cost of timing."""
        self._stamping = timed

    def buckets(self) -> list[int]:
        """Return the decode batch sizes, padded to buckets, that can occur."""
        return [b for b in DECODE_BUCKETS if b <= padded(self._config.max_num_seqs)]

    @property
    def _captures(self) -> bool:
        """True if steps run as graphs; on CUDA, backends that read lengths on the host do not allow this."""
        if self.deployment.enforce_eager or self._timing:
            return False
        return self.attention.capturable != "never" or self.device.torch_device.type == "cpu"

    def graph_mixed_steps(self, mixed: bool) -> None:
        """Set whether mixed steps run as graphs, as they do on CUDA by default.

        On the CPU they do so only if this is called, because there graphs save no launches and padding costs time.
        """
        able = self.attention.capturable == "always" or self.device.torch_device.type == "cpu"
        self._graphs.mixed = mixed and able

    def launch(self, step: StepInput) -> Launched:
        """Hand a step to the device. At most two may be in flight.

        Raises UserError when its activations do not fit into the device's memory.
        """
        host = self._host[self._launches % _HOST_BUFFERS]
        self._launches += 1
        plain = not (step.segments or step.scored)
        graph = self._graphs.layout_for(step.layout) if self._captures and plain else None
        launched = Launched(step.layout, host.tokens, graph is not None, host.expert_tokens)
        if graph is not None:
            step = pad(step, graph)
        host.step[: len(step.packed)].numpy()[:] = step.packed
        if self._timing:
            launched.times = OpTimes(self.device.mark)
        elif self._collective.size > 1 and not (launched.graph and self.device.torch_device.type == "cuda"):
            launched.times = OpTimes(self.device.mark, COLLECTIVES)
        with self._memory_for("step"):
            launched.pending = self.device.submit(partial(self._run, step, graph, host, launched))
        return launched

    @torch.inference_mode()
    def _run(self, step: StepInput, graph: Layout | None, host: _HostBuffer, launched: Launched) -> None:
        """Do the work of a step that was submitted to the device; `graph` is the layout of its graph, if it has one."""
        if self.slots is not None:
            self._fill_slots(self.slots, step, launched)
        size, samples = len(step.packed), launched.layout.samples
        self._buffer[:size].copy_(host.step[:size], non_blocking=True)
        # A copy from memory that is not pinned waits for the device's work. It costs nothing here, because no work is
        # queued yet.
        masks = [torch.from_numpy(part).to(self.device.torch_device) for part in step.masks or ()]
        batch = Batch.from_buffer(self._buffer, step.layout, step.packed)
        self.attention.prepare(batch, graph is not None)
        # The step starts when its inputs are there: a device that waits for the host's copies is idle.
        self._mark(launched)
        self._times = launched.times
        if step.scored:
            every = self._forward(batch, every=True)
            hidden = every[batch.sampled.long()]
            for tokens in step.scored:
                launched.scored[tokens.row] = tokens.start + 1, self._score(every, tokens)
        elif graph is None:
            hidden = self._forward(batch)
        else:
            hidden = self._graphs.get(graph, lambda: self._forward(Batch.from_buffer(self._buffer, graph)))()
        for sample in step.pooled:
            launched.pooled[sample] = hidden[sample].to("cpu", torch.float32, copy=True)
        logits = self.model.compute_logits(hidden[: samples if step.generates else 0], self._times)
        self._mark(launched)
        if masks:
            self.model.ops.mask(logits, *masks)
        self._sample(step, batch.first(samples), logits, host, launched)
        if host.expert_tokens is not None and self.model.expert_tokens is not None:
            host.expert_tokens.copy_(self.model.expert_tokens, non_blocking=True)
        self._mark(launched)
        if self.slots is not None:
            self.slots.segments = ()
        if self._speed is not None:
            after = self._speed()
            launched.speed = _mean(self._speed_before, after)
            self._speed_before = after

    def _score(self, hidden: torch.Tensor, tokens: ScoredTokens) -> list[PromptLogprob]:
        """Return the logprobs of tokens of a prompt by the hidden states `[T, hidden]` of the step."""
        scores: list[PromptLogprob] = []
        for begin in range(0, len(tokens.targets), _SCORED_AT_A_TIME):
            targets = torch.tensor(tokens.targets[begin : begin + _SCORED_AT_A_TIME], device=hidden.device)
            first = tokens.first + begin
            logits = self.model.compute_logits(hidden[first : first + len(targets)]).float()
            own = logits.gather(1, targets.unsqueeze(1))
            ranks = (logits >= own).sum(-1).tolist()
            logprobs = logprobs_of(logits, targets, tokens.top).on_host()
            scores += [PromptLogprob(one.logprob, rank, one.top) for one, rank in zip(logprobs, ranks, strict=True)]
        return scores

    def _fill_slots(self, slots: LoraSlots, step: StepInput, launched: Launched) -> None:
        slots.segments = step.segments
        if step.copies:
            began = self.device.mark()
            for slot, adapter in step.copies:
                slots.fill(slot, adapter)
            launched.copying = began, self.device.mark()

    def _sample(self, step: StepInput, batch: Batch, own: torch.Tensor, host: _HostBuffer, launched: Launched) -> None:
        """Sample from the model's `own` logits after this step's changes, and copy the tokens to the host."""
        logits = own
        if step.changes:
            logits = changed_logits(own, step.changes, self._last_tokens[batch.seats.long()])
        if self._keeps_logits:
            launched.logits = logits
        if not len(own):
            return
        tokens = self.model.ops.sample(logits, batch, step.greedy)
        if self._config.async_scheduling:
            self._last_tokens[batch.seats.long()] = tokens
        host.tokens[: len(own)].copy_(tokens, non_blocking=True)
        if step.logprobs is not None:
            launched.token_logprobs = logprobs_of(own, tokens, step.logprobs).to_host(host.logprobs)

    def _mark(self, launched: Launched) -> None:
        if self._stamping:
            launched.marks.append(self.device.mark())

    def _forward(self, batch: Batch, every: bool = False) -> torch.Tensor:
        tokens = batch.tokens
        if self._config.async_scheduling:
            tokens = torch.where(tokens < 0, self._last_tokens[(-1 - tokens).clamp(min=0).long()], tokens)
        return self.model.forward(tokens, batch, self.kv, self._times, every)

    def dummy_step(
        self,
        sizes: list[int],
        draw: bool = False,
        slot: int | None = None,
        changes: LogitChanges | None = None,
        scored: bool = False,
    ) -> int:
        """Run one step with a row of the dummy request for each number of tokens in `sizes`; return its time in ns.

        All rows use the null block, and the LoRA adapter in `slot` if it is given. If `draw`, their tokens are drawn;
        otherwise sampling is greedy. Every row has the `changes` to its logits. If `scored`, the log-probabilities of
        all tokens are computed.
        """
        how = ((1.0, 50, 0.9, 0.5) if draw else None,)
        most = max(sizes)
        blocks = np.zeros(-(-most // self._config.block_size), dtype=np.int32)
        others = (blocks,) * (len(self._config.kv_groups) - 1)
        seat = self._config.max_num_seqs
        rows = [RowInput([0] * size, 0, blocks, seat, how, other_blocks=others, slot=slot) for size in sizes]
        rows = [row._replace(changes=() if changes is None else (changes,)) for row in rows]
        if scored:
            rows = [row._replace(scored=(0,) * size) for row, size in zip(rows, sizes, strict=True)]
        step = pack(rows, self._config.block_size, self._config.max_num_seqs, self.attention.tiles).step
        began = perf_counter_ns()
        self.launch(step).wait()
        return perf_counter_ns() - began

    def prompts(self, tokens: int) -> list[int]:
        """Return the sizes of the fewest rows, none longer than `max_model_len`, with `tokens` prompt tokens in all."""
        whole, rest = divmod(tokens, self._config.max_model_len)
        sizes = [self._config.max_model_len] * whole + ([rest] if rest else [])
        return sizes[: self._config.max_num_seqs]

    def _largest_step(self) -> list[int]:
        """Return the row sizes of a step with the maximum number of tokens and, within it, of decode rows."""
        seqs, tokens = self._config.max_num_seqs, self._config.max_num_batched_tokens
        prompts = len(self.prompts(tokens))
        decodes = min(seqs - prompts, tokens - prompts)
        return [1] * decodes + self.prompts(tokens - decodes)

    def warm_up(self) -> None:
        """Run steps of all sizes, the largest first, so that a measured run executes no code for the first time.

        Graphs are captured before eager steps run, because a capture releases the allocator's free memory.
        """
        for rows in reversed(self.buckets()):  # the largest graph first, because smaller graphs reuse its memory
            self.dummy_step([1] * rows)
        for sizes in self._mixed_steps() + self.warm_up_sizes():
            self.dummy_step(sizes)
        on_cuda = self.device.torch_device.type == "cuda"
        for rows in (self.buckets()[-1], 1) if on_cuda else (1,):
            self.dummy_step([1] * rows, draw=True)
        if self.slots is not None:
            for sizes in [[1] * rows for rows in reversed(self.buckets())] + self.warm_up_sizes():
                self.dummy_step(sizes, slot=0)

    def _mixed_steps(self) -> list[list[int]]:
        """Return the row sizes of each mixed step to capture as a graph, the largest step first."""
        config = self._config
        if not (self._captures and self._graphs.mixed):
            return []
        return mixed_steps(config.max_num_batched_tokens, config.max_num_seqs, self.prompts)

    def warm_up_sizes(self) -> list[list[int]]:
        """Return the row sizes of steps with prompts for the warm-up: the largest possible step, then smaller ones.

        A GPU's libraries choose a kernel by the number of tokens, and load it at its first use. So on CUDA there are
        two sizes for each power of two. One of them is odd, because some kernels are compiled for multiples of 16.
        """
        steps = [self._largest_step()]
        size, on_cuda = self._config.max_num_batched_tokens, self.device.torch_device.type == "cuda"
        while (size := size // 2) >= (2 if on_cuda else 16):
            if on_cuda:
                steps.append(self.prompts(size * 3 // 2 | 1))
            steps.append(self.prompts(size))
        return [sizes for sizes in steps if max(sizes) > 1]

    def release_graphs(self) -> None:
        """Release all captured graphs.

        With several ranks, graphs contain operations of the process group, so they must be released before the group.
        """
        self._graphs.release()

    def close(self) -> None:
        """Wait for the steps under way, ignore their errors, and release graphs and threads."""
        with suppress(Exception):
            self.device.synchronize()
        self.release_graphs()
        self.close_device()

    def close_device(self) -> None:
        """Release threads without waiting for steps."""
        if self._host_memory is not None:
            self._host_memory.copier.close()
        self.device.close()


def _mean(before: float | None, after: float | None) -> float | None:
    return after if before is None or after is None else (before + after) / 2
