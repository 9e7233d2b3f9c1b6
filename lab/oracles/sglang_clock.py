"""SGLang's own scheduler on a virtual clock: `python sglang_clock.py SCENARIO.json ...` writes recordings beside them.

The program needs an interpreter that can import sglang 0.5.23 (`make sglang`), and imports nothing of this project. No
model and no GPU is used: packages that only compute are replaced by empty ones (`_STUBS`), and `Scheduler` gets its own
radix cache, allocator, batches and result processor, but no worker. The loops below are those of `event_loop_normal`
and `event_loop_overlap`, with a clock instead of a device. Planning takes no time, and a step takes the time of the
integer `cost`. Scenarios and recordings have the format of `vllm_clock.py`; settings of `config` have our
names (docs/policies.md gives SGLang's). A request with `n` answers is sent as SGLang's front end does: one request
without output computes the prompt, and its end brings `n` requests, unless the client has hung up by then. The
recording has these requests instead. A recording of a scenario that SGLang refuses or does not end has its error in
`stuck` instead of steps.
"""

import gzip
import importlib.abc
import importlib.machinery
import json
import os
import random
import sys
import tempfile
import types
from array import array
from collections import deque
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

# Packages that SGLang imports and this program never calls. Only those that are not installed are replaced.
_STUBS = {
    "IPython", "compressed_tensors", "flash_attn", "flashinfer", "kernels", "mistral_common", "numba", "pynvml",
    "sgl_kernel", "soundfile", "timm", "torch_memory_saver", "torchao", "torchaudio", "torchcodec", "torchvision",
    "triton_kernels", "tvm_ffi", "watchfiles", "xgrammar",
}  # fmt: skip
_Config = dict[str, Any]


class _AnyClass(type):
    """The metaclass of classes in a stub: every attribute is 0, and iteration gives nothing."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0

    def __iter__(cls) -> Any:
        return iter(())


class _Anything:
    """An object of a stub: a decorator, a function or a value, whatever is asked of it."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and not named and callable(given[0]) else _Anything()

    def __iter__(self) -> Any:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __hash__(self) -> int:
        return id(self)


def _any_schema(*_: Any) -> Any:
    return importlib.import_module("pydantic_core").core_schema.any_schema()


class _Stub(types.ModuleType):
    __version__ = "0.0.0"
    __path__: ClassVar[list[str]] = []  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].islower():
            return _Anything()
        body = {
            "__init__": lambda self, *_, **__: None,
            "__call__": lambda self, *given, **_: given[0] if given and callable(given[0]) else self,
            "__getattr__": lambda self, _: self,
            "__class_getitem__": classmethod(lambda cls, _: cls),
            "__get_pydantic_core_schema__": classmethod(_any_schema),
        }
        return _AnyClass(name, (), body)


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in _STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> _Stub:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.meta_path.append(_StubFinder())

from transformers.models.auto import configuration_auto  # noqa: E402

_register = configuration_auto._LazyConfigMapping.register
# SGLang before 0.5.20 registers models that newer transformers have, too
configuration_auto._LazyConfigMapping.register = lambda self, key, value, **_: _register(  # type: ignore[method-assign]
    self, key, value, exist_ok=True
)

import sglang  # noqa: E402
import torch  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.managers import schedule_batch, schedule_policy, scheduler  # noqa: E402
from sglang.srt.managers.io_struct import AbortReq  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.schedule_policy import SchedulePolicy  # noqa: E402
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: E402
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker  # noqa: E402
from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper  # noqa: E402
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.mem_cache import allocation  # noqa: E402
from sglang.srt.mem_cache.allocator import paged  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_context, get_schedule, publish  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

try:  # before 0.5.22, without a radix cache
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
except ImportError:
    ChunkCache = None

_MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
_MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000}
_MODEL |= {"max_position_embeddings": 262144, "torch_dtype": "float16", "rms_norm_eps": 1e-5}
_VOCABULARY = 1 << 60  # so that no token is outside of it


# SGLang's names of methods that draft. It verifies all draft tokens of a request in each of its decode steps.
_ALGORITHMS = {"eagle": "EAGLE", "mtp": "EAGLE", "draft_model": "STANDALONE", "ngram": "NGRAM"}


