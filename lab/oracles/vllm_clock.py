"""vLLM's own scheduler on a virtual clock: `python vllm_clock.py SCENARIO.json ...` writes a recording beside each.

The program needs an interpreter that can import vLLM (release 0.20 or later), and imports nothing of this project.
vLLM's wheel without its GPU dependencies is enough, because no model runs. A scenario is a recording without `steps`
and `results`. The recording also lacks them if the release of vLLM lacks a feature of the scenario (named in `lacks`)
or cannot continue (the error is in `stuck`). The rules of the virtual clock are in docs/serving.md: planning takes no
time, and a step takes the time of the integer `cost`. Requests that arrive up to the time of a plan take part in it.
With two steps in flight, or nothing to launch, the host waits for the oldest step. Set VLLM_TARGET_DEVICE=cpu.
"""

import gzip
import inspect
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
_MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000}
_MODEL |= {"max_position_embeddings": 262144, "torch_dtype": "float16", "rms_norm_eps": 1e-5}
_STATED = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "policy", "enable_chunked_prefill",
    "long_prefill_token_threshold", "scheduler_reserve_full_isl", "watermark", "async_scheduling",
)  # fmt: skip
_Config = dict[str, Any]

# Settings that some releases lack, with the values that describe the behaviour of these releases.
_WITHOUT: _Config = {
    "watermark": 0.0,
    "scheduler_reserve_full_isl": False,
    "long_prefill_token_threshold_adaptive": False,
    "max_num_active_seqs": None,
    "max_num_scheduled_tokens": None,
    "prefill_schedule_interval": 1,
}


class Lacking(Exception):
    """An error for a setting that the release of vLLM does not have."""


def _known_by(made: Callable[..., Any], settings: _Config) -> _Config:
    """Return the settings that `made` accepts; raise Lacking if any other setting has an effect."""
    names = inspect.signature(made).parameters
    for name in settings.keys() - names:
        if name not in _WITHOUT or settings[name] != _WITHOUT[name]:
            raise Lacking(name)
    return {name: value for name, value in settings.items() if name in names}


def make_scheduler(config: _Config, folder: str, pools: bool = False) -> tuple[Scheduler, int]:
    """Return vLLM's scheduler, and the number of tokens after a block that the block's hash includes.

    `pools` is True for a server of pooling requests, which has another model runner.
    """
    drafts, overlaps = config.get("speculative"), config.get("async_scheduling", False)
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if drafts and overlaps:  # the model runner that supports drafts in the overlapped loop
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    kind = {"runner": "pooling"} if pools else {}
    longest = config["max_model_len"]
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=longest, **kind)
    caching = config.get("enable_prefix_caching", True)
    cached = {"block_size": config["block_size"], "enable_prefix_caching": caching}
    if "mamba_cache_mode" in config:
        cached |= {"mamba_cache_mode": config["mamba_cache_mode"]}
    cache = CacheConfig(**_known_by(CacheConfig, cached))
    settings = {name: config[name] for name in _STATED if name in config} | config.get("vllm", {})
    given = {
        "scheduler_config": SchedulerConfig(is_encoder_decoder=False, **_known_by(SchedulerConfig, settings)),
        "speculative_config": _drafts(drafts, model, folder) if drafts else None,
        "lora_config": LoRAConfig(max_loras=config["max_loras"]) if "max_loras" in config else None,
    }
    try:
        whole = VllmConfig(model_config=model, cache_config=cache, device_config=DeviceConfig(device="cpu"), **given)
    except ValueError:
        if drafts and overlaps:  # before 0.33, n-gram drafts, and others where Triton does not run
            raise Lacking(f"drafts of {drafts['method']} in the overlapped loop") from None
        raise
    whole.scheduler_config.async_scheduling = overlaps  # without an executor, vLLM sets it to False
    cache.num_gpu_blocks = config["num_blocks"]
    scheduler = (AsyncScheduler if overlaps else Scheduler)(
        vllm_config=whole,
        kv_cache_config=_kv(config, model.dtype),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=config["block_size"],
        log_stats=True,
    )
    if "encoder" in config:  # the budget of a step and the size of the cache; vLLM takes both from a model's processor
        scheduler.max_num_encoder_input_tokens, capacity = config["encoder"]
        scheduler.encoder_cache_manager = EncoderCacheManager(capacity)
    return scheduler, getattr(whole, "num_hash_lookahead_tokens", 0)