class _NoSampling:
    """The sampling parameters of a batch, of which the scheduler only asks that they follow the batch."""

    penalizer_orchestrator = SimpleNamespace(is_required=False)

    def filter_batch(self, *_: Any) -> None:
        pass

    merge_batch = filter_batch


class _Kernel:
    """A function in place of a Triton kernel, which is launched as `kernel[grid](...)`."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Any:
        return self._function


def _extend(starts: Any, ends: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
    """Give prompts their slots, as SGLang before 0.5.22 does on a GPU; if pages lack, it drops the result."""
    more = torch.zeros(len(out) + len(ends), dtype=free.dtype)
    paged.alloc_extend_naive(starts, ends, last, torch.cat([free, more]), out, page, "cpu")


def _decode(ends: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
    """Give each request the next slot, in a page of its own or a new one."""
    new = (ends - 1) % page == 0
    more = torch.zeros(len(ends), dtype=free.dtype)
    out[:] = last + 1
    out[new] = torch.cat([free, more])[: int(new.sum())] * page


def _assign(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, count: int) -> None:
    """Write the new slots of each request into its row of the table."""
    at = 0
    for row, start, end in zip(rows[:count].tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start]
        at += end - start


class _Scheduler(scheduler.Scheduler):
    """SGLang's scheduler with the state that it needs to decide, and nothing else."""

    def __getattr__(self, name: str) -> bool:
        """Turn off features that only some releases have."""
        if name.startswith("enable_"):
            return False
        raise AttributeError(name)

    def __init__(self, config: _Config) -> None:
        page, pages = config["block_size"], config["num_blocks"] - 1
        tokens, requests = pages * page, config["max_num_seqs"]
        longest = config["max_model_len"] + 2  # SGLang ends an answer two tokens before the end of its context
        drafts = config.get("speculative") or {}
        self.draft_tokens = drafts.get("num_speculative_tokens", 0)
        algorithm = _ALGORITHMS[drafts["method"]] if drafts else None
        chunk = config["max_num_batched_tokens"] if config.get("enable_chunked_prefill", True) else None
        settings = {
            "schedule_policy": config.get("schedule_policy", "fcfs"),
            "schedule_conservativeness": config.get("schedule_conservativeness", 1.0),
            "page_size": page,
            "chunked_prefill_size": chunk,
            "max_prefill_tokens": config.get("max_prefill_tokens", 16384),
            "enable_mixed_chunk": config.get("enable_mixed_chunk", False),
            "scheduler_recv_interval": config.get("scheduler_recv_interval", 1),
            "schedule_low_priority_values_first": True,
            "enable_priority_scheduling": config.get("policy", "fcfs") == "priority",
            "priority_scheduling_preemption_threshold": config.get("priority_scheduling_preemption_threshold") or 0,
        }
        known = {name: value for name, value in settings.items() if name in get_schedule()}
        known["speculative_algorithm"] = algorithm
        known["speculative_num_steps"] = self.draft_tokens or None
        known["speculative_eagle_topk"] = 1 if drafts else None
        known["speculative_num_draft_tokens"] = 1 + self.draft_tokens if drafts else None
        get_context().override("scenario", **known, pp_max_micro_batch_size=requests)
        for name, value in settings.items():
            setattr(self, name, value)
        self.retracted: list[str] = []
        self.hung_up: set[str] = set()
        self.page_size = page
        self.enable_overlap = config.get("async_scheduling", False)
        self.max_running_requests = requests
        self.max_total_num_tokens = tokens
        self.max_req_len = min(longest - 1, tokens - 1)
        self.max_new_tokens_limit = self.sliding_window_size = self.max_queued_requests = None
        self.kv_shard_widening = 1
        pool = ReqToTokenPool(requests, longest + 4 + 2 * (1 + self.draft_tokens) + page, "cpu", False)
        if page == 1:
            allocator = TokenToKVPoolAllocator(tokens, torch.float16, "cpu", None, False)
        else:
            allocator = PagedTokenToKVPoolAllocator(tokens, page, torch.float16, "cpu", None, False)
            allocator.use_triton_kernels = False
            if not hasattr(paged, "alloc_decode_naive"):
                paged.alloc_extend_kernel, paged.alloc_decode_kernel = _Kernel(_extend), _Kernel(_decode)
        caching = config.get("enable_prefix_caching", True)
        self.spec_algorithm = SpeculativeAlgorithm.from_string(algorithm)
        eagle = self.spec_algorithm.is_eagle()
        given = CacheInitParams(
            not caching, pool, allocator, page, is_eagle=eagle, tree_components=(ComponentType.FULL,)
        )
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pool, allocator
        self.tree_cache = ChunkCache(given) if ChunkCache and chunk and not caching else UnifiedRadixCache(given)
        self.model_config = SimpleNamespace(
            vocab_size=_VOCABULARY, is_encoder_decoder=False, self_opened_think_start_ids=None, think_end_ids=None
        )
        self.disaggregation_mode = DisaggregationMode.NULL
        self._without_other_features()
        self._without_batches()
        self.policy = SchedulePolicy(
            self.schedule_policy, self.tree_cache, False, self.enable_priority_scheduling, True
        )
        self.enable_priority_preemption = config.get("priority_scheduling_preemption_threshold") is not None
        self.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        self.recv_skipper = SchedulerRecvSkipper.maybe_create()
        self.is_mixed_chunk = chunk is not None and settings["enable_mixed_chunk"]
        nothing = _Anything()
        self.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=self.disaggregation_mode,
            enable_overlap=self.enable_overlap,
            enable_overlap_mlx=False,
            model_config=self.model_config,
            token_to_kv_pool_allocator=allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
            req_to_token_pool=pool,
            decode_offload_manager=None,
            metrics_collector=nothing,
            metrics_reporter=SimpleNamespace(
                num_generated_tokens=0,
                forward_ct_decode=0,
                report_decode_stats=nothing,
                report_prefill_stats=nothing,
                update_spec_metrics=nothing,
                snapshot_spec_decode_metrics=nothing,
            ),
            draft_worker=None,
            model_worker=SimpleNamespace(on_verify_complete_cpu=nothing),
            logprob_result_processor=nothing,
            output_streamer=nothing,
            beam_coordinator=nothing,
            abort_request=nothing,
        )

    def _without_batches(self) -> None:
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch: ScheduleBatch | None = None
        self.result_queue: deque[Any] = deque()
        self.enable_skip_finishing_decode = self.enable_overlap
        self.chunked_req = self._pending_chunked_abort_req = None
        self.processed_tokens_counter = self.forward_ct = self.max_prefill_bs = 0

    def _without_other_features(self) -> None:
        """Turn off what no scenario uses: other memory, other models, several ranks, metrics."""
        for name in (
            "enable_hierarchical_cache", "enable_unified_cache_external_linker", "enable_lmcache", "enable_lora",
            "enable_hicache_storage", "enable_hisparse", "is_hybrid_swa", "abort_on_priority_when_disabled",
            "require_mlp_sync",
        ):  # fmt: skip
            self.__dict__[name] = False
        for name in (
            "dllm_config", "prefill_delayer", "min_free_slots_delayer", "dynamic_chunk_sizer", "truncation_align_size",
            "hisparse_coordinator", "decode_offload_manager", "lora_drainer", "mm_receiver",
        ):  # fmt: skip
            self.__dict__[name] = None
        self._prefill_decode_interval_remaining = self.prefill_decode_interval = 0
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False, abort_requests=lambda _: None)
        self.beam_coordinator = SimpleNamespace(pending_member_rows=lambda _: 0, retire_group=lambda _: None)
        runner = SimpleNamespace(attn_backend=SimpleNamespace(), prefill_aware_swa=False)
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **_: 0)
        self.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch, maybe_convert_decode_to_extend=lambda batch: batch
        )
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
        self.metrics_reporter = SimpleNamespace(num_retracted_reqs=0, enable_metrics=False)
        self.scheduler_stage_metrics = None

    def send_abort_output(self, abort_req: Any, req: Req) -> None:
        if req.rid not in self.hung_up:
            raise RuntimeError(f"SGLang aborts request {req.rid}, because it does not fit beside nothing else")

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.is_retracted:  # or preempted
            self.retracted.append(_id(req))
        super()._add_request_to_queue(req, is_retracted)

    @property
    def is_idle(self) -> bool:
        return not self.waiting_queue and self.running_batch.is_empty() and self.chunked_req is None


def _id(request: Req) -> str:
    """Return the request's id in the recording. In SGLang it has leading zeros: an abort names the beginning of ids."""
    return str(int(request.rid))


class _Ordered(dict[Any, None]):
    """A set in order of insertion: SGLang puts preempted requests into the queue in an order of memory addresses."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None


class _Run:
    """One scenario in SGLang's scheduler, on the virtual clock."""

    def __init__(self, scenario: _Config) -> None:
        self._cost = scenario["cost"]
        self._drafting = scenario["config"].get("speculative") or {}
        self._scheduler = _Scheduler(scenario["config"])
        self._overlaps = self._scheduler.enable_overlap
        random.seed(scenario["config"].get("schedule_seed", 0))
        requests = scenario["requests"]
        self._to_come: list[tuple[int, Any, _Config]] = []  # times, what happens then, and the request
        self._gone_ns: dict[int, int] = {}
        self._expect(requests)
        self.sent: list[_Config] = []
        self._answers: dict[int, list[_Config]] = {}  # by id of the request that computes their prompt
        self._next_id = max(request["id"] for request in requests) + 1
        self._requests: dict[int, Req] = {}
        self._first_token: dict[str, int] = {}  # by segment name
        self._token_ns: dict[int, list[int]] = {}
        self._admitted_ns: dict[int, int] = {}
        self._finish_ns: dict[int, int] = {}
        self._in_flight: deque[tuple[ScheduleBatch, int]] = deque()
        self._now = 0
        self._free_ns = 0  # time when the device has finished all its steps
        self._vain = False  # the last turn planned no step, though requests wait
        self.steps: list[_Config] = []

    def _expect(self, requests: list[_Config]) -> None:
        """Note when requests come, and when their clients hang up. At one time requests come first, by their ids."""
        self._to_come += [(request["arrival_ns"], self._add, request) for request in requests]
        hang_up = [request for request in requests if "abort_ns" in request]
        self._to_come += [(request["abort_ns"], self._abort, request) for request in hang_up]
        self._gone_ns |= {request["id"]: request["abort_ns"] for request in hang_up}
        self._to_come.sort(key=lambda event: (event[0], event[1] == self._abort, event[2]["id"]))

    def results(self) -> list[_Config]:
        return [self._result(id, request) for id, request in self._requests.items()]

    def _result(self, id: int, request: Req) -> _Config:
        """Return the result of a request: what its client got, if that hung up."""
        gone_ns = self._gone_ns.get(id, 1 << 62)
        finish_ns = self._finish_ns.get(id, gone_ns)
        token_ns = [at_ns for at_ns in self._token_ns[id] if at_ns <= gone_ns]
        return {
            "id": id,
            "first_token_ns": token_ns[0] if token_ns else None,
            "finish_ns": min(finish_ns, gone_ns),
            "prefix_hit_tokens": request.cached_tokens if self._admitted_ns.get(id, gone_ns) < gone_ns else 0,
            "tokens": len(token_ns),
            "finish": request.finished_reason.to_json()["type"]
            if finish_ns <= gone_ns and request.finished()
            else "abort",
        }

    def advance(self) -> bool:
        """Run the loop once; return False at the end. Raises RuntimeError if SGLang is stuck."""
        own = self._scheduler
        if own.recv_skipper is None or own.recv_skipper.handle(own.last_batch):
            self._arrive()
        batches = {"running_batch": own.running_batch, "last_batch": own.last_batch}
        plan = own.get_next_batch_to_run(**batches)  # type: ignore[operator]
        own.running_batch, batch = plan.running_batch, plan.batch_to_run
        before = own.last_batch
        if batch:
            self._vain = False
            self._launch(batch)
            if not self._overlaps:
                self._take_in()
        own.retracted.clear()  # a plan that only retracts is no step
        if self._overlaps and before:
            self._take_in()
        elif not batch and not self._rest():
            return False
        own.last_batch = batch
        return True

    def _rest(self) -> bool:
        """Wait for the next request, as `on_idle` does; return False if none comes."""
        if self._scheduler.is_idle:
            self._scheduler.new_token_ratio_tracker.reset()
        elif not self._vain:
            self._vain = True  # up to 0.5.22 a turn may only drop what has ended, and the next one admits
            return True
        if not self._to_come:
            if not self._scheduler.is_idle:
                raise RuntimeError(f"{len(self._scheduler.waiting_queue)} requests wait for ever")
            return False
        skipper = self._scheduler.recv_skipper
        if skipper is None or self._to_come[0][0] > self._now:
            self._now = max(self._now, self._to_come[0][0])
            if skipper is not None:  # it looked for requests all the time
                skipper._counter = skipper._threshold
        return True

    def _tokens(self, segment: str, start: int, count: int) -> list[int]:
        base = self._first_token.setdefault(segment, 1000 + 1_000_000 * len(self._first_token)) + start
        return list(range(base, base + count))

    def _arrive(self) -> None:
        while self._to_come and self._to_come[0][0] <= self._now:
            _, happen, given = self._to_come.pop(0)
            happen(given)

    def _abort(self, given: _Config) -> None:
        rid = f"{given['id']:09}"
        self._scheduler.hung_up.add(rid)
        scheduler.Scheduler.abort_request(self._scheduler, AbortReq(rid=rid))

    def _add(self, given: _Config) -> None:
        if n := given.get("n", 0):
            given = {name: value for name, value in given.items() if name != "n"}
            self._answers[given["id"]] = [given | {"id": self._next_id + number} for number in range(n)]
            self._next_id += n
            given = given | {"output_len": 0, "max_tokens": 0}
        self.sent.append(given)
        self._token_ns[given["id"]] = []
        ids = [token for segment, count in given["prompt"] for token in self._tokens(segment, 0, count)]
        most = given.get("max_tokens", given["output_len"])
        last = self._tokens(f"out:{given['id']}", max(given["output_len"] - 1, 0), 1)
        limits = SamplingParams(
            max_new_tokens=most,
            stop_token_ids=last if most > given["output_len"] else None,
            ignore_eos="max_tokens" not in given,  # a stated length, as benchmarks ask for
        )
        limits.normalize(None)
        request = Req(
            f"{given['id']:09}",
            "",
            array("q", ids),
            limits,
            vocab_size=_VOCABULARY,
            priority=given.get("priority", 0) if self._scheduler.enable_priority_scheduling else None,
        )
        request.tokenizer = None
        self._requests[given["id"]] = request
        self._scheduler.init_req_max_new_tokens(request)  # type: ignore[operator]
        self._scheduler._add_request_to_queue(request)

    def _launch(self, batch: ScheduleBatch) -> None:
        own = self._scheduler
        drafts, decodes = own.draft_tokens, batch.forward_mode.is_decode()
        if decodes and drafts:  # as if all drafts in flight were accepted
            flights = [flight for flight, _ in self._in_flight if flight.forward_mode.is_decode()]
            flying = {request for flight in flights for request in flight.reqs}
            starts = [one.kv.kv_committed_len + (1 + drafts) * (one in flying) for one in batch.reqs]
            tokens = [1 + drafts] * batch.batch_size()
        elif decodes:
            starts, tokens = (batch.seq_lens_cpu - 1).tolist(), [1] * batch.batch_size()
        else:
            starts, tokens = batch.prefix_lens, batch.extend_lens
        rows = {_id(request): count for request, count in zip(batch.reqs, tokens, strict=True)}
        for request in batch.reqs:
            self._admitted_ns.setdefault(int(request.rid), self._now)
        pairs = sum(n * (2 * start + n + 1) // 2 for start, n in zip(starts, tokens, strict=True))
        cost = self._cost
        dt = cost["base_ns"] + cost["per_token_ns"] * sum(tokens) + cost["per_pair_ps"] * pairs // 1000
        start_ns = max(self._now, self._free_ns)
        step = {"t": self._now, "dt": dt, "n": rows, "pre": sorted(own.retracted)}
        self.steps.append(step | {"s": start_ns} if self._overlaps else step)
        own.retracted.clear()
        own.forward_ct += 1
        batch.forward_iter = own.forward_ct
        self._free_ns = start_ns + dt
        launched = batch.copy() if self._overlaps else batch
        self._in_flight.append((launched, self._free_ns))
        own.result_queue.append((launched, None))

    def _take_in(self) -> None:
        """Wait for the oldest step in flight, and process its result."""
        batch, end = self._in_flight.popleft()
        self._scheduler.result_queue.popleft()
        self._now = max(self._now, end)
        drafts = self._scheduler.draft_tokens if batch.forward_mode.is_decode() else 0
        ids = [self._tokens(f"out:{_id(one)}", len(one.output_ids), 1 + drafts) for one in batch.reqs]
        result = GenerationBatchResult(next_token_ids=torch.tensor(ids, dtype=torch.int64).flatten())
        if drafts:
            kept = [1 + self._accepted(_id(request), len(request.output_ids), drafts) for request in batch.reqs]
            result.accept_lens = torch.tensor(kept)
            result.speculative_num_draft_tokens = 1 + drafts
        processor = self._scheduler.batch_result_processor
        if batch.forward_mode.is_decode():
            processor.process_batch_result_decode(batch, result)
        else:
            batch.prefill_stats = None
            processor.process_batch_result_prefill(batch, result)
        for request in batch.reqs:
            token_ns = self._token_ns[int(request.rid)]
            if request.sampling_params.max_new_tokens:  # otherwise the client waits for no token
                got = getattr(request, "output_ids_through_stop", request.output_ids)  # without drafts beyond its end
                token_ns += [end] * (len(got) - len(token_ns))
            if request.finished():
                self._finish_ns.setdefault(int(request.rid), end)
                answers = self._answers.pop(int(request.rid), ())
                self._expect([one | {"arrival_ns": end} for one in answers if one.get("abort_ns", end + 1) > end])

    def _accepted(self, id: str, place: int, drafts: int) -> int:
        """Return the number of accepted drafts, drawn by hashes; the first is output token `place`."""
        key = str(self._drafting.get("seed", 0)).encode()
        for k in range(drafts):
            coin = blake2b(b"%d:%d" % (int(id), place + k), digest_size=8, key=key)
            if int.from_bytes(coin.digest(), "big") >= round(self._drafting["acceptance_rate"] * 2**64):
                return k
        return drafts


def record(scenario: _Config, most_steps: int = 100_000) -> _Config:
    """Record SGLang's decisions in the scenario; raise RuntimeError if SGLang is stuck."""
    run = _Run(scenario)
    while run.advance():
        if len(run.steps) >= most_steps:
            raise RuntimeError(f"no end after {most_steps} steps")
    made = {"requests": run.sent, "steps": run.steps, "results": run.results()}
    return {"sglang": sglang.__version__, **scenario, **made}


def prepare(folder: str) -> None:
    """Publish SGLang's default settings, and replace what only a device needs. `folder` is for a model's config."""
    Path(folder, "config.json").write_text(json.dumps(_MODEL))
    arguments = ServerArgs(
        model_path=folder,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_radix_cache=False,
    )
    publish(arguments, role="scheduler")
    schedule_policy.set = _Ordered
    allocation.assign_req_to_token_pool_func = _assign
    schedule_batch.SamplingBatchInfo.from_schedule_batch = lambda *_: _NoSampling()
    scheduler.PrefillStats.from_adder = lambda *_, **__: None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for path in map(Path, sys.argv[1:]):
            scenario = json.loads(path.read_text())
            try:
                recording = record(scenario)
            except Exception as error:  # SGLang refuses the scenario or is stuck: the error is stored
                recording = scenario | {"sglang": sglang.__version__, "stuck": repr(error)}
            with gzip.open(path.with_suffix(".rec.json.gz"), "wt") as file:
                json.dump(recording, file, separators=(",", ":"))


if __name__ == "__main__":
    main()