def _drafts(stated: _Config, model: ModelConfig, folder: str) -> SpeculativeConfig:
    method = stated.get("method", "ngram")
    how: _Config = {"prompt_lookup_max": 2, "prompt_lookup_min": 1} if method == "ngram" else {"model": folder}
    counts = ("num_speculative_tokens", "num_speculative_tokens_per_batch_size")
    how |= {name: stated[name] for name in counts if name in stated} | {"target_model_config": model}
    return SpeculativeConfig(method=method, target_parallel_config=ParallelConfig(), **how)


def _kv(config: _Config, dtype: Any) -> KVCacheConfig:
    if config.get("kv_reservation") == "none":  # as vLLM does for an encoder, whose layers keep no KV
        return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    shape = {"block_size": config["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    groups = [
        SlidingWindowSpec(sliding_window=window, **shape) if window else FullAttentionSpec(**shape)
        for window in config.get("kv_groups", [0])
    ]
    if states := config.get("state_blocks", 0):
        states_of = {"block_size": config["block_size"], "mamba_cache_mode": config["mamba_cache_mode"]}
        if checkpoints := config.get("num_prefill_checkpoint_blocks", 0):  # as vLLM's layers with Mamba 2
            states_of |= {"num_prefill_checkpoint_blocks": checkpoints, "prefill_checkpoint_alignment": 1}
        state = MambaSpec(shapes=((1,),), dtypes=(dtype,), **_known_by(MambaSpec, states_of))
        groups = [state] * states + groups
    # A release without this setting keeps all prefixes.
    interval = {"prefix_cache_retention_interval": config.get("prefix_cache_retention_interval", 0)}
    sparse = any(config.get("kv_groups", ())) or config.get("state_blocks")
    if sparse and interval["prefix_cache_retention_interval"] is not None:
        interval = _known_by(KVCacheConfig, interval)
    elif "prefix_cache_retention_interval" not in inspect.signature(KVCacheConfig).parameters:
        interval = {}
    return KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(groups)],
        **interval,
    )


def _limits(given: _Config, last: list[int]) -> SamplingParams:
    """Return the sampling limits of a request; an answer with stated `max_tokens` ends with a stop token."""
    most = given.get("max_tokens", given["output_len"])
    stops = {"stop_token_ids": last} if "max_tokens" in given else {}
    return SamplingParams(max_tokens=most, ignore_eos=True, **stops)


def _adapter(number: int) -> LoRARequest | None:
    """Return the adapter of a request, which is never loaded; None for number 0, the base model."""
    return LoRARequest(f"lora {number}", number, "nowhere") if number else None


def _items(given: list[Any]) -> list[MultiModalFeatureSpec] | None:
    """Return the images of a request, which are never read: (first placeholder token, tokens, name of the content)."""
    return [
        MultiModalFeatureSpec(None, "image", content, PlaceholderRange(offset=offset, length=tokens))
        for offset, tokens, content in given
    ] or None


def accepted(drafts: _Config, request: str, place: int, proposed: int) -> int:
    """Return the number of accepted drafts of `proposed`, drawn by hashes; the first is output token `place`."""
    for k in range(proposed):
        coin = blake2b(b"%d:%d" % (int(request), place + k), digest_size=8, key=str(drafts.get("seed", 0)).encode())
        if int.from_bytes(coin.digest(), "big") >= round(drafts["acceptance_rate"] * 2**64):
            return k
    return proposed


class _Run:
    """One scenario in vLLM's scheduler, on the virtual clock."""

    def __init__(self, scenario: _Config, folder: str) -> None:
        config = scenario["config"]
        self._cost = scenario["cost"]
        self._drafts = config.get("speculative")
        self._overlaps = config.get("async_scheduling", False)
        self._encodes = "encoder" in config
        init_none_hash(sha256)
        self._pools = not any(request["output_len"] for request in scenario["requests"])
        self._scheduler, lookahead = make_scheduler(config, folder, self._pools)
        self._hasher = get_request_block_hasher(config["block_size"], sha256, *([lookahead] if lookahead else []))
        requests = sorted(scenario["requests"], key=lambda request: (request["arrival_ns"], request["id"]))
        self._to_come = deque(requests)
        self._wanted = {str(request["id"]): request["output_len"] for request in requests}
        self._produced = dict.fromkeys(self._wanted, 0)
        self._first_token: dict[str, int] = {}  # by segment name
        self._first_ns: dict[str, int] = {}
        self._finish_ns: dict[str, int] = {}
        self._hit: dict[str, int] = {}
        self._finish: dict[str, str] = {}
        self._in_flight: deque[tuple[Any, dict[str, int], set[str], int]] = deque()
        self._now = 0
        self._free_ns = 0  # time when the device has finished all its steps
        self.steps: list[_Config] = []

    def results(self) -> list[_Config]:
        return [
            {
                "id": int(id),
                "first_token_ns": self._first_ns.get(id),
                "finish_ns": self._finish_ns[id],
                "prefix_hit_tokens": self._hit[id],
                "tokens": self._produced[id],
                "finish": self._finish[id],
            }
            for id in self._wanted
        ]

    def advance(self) -> bool:
        """Plan a step, process a result, or wait; return False at the end. Raises RuntimeError if vLLM is stuck."""
        self._arrive()
        if self._scheduler.requests and self._plan():
            return True
        if self._in_flight:
            self._take_in()
            return True
        if self._to_come:
            self._now = max(self._now, self._to_come[0]["arrival_ns"])
            return True
        if self._scheduler.requests:
            raise RuntimeError(f"{len(self._scheduler.requests)} requests wait for ever")
        return False

    def _tokens(self, segment: str, start: int, count: int) -> list[int]:
        base = self._first_token.setdefault(segment, 1000 + 1_000_000 * len(self._first_token)) + start
        return list(range(base, base + count))

    def _arrive(self) -> None:
        while self._to_come and self._to_come[0]["arrival_ns"] <= self._now:
            given = self._to_come.popleft()
            request = Request(
                request_id=str(given["id"]),
                prompt_token_ids=[id for segment, count in given["prompt"] for id in self._tokens(segment, 0, count)],
                **self._asked(given),
                block_hasher=self._hasher,
                priority=given.get("priority", 0),
                arrival_time=float(given["arrival_ns"]),
                lora_request=_adapter(given.get("lora", 0)),
                mm_features=_items(given.get("mm", [])),
            )
            request.skip_reading_prefix_cache = given.get("skip_cache", False)
            self._scheduler.add_request(request)

    def _asked(self, given: _Config) -> _Config:
        """Return the parameters of a request: of pooling if it wants no tokens, otherwise of sampling."""
        if self._pools:
            return {"sampling_params": None, "pooling_params": PoolingParams(task="embed")}
        last = self._tokens(f"out:{given['id']}", given["output_len"] - 1, 1)
        return {"sampling_params": _limits(given, last), "pooling_params": None}

    def _plan(self) -> bool:
        """Plan a step, and launch it if it has rows; return True if another step is planned before the next result."""
        plan = self._scheduler.schedule()
        rows = {id: int(count) for id, count in plan.num_scheduled_tokens.items()}
        preempted = sorted(plan.preempted_req_ids or [])
        for new in plan.scheduled_new_reqs:
            self._hit.setdefault(new.req_id, int(new.num_computed_tokens))
        if not rows:
            if preempted:
                self._note({"t": self._now, "dt": 0, "n": rows, "pre": preempted}, self._now)
            return bool(preempted) and not self._in_flight
        requests = {id: self._scheduler.requests[id] for id in rows}
        before = {id: requests[id].num_computed_tokens - count for id, count in rows.items()}
        pairs = sum(n * (2 * before[id] + n + 1) // 2 for id, n in rows.items())
        cost = self._cost
        dt = cost["base_ns"] + cost["per_token_ns"] * sum(rows.values()) + cost["per_pair_ps"] * pairs // 1000
        start = max(self._now, self._free_ns)
        step = {"t": self._now, "dt": dt, "n": rows, "pre": preempted}
        if self._encodes:
            step["enc"] = {id: list(items) for id, items in plan.scheduled_encoder_inputs.items() if items}
        self._note(step, start)
        self._free_ns = start + dt
        samples = {id for id, request in requests.items() if self._samples(request)}
        self._in_flight.append((plan, rows, samples, self._free_ns))
        return self._overlaps and len(self._in_flight) < 2

    def _note(self, step: _Config, start: int) -> None:
        self.steps.append(step | {"s": start} if self._overlaps else step)

    def _samples(self, request: Request) -> bool:
        if self._overlaps:
            return not request.is_prefill_chunk
        return request.num_computed_tokens >= request.num_tokens

    def _take_in(self) -> None:
        """Wait for the oldest step in flight, and process its result."""
        plan, rows, samples, end = self._in_flight.popleft()
        self._now = max(self._now, end)
        sampled: dict[str, list[int]] = {id: [] for id in rows}
        for id in rows:
            if id in samples and id in self._scheduler.requests and not self._pools:
                proposed = len(plan.scheduled_spec_decode_tokens.get(id, ()))
                kept = 1 + (accepted(self._drafts, id, self._produced[id], proposed) if proposed else 0)
                sampled[id] = self._tokens(f"out:{id}", self._produced[id], kept)
        pooled = [[0.0] if id in samples else None for id in rows] if self._pools else []
        here = self._scheduler.requests.keys() & samples if self._pools else set()
        outputs = self._scheduler.update_from_output(
            plan,
            ModelRunnerOutput(
                req_ids=list(rows),
                req_id_to_index={id: index for index, id in enumerate(rows)},
                sampled_token_ids=list(sampled.values()),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=pooled,
            ),
        )
        ended = [out for batch in outputs.values() for out in batch.outputs if out.finish_reason is not None]
        self._finish |= {out.request_id: str(out.finish_reason) for out in ended}
        self._finish_ns |= dict.fromkeys(here - self._scheduler.requests.keys(), end)
        got = {id: tokens for id, tokens in sampled.items() if tokens}
        for id, tokens in got.items():
            self._first_ns.setdefault(id, end)
            self._produced[id] = min(self._produced[id] + len(tokens), self._wanted[id])  # further tokens are dropped
            if self._produced[id] == self._wanted[id]:
                self._finish_ns[id] = end
        if self._drafts and not self._overlaps:
            goes_on = [id for id in got if id in self._scheduler.requests]
            drafted = getattr(plan, "num_spec_tokens_to_schedule", self._drafts["num_speculative_tokens"])
            proposals = [[7] * drafted for _ in goes_on]
            self._scheduler.update_draft_token_ids(DraftTokenIds(goes_on, proposals))


def record(scenario: _Config, folder: str, most_steps: int = 100_000) -> _Config:
    """Record vLLM's decisions in the scenario; raise RuntimeError if vLLM is stuck."""
    run = _Run(scenario, folder)
    while run.advance():
        if len(run.steps) >= most_steps:
            raise RuntimeError(f"no end after {most_steps} steps")
    return {"vllm": vllm.__version__, **scenario, "steps": run.steps, "results": run.results()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        for path in map(Path, sys.argv[1:]):
            scenario = json.loads(path.read_text())
            try:
                recording = record(scenario, folder)
            except Lacking as error:
                recording = scenario | {"vllm": vllm.__version__, "lacks": str(error)}
            except Exception as error:  # vLLM refuses the scenario or is stuck: the error is stored
                recording = scenario | {"vllm": vllm.__version__, "stuck": repr(error)}
            with gzip.open(path.with_suffix(".rec.json.gz"), "wt") as file:
                json.dump(recording, file, separators=(",", ":"))


if __name__ == "__main__":
    main()
