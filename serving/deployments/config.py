"""The setup of one engine: scheduler settings and the deployment they belong to.

The command line reads the setup once from YAML and validates it. It is frozen, and the code that gets it reads no
files. If vLLM has a setting, its name and default are those of vLLM. The same file describes a run of the real engine
and a simulation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from tokentwin.serving.data_file import read_mapping
from tokentwin.serving.deployments.engines import EngineName, check_engine
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig
from tokentwin.serving.deployments.inter_node import InterNodeConfig
from tokentwin.serving.deployments.kv_tiers import KvTiersConfig
from tokentwin.serving.deployments.lora import LoraConfig
from tokentwin.serving.deployments.multimodal import MultimodalConfig, encoder_settings
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import TerseSettings, remedy
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.serving.user_code.plugins import located

Model = TypeVar("Model", bound=BaseModel)
_NO_TEXT = re.compile("[\ud800-\udfff]")  # lone surrogates


class SchedulerConfig(TerseSettings):
    """The settings that a scheduling policy reads. `num_blocks` includes the null block, as in vLLM."""

    seldom_set = (
        "kv_groups", "state_blocks", "mamba_cache_mode", "num_prefill_checkpoint_blocks",
        "prefix_cache_retention_interval", "kv_reservation", "kv_reserved_max_tokens",
        "static_timeout_ms", "scheduler_recv_interval", "schedule_policy", "schedule_seed",
        "priority_scheduling_preemption_threshold", "schedule_conservativeness",
        "max_prefill_tokens", "enable_mixed_chunk", "sglang_outline",
        "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio",
        "attention_dp_timeout_iters", "attention_dp_ranks",
        "max_num_scheduled_tokens", "max_num_active_seqs", "long_prefill_token_threshold_adaptive",
        "prefill_schedule_interval", "cut_at_max_model_len", "decode_stagger", "self_preemption_ends_step",
        "state_read_defers_hits", "max_loras", "adapter_slots_by_step", "kv_eviction", "max_num_encoder_input_tokens",
        "encoder_cache_size", "disable_chunked_mm_input", "encoder_apart", "encoder_holds_queue",
    )  # fmt: skip

    max_num_seqs: int = Field(128, ge=1, le=1_000_000, description="maximum number of running requests")
    max_num_active_seqs: int | None = Field(
        None, ge=1, description="maximum number of running requests, at most max_num_seqs; null: max_num_seqs"
    )
    max_num_batched_tokens: int = Field(2048, ge=1, le=100_000_000, description="maximum number of tokens in one step")
    max_num_scheduled_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum number of tokens in one step, not counting tokens for drafts; null: "
        "max_num_batched_tokens",
    )
    max_model_len: int = Field(
        8192, ge=2, le=100_000_000, description="maximum number of prompt and output tokens of one request"
    )
    cut_at_max_model_len: bool = Field(
        False,
        description="end an answer that reaches max_model_len, as vLLM's scheduler does; false: reject such a request",
    )
    block_size: int = Field(16, ge=1, le=65_536, description="tokens in one KV block")
    num_blocks: int = Field(4096, ge=2, le=10_000_000, description="number of KV blocks, including the null block")
    enable_chunked_prefill: bool = Field(True, description="allow a prompt to be split over several steps")
    enable_prefix_caching: bool = Field(True, description="reuse the KV blocks of equal prefixes")
    kv_groups: tuple[int, ...] = Field(
        (),
        description="for each group of layers with one block table: its sliding window in tokens, or 0 for full "
        "attention. Follows from the model; empty: one group with full attention",
    )
    state_blocks: int = Field(
        0,
        ge=0,
        description="KV blocks that a request holds in addition to the blocks of its tokens, for layers with a state "
        "of constant size or a window. Follows from the model",
    )
    mamba_cache_mode: Literal["none", "align"] = Field(
        "none",
        description="align: layers with a constant state cache it at ends of blocks, where prompts are split. A "
        "request then holds up to two times `state_blocks`, or three times with async_scheduling. none, or without "
        "enable_prefix_caching: they cache nothing. Follows from the model",
    )
    num_prefill_checkpoint_blocks: int = Field(
        0,
        ge=0,
        le=1,
        description="with mamba_cache_mode align: number of states that a step can cache at ends of blocks in the "
        "middle of a chunk. Follows from the model: 1 for state spaces (Mamba 2)",
    )
    prefix_cache_retention_interval: int | None = Field(
        0,
        ge=0,
        description="layers with a sliding window or a constant state keep cached prefixes at every multiple of this "
        "number of tokens, itself a multiple of block_size; 0: only where a prompt or a shared prefix ends; null: "
        "everywhere",
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="maximum number of prefill tokens of one request in one step; 0: no limit"
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        False,
        description="raise long_prefill_token_threshold to max_num_batched_tokens / (running and waiting requests), "
        "if larger",
    )
    prefill_schedule_interval: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="while requests decode, compute prompts only in every N-th step, unless prompts are left waiting",
    )
    scheduler_reserve_full_isl: bool = Field(
        True, description="admit a request only if KV blocks for all of its known tokens are free"
    )
    watermark: float = Field(
        0.0, ge=0.0, lt=1.0, description="fraction of the KV blocks that must stay free when a request is admitted"
    )
    policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="order of waiting requests that the scheduling policy ranks as equal"
    )
    forget_withdrawn: bool = Field(
        False,
        description="drop from the prefix cache the blocks of tokens that a preemption takes back in the step that "
        "scheduled them (policy priority only); false: keep them, as vLLM does, although they were never computed",
    )
    self_preemption_ends_step: bool = Field(
        False,
        description="give the running requests after one that preempts itself no tokens in this step, as vLLM up to "
        "0.32 does (policy priority only); false: give them tokens, as vLLM 0.33 does",
    )
    state_read_defers_hits: bool = Field(
        False,
        description="with mamba_cache_mode align: a request waits for the next step if this step reads the state that "
        "it would start from, at the end of the same prompt, as in vLLM up to 0.32; false: only if this step writes it",
    )
    async_scheduling: bool = Field(False, description="plan step N+1 while step N is running")
    decode_stagger: int = Field(
        1,
        ge=1,
        le=64,
        description="with async_scheduling: number of scheduler steps from one decode of a request to its next decode. "
        "Follows from pipeline_parallel_size",
    )
    max_loras: int | None = Field(
        None, ge=1, description="number of LoRA adapters in one step. Follows from lora.max_loras; null: no adapters"
    )
    adapter_slots_by_step: bool = Field(
        False,
        description="running requests without tokens in a step leave their adapter's slot to others, as in vLLM up to "
        "0.32; false: they keep it, as in vLLM 0.33",
    )
    max_num_encoder_input_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum number of embeddings of images, videos and audio that one step encodes. Follows from "
        "multimodal; null: requests have none",
    )
    encoder_cache_size: int | None = Field(
        None,
        ge=1,
        description="embeddings in the encoder cache. Follows from multimodal; null: max_num_encoder_input_tokens",
    )
    disable_chunked_mm_input: bool = Field(
        False, description="compute the placeholder tokens of an image, a video or audio in one step, or begin none"
    )
    encoder_apart: bool = Field(
        False,
        description="embeddings come from encoder replicas, so that a step takes them without encoding. Follows from "
        "fleet.pools",
    )
    encoder_holds_queue: bool = Field(
        False,
        description="a waiting request whose image cannot be encoded now holds back those behind it, and "
        "disable_chunked_mm_input may split an item at which a step begins, as in vLLM up to 0.32; false: as in 0.33",
    )
    speculative: SpeculativeConfig | None = Field(None, description="speculative decoding (docs/speculative.md)")
    sarathi_token_budget: int = Field(
        512,
        ge=0,
        description="sarathi: number of tokens up to which prefill chunks fill a step (default: Sarathi-Serve's); "
        "0: max_num_batched_tokens",
    )
    sjf_error: float = Field(
        0.0,
        ge=0.0,
        le=10.0,
        description="sjf: standard deviation of log(predicted / true output length); 0: clairvoyant, by true lengths",
    )
    sjf_seed: int = Field(0, description="sjf: seed of the prediction errors")
    ageing_s: float = Field(
        10.0,
        ge=0.0,
        le=1e9,
        description="priority-ageing: seconds of waiting that raise a request by one priority level",
    )
    edf_ttft_ms: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = Field(
        {}, description="edf: TTFT bound of each SLO class in ms; a class without a bound gets the longest bound"
    )
    fair_input_weight: int = Field(
        1, ge=0, le=1000, description="fair: weight of a prompt token when the service of each tenant is added up"
    )
    fair_output_weight: int = Field(
        2, ge=0, le=1000, description="fair: weight of an output token when the service of each tenant is added up"
    )
    scheduler_recv_interval: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="sglang: number of decode steps between two checks for new requests",
    )
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "random"] = Field(
        "fcfs",
        description="sglang: order of waiting requests. lpm: longest cached prefix first; dfs-weight: by cached "
        "prefix, depth first; lof: largest output limit first; random: shuffled before each step that may admit some",
    )
    schedule_seed: int = Field(
        0, ge=0, le=(1 << 63) - 1, description="sglang: seed of schedule_policy random (SGLang's random_seed)"
    )
    priority_scheduling_preemption_threshold: int | None = Field(
        None,
        ge=0,
        description="sglang with policy priority: a waiting request may preempt running requests whose priority number "
        "exceeds its own by more than this; null: never",
    )
    schedule_conservativeness: float = Field(
        1.0,
        ge=0.0,
        le=100.0,
        description="sglang: factor of the output that is reserved for running requests before others are admitted",
    )
    max_prefill_tokens: int = Field(
        16384, ge=1, le=100_000_000, description="sglang: maximum number of prompt tokens in one step"
    )
    enable_mixed_chunk: bool = Field(
        False, description="sglang: compute prompts and decodes in one step (needs enable_chunked_prefill)"
    )
    sglang_outline: bool = Field(
        False,
        description="sglang: only outline SGLang's rules, on vLLM's blocks. Follows from the deployment: true with "
        "pipeline stages or KV from outside the engine",
    )
    batch_wait_timeout_iters: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="trtllm: maximum number of decode steps that prompts wait for more prompts",
    )
    batch_wait_max_tokens_ratio: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="trtllm: waiting prompts start when they fill this fraction of the token budget",
    )
    attention_dp_timeout_iters: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="trtllm with data parallelism: maximum number of decode steps that a prompt waits for every rank "
        "to have one (attention_dp_config with enable_balance); 0: prompts do not wait for other ranks",
    )
    attention_dp_ranks: int = Field(
        1, ge=1, le=1024, description="trtllm: number of data-parallel ranks. Follows from data_parallel_size"
    )

    kv_reservation: Literal["paged", "max_model_len", "max_tokens", "none"] = Field(
        "paged",
        description="KV memory of a request. paged: allocate blocks as the request grows. max_model_len: reserve "
        "contiguous blocks for max_model_len tokens at admission. max_tokens: the same for prompt and output limit. "
        "none: keep no KV; follows from the model, an encoder",
    )
    kv_eviction: Literal["lru", "session"] = Field(
        "lru",
        description="free cached blocks that are evicted first. lru: the least recently used. session: first blocks of "
        "ended sessions and of requests without a session, then blocks of sessions whose next turn is expected",
    )
    kv_reserved_max_tokens: int = Field(
        0,
        ge=0,
        description="with kv_reservation: max_tokens, minimum number of output tokens for which a request reserves "
        "room; 0: its own max_tokens, or else the true length of its answer",
    )
    static_timeout_ms: float = Field(
        1000.0, ge=0.0, le=1e9, description="static: time that an incomplete batch waits for more requests, in ms"
    )

    @model_validator(mode="after")
    def _whole_prompts_fit(self) -> SchedulerConfig:
        """Raise the token budget to the longest prompt if prompts are not split, unless a budget is stated.

        vLLM does the same. Raises ValueError if a stated budget is too small.
        """
        if not self.enable_chunked_prefill and not self.states("max_num_batched_tokens"):
            object.__setattr__(self, "max_num_batched_tokens", max(self.max_num_batched_tokens, self.max_model_len))
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError("max_num_batched_tokens must be at least max_model_len when enable_chunked_prefill is off")
        if not self.enable_chunked_prefill and self.most_step_tokens < self.max_model_len:
            raise ValueError(
                "max_num_scheduled_tokens must be at least max_model_len when enable_chunked_prefill is off"
            )
        return self

    @model_validator(mode="after")
    def _active_requests_have_seats(self) -> SchedulerConfig:
        if self.most_running > self.max_num_seqs:
            raise ValueError(f"max_num_active_seqs must be at most max_num_seqs {self.max_num_seqs}")
        return self

    @model_validator(mode="after")
    def _reservations_are_of_requests_alone(self) -> SchedulerConfig:
        if self.kv_reservation != "paged" and (self.enable_prefix_caching or self.speculative is not None):
            raise ValueError(
                f"kv_reservation {self.kv_reservation} needs enable_prefix_caching false and no speculative"
            )
        if self.kv_reservation == "none" and (self.enable_chunked_prefill or self.long_prefill_token_threshold):
            raise ValueError(
                "kv_reservation none needs enable_chunked_prefill false and no long_prefill_token_threshold, because "
                "an encoder reads a prompt in one step"
            )
        if self.kv_reserved_max_tokens and self.kv_reservation != "max_tokens":
            raise ValueError("kv_reserved_max_tokens needs kv_reservation max_tokens")
        return self

    @model_validator(mode="after")
    def _preemption_by_priority_has_priorities(self) -> SchedulerConfig:
        if self.priority_scheduling_preemption_threshold is not None and self.policy != "priority":
            raise ValueError("priority_scheduling_preemption_threshold needs policy priority")
        return self

    @model_validator(mode="after")
    def _sessions_have_blocks_to_keep(self) -> SchedulerConfig:
        if self.kv_eviction == "session" and (self.kv_groups or self.state_blocks or not self.enable_prefix_caching):
            raise ValueError(
                "kv_eviction session needs enable_prefix_caching and a model with full attention in all layers"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_kept_as_vllm_keeps_them(self) -> SchedulerConfig:
        if self.state_blocks and self.kv_groups:
            raise ValueError(
                "state_blocks cannot be combined with kv_groups; leave both out, because they follow from the model"
            )
        if self.mamba_cache_mode == "align" and not self.state_blocks:
            raise ValueError(
                "mamba_cache_mode align needs state_blocks; leave it out, because it follows from the model"
            )
        if self.caches_states and (self.speculative is not None or not self.enable_chunked_prefill):
            raise ValueError("mamba_cache_mode align needs enable_chunked_prefill and no speculative")
        if self.num_prefill_checkpoint_blocks and self.mamba_cache_mode == "none":
            raise ValueError("num_prefill_checkpoint_blocks needs mamba_cache_mode align; leave it out")
        windows = {window for window in self.kv_groups if window}
        if self.kv_groups and (len(windows) != 1 or min(windows) < 2):
            raise ValueError("kv_groups must have groups with one sliding window, of at least 2 tokens")
        if (self.prefix_cache_retention_interval or 0) % self.block_size:
            raise ValueError(f"prefix_cache_retention_interval must be a multiple of block_size {self.block_size}")
        return self

    def full_length(self, prompt_len: int, output_len: int) -> int:
        """Return the final length, in tokens, of a request of `prompt_len` that wants `output_len` output tokens."""
        if self.cut_at_max_model_len and prompt_len < self.max_model_len:
            return min(prompt_len + output_len, self.max_model_len)
        return prompt_len + output_len

    @property
    def caches_states(self) -> bool:
        """True if layers with a constant state cache it. As in vLLM, they do not without prefix caching."""
        return self.mamba_cache_mode == "align" and self.enable_prefix_caching

    @property
    def most_running(self) -> int:
        """The maximum number of requests that run at once."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def most_step_tokens(self) -> int:
        """The maximum number of tokens scheduled in one step."""
        return min(self.max_num_scheduled_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)


_APART = {  # sizes above 1, and the settings with which they cannot be combined
    "pipeline_parallel_size": ("scheduler.speculative", "lora", "multimodal"),
    "data_parallel_size": ("lora", "multimodal"),
    "prefill_context_parallel_size": (
        "scheduler.speculative", "lora", "multimodal", "decode_context_parallel_size", "data_parallel_size",
    ),
    "decode_context_parallel_size": ("scheduler.speculative", "lora", "multimodal"),
}  # fmt: skip


class Deployment(TerseSettings):
    """One engine: its model, its device, how it computes, its policy and the settings of its scheduler."""

    seldom_set = (
        "engine", "inter_node", "all2all_backend", "fusion", "max_cudagraph_capture_size", "power_limit_w", "lora",
        "prefill_context_parallel_size", "decode_context_parallel_size", "multimodal",
    )  # fmt: skip

    model: str = Field(
        "smollm2",
        description="model: `smollm2`, a Hugging Face folder, `random:FAMILY`, or for the simulator a name from "
        "`tokentwin model list`",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="device of the real engine")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="data type of weights, activations and KV"
    )
    threads: int = Field(1, ge=1, le=1024, description="number of CPU threads of the real engine")
    attention: str = Field(
        "auto",
        description="attention backend of the real engine: torch, triton, hybrid, auto (triton on CUDA, else torch), "
        "varlen (torch's FlashAttention), flash-attn, flashinfer, unfused (writes scores to memory; can also be "
        "simulated), the name of an installed backend, path/to/file.py:Class or package.module:Class",
    )
    quantization: Literal["none", "fp8", "fp8_block", "mxfp4", "nvfp4", "int4", "int8"] = Field(
        "none",
        description="format of weights in GEMMs. `none` keeps the checkpoint's format. fp8 (e4m3) and fp8_block (e4m3 "
        "with a scale for each block) also convert activations. nvfp4 computes in 4 bits (in a mixture-of-experts "
        "model: all but attention). mxfp4 stores experts in 4 bits. int4 (groups of 128 weights) and int8 convert "
        "weights only. The real engine supports `none`, fp8, int4 and int8",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="data type of the KV cache; auto: `dtype`; fp8: e4m3"
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="tensor-parallel size: number of devices (on a CPU: processes) that share each layer",
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=64, description="number of pipeline stages; each stage has a part of the layers; simulator only"
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="number of data-parallel ranks. Each rank has its own attention layers; all run steps together and "
        "share the experts. Simulator only",
    )
    prefill_context_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="number of tensor-parallel groups that share the tokens of each prompt; every group has all KV "
        "and all weights but experts; simulator only",
    )
    decode_context_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="number of devices of a tensor-parallel group that share the tokens of each KV block, instead of "
        "holding copies; simulator only",
    )
    enable_expert_parallel: bool = Field(
        False, description="give each device some complete experts, instead of a slice of every expert"
    )
    all2all_backend: Literal["allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput"] = Field(
        "allgather_reducescatter",
        description="method that sends tokens to the experts of other data-parallel ranks and back; simulator only",
    )
    expert_imbalance: float | Literal["random"] = Field(
        1.0,
        description="with expert parallelism: tokens on the busiest device, divided by the mean over all devices; "
        "random: the expected value if tokens choose experts evenly and independently; simulator only",
    )
    enforce_eager: bool = Field(False, description="run steps without CUDA graphs")
    max_cudagraph_capture_size: int | None = Field(
        None,
        ge=0,
        description="number of tokens of the largest step with prompts that runs as a CUDA graph; larger ones wait for "
        "the host to launch every kernel; null: as the engine chooses (vLLM: twice the tokens that all sequences "
        "decode, at most 512 or 1,024; SGLang and TensorRT-LLM: none); simulator only",
    )
    power_limit_w: float | None = Field(
        None,
        gt=0,
        description="power limit of each GPU in watts, as of `nvidia-smi --power-limit`, which lowers the clock and so "
        "slows what computing bounds (docs/energy.md); null: the board's limit; simulator only",
    )
    fusion: bool = Field(
        True,
        description="each norm, rotary embedding and activation is one kernel; false: several kernels, as in plain "
        "PyTorch; simulator only",
    )
    batch_invariant: bool = Field(
        False, description="use attention kernels whose results for a request do not depend on the rest of the batch"
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="fraction of the device's memory for the engine, from which scheduler.num_blocks follows; null: "
        "num_blocks is as stated",
    )
    policy: str = Field("vllm", description="scheduling policy: a name, path/to/file.py:Class or package.module:Class")
    engine: str | None = Field(
        None,
        description="serving engine to simulate, whose measured runs correct the step times: vllm, sglang or trtllm, "
        "with or without a release (sglang 0.5.6); null: the engine that the policy is named after, else vllm; "
        "simulator only",
    )
    scheduler: SchedulerConfig = SchedulerConfig()
    fleet: FleetConfig | None = Field(None, description="engines behind a router (docs/fleet.md)")
    kv_tiers: KvTiersConfig | None = Field(None, description="slower memory for KV blocks (docs/kv-tiers.md)")
    lora: LoraConfig | None = Field(None, description="LoRA adapters (docs/lora.md)")
    multimodal: MultimodalConfig | None = Field(
        None, description="images, videos and audio in requests (docs/multimodal.md); simulator only"
    )
    inter_node: InterNodeConfig | None = Field(
        None,
        description="nodes and their links, for engines on several nodes (docs/parallelism.md); simulator only",
    )

    @field_validator("policy", "attention")
    @classmethod
    def _is_found_from_anywhere(cls, name: str) -> str:
        return located(name)

    _engine_is_known = field_validator("engine")(check_engine)

    @model_validator(mode="after")
    def _tiers_find_prefixes(self) -> Deployment:
        if self.kv_tiers is not None and not self.scheduler.enable_prefix_caching:
            raise ValueError("kv_tiers need scheduler.enable_prefix_caching, because tiers find blocks by prefix")
        drafts = self.scheduler.speculative
        if self.kv_tiers is not None and drafts is not None and drafts.method in ("eagle", "mtp"):
            remedy = "keep no KV of a drafting head; choose scheduler.speculative.method ngram or draft_model"
            raise ValueError(f"kv_tiers {remedy}")
        return self

    @field_validator("expert_imbalance", mode="before")
    @classmethod
    def _imbalance_is_a_ratio(cls, value: object) -> object:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "random" and not (number and value >= 1.0):  # type: ignore[operator]
            raise ValueError("must be random, or a number of at least 1")
        return value

    @model_validator(mode="after")
    def _stages_are_as_vllm_runs_them(self) -> Deployment:
        stagger = self.scheduler.decode_stagger
        if stagger not in (1, self.decode_stagger):
            raise UserError("scheduler.decode_stagger", stagger, "follows from pipeline_parallel_size; leave it out")
        if self.scheduler.max_loras not in (None, self.lora and self.lora.max_loras):
            remedy = "follows from lora.max_loras; leave it out"
            raise UserError("scheduler.max_loras", self.scheduler.max_loras, remedy)
        return self

    @model_validator(mode="after")
    def _devices_are_shared_as_vllm_does(self) -> Deployment:
        for name, others in _APART.items():
            for other in others if (size := getattr(self, name)) > 1 else ():
                section, _, setting = other.rpartition(".")
                value = getattr(self.scheduler if section else self, setting)
                if value not in (None, 1):
                    raise UserError(name, size, f"cannot be combined with {other}; leave one of them out")
        dcp = self.decode_context_parallel_size
        if self.scheduler.states("block_size") and self.scheduler.block_size % dcp:
            remedy = (
                f"must be a multiple of decode_context_parallel_size {dcp}, because it counts the tokens of all ranks"
            )
            raise UserError("scheduler.block_size", self.scheduler.block_size, remedy)
        return self

    @model_validator(mode="after")
    def _imbalance_is_possible(self) -> Deployment:
        if self.expert_imbalance == 1.0:
            return self
        devices = self.expert_parallel_size
        if devices == 1:
            remedy = "needs enable_expert_parallel and more than one device; leave it out"
            raise UserError("expert_imbalance", self.expert_imbalance, remedy)
        if self.expert_imbalance != "random" and self.expert_imbalance > devices:
            remedy = f"must be at most {devices}, the number of devices that share the experts"
            raise UserError("expert_imbalance", self.expert_imbalance, remedy)
        return self

    @model_validator(mode="after")
    def _nodes_are_cut_evenly(self) -> Deployment:
        self.check_nodes()
        return self

    def check_nodes(self) -> None:
        """Raise UserError if tensor-parallel groups are not divided evenly between nodes."""
        tp, node = self.tensor_parallel_size, self.inter_node or InterNodeConfig()
        if self.gpus > node.gpus_per_node and node.gpus_per_node % tp and tp % node.gpus_per_node:
            remedy = (
                f"must divide the {node.gpus_per_node} GPUs of a node or be a multiple of them, since it needs several"
            )
            raise UserError("tensor_parallel_size", tp, remedy)

    @model_validator(mode="after")
    def _deepep_has_experts_to_go_to(self) -> Deployment:
        if self.all2all_backend.startswith("deepep"):
            if self.data_parallel_size == 1 or not self.enable_expert_parallel:
                remedy = "needs data_parallel_size above 1 and enable_expert_parallel; leave it out"
                raise UserError("all2all_backend", self.all2all_backend, remedy)
            if self.inter_node is not None and not self.inter_node.rdma:
                remedy = f"needs RDMA, and inter_node.link is {self.inter_node.link}; name infiniband or roce there"
                raise UserError("all2all_backend", self.all2all_backend, remedy)
        return self

    @property
    def engine_name(self) -> EngineName:
        """The engine whose measured runs correct the predicted step times."""
        return EngineName.read(self.engine or self.policy)

    @property
    def gpus(self) -> int:
        """The number of devices of one engine."""
        return self.gpus_of_a_rank * self.data_parallel_size

    @property
    def gpus_of_a_rank(self) -> int:
        """The number of devices of one data-parallel rank."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size * self.pipeline_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """The number of devices over which whole experts are spread; 1 without expert parallelism."""
        return self.expert_gpus if self.enable_expert_parallel else 1

    @property
    def expert_gpus(self) -> int:
        """The number of devices that share the experts of a layer, whole or in slices."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size * self.data_parallel_size

    @property
    def decode_stagger(self) -> int:
        """Scheduler steps from one decode of a request to its next, as vLLM's V2 model runner needs them."""
        return self.pipeline_parallel_size if self.scheduler.async_scheduling else 1

    @property
    def staged_settings(self) -> SchedulerConfig:
        """The scheduler's settings with those that follow from others.

        They are the pipeline's decode stagger, the data-parallel ranks, adapter slots, and the encoder's budget and
        cache.
        """
        scheduler = self.scheduler
        if self.multimodal is not None:
            encoder = encoder_settings(self.model, self.multimodal, scheduler.max_num_batched_tokens)
            scheduler = scheduler.model_copy(update=encoder)
        if self.lora is not None:
            scheduler = scheduler.model_copy(update={"max_loras": self.lora.max_loras})
        if scheduler.decode_stagger != self.decode_stagger:
            scheduler = scheduler.model_copy(update={"decode_stagger": self.decode_stagger})
        if scheduler.attention_dp_timeout_iters and self.data_parallel_size > 1:
            scheduler = scheduler.model_copy(update={"attention_dp_ranks": self.data_parallel_size})
        if "sglang" in self.policy and (self.pipeline_parallel_size > 1 or self.kv_tiers is not None):
            scheduler = scheduler.model_copy(update={"sglang_outline": True})
        return scheduler

    def rescheduled(self, **changes: Any) -> Deployment:
        """Return the deployment with these settings of the scheduler changed; they are not validated."""
        return self.model_copy(update={"scheduler": self.scheduler.model_copy(update=changes)})

    def timing(self) -> Deployment:
        """Return the deployment with only the settings that step times depend on; the others have their defaults.

        Limits and policies decide what a step contains, but not how long a given step takes.
        """
        kept = self.scheduler.model_dump(include={"block_size", "max_model_len", "async_scheduling"})
        speculative = self.scheduler.speculative
        return self.model_copy(
            update={
                "policy": "vllm",
                "gpu_memory_utilization": None,
                "scheduler": SchedulerConfig(**kept, speculative=speculative and speculative.timing()),
                "fleet": None,
                "kv_tiers": None,
                "lora": self.lora and self.lora.timing(),
            }
        )


def load_deployment(path: str | Path) -> Deployment:
    """Read a deployment from a YAML file. Raises UserError that names the file, the field and the remedy."""
    stated = read_mapping(path, "deployment", "docs/engine.md")
    return with_stated_blocks(parse(Deployment, stated, where=str(path), typed=True))


def with_stated_blocks(deployment: Deployment) -> Deployment:
    """Return `deployment` without gpu_memory_utilization if it states num_blocks, which takes precedence as in vLLM."""
    if deployment.gpu_memory_utilization is None or not deployment.scheduler.states("num_blocks"):
        return deployment
    return deployment.model_copy(update={"gpu_memory_utilization": None})


def pool_deployment(deployment: Deployment, pool: PoolConfig) -> Deployment:
    """Return `deployment` with the pool's own settings. Raises UserError that names a wrong setting."""
    where = f"fleet.pools.{pool.name}.deployment"
    own = _own_deployment(deployment, pool, where)
    if own.kv_tiers is not None and pool.role != "serve":
        raise UserError(f"{where}.kv_tiers", None, f"needs a pool of role serve, not {pool.role}; set it to null")
    return own


def _own_deployment(deployment: Deployment, pool: PoolConfig, where: str) -> Deployment:
    alone = deployment.model_copy(update={"fleet": None})
    if not pool.deployment:
        return alone
    if "fleet" in pool.deployment:
        remedy = "a pool cannot have a fleet of its own; leave it out"
        raise UserError(f"{where}.fleet", pool.deployment["fleet"], remedy)
    return parse(Deployment, over(alone.as_stated(), pool.deployment), where=where)


def over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a deployment updated with `changes`.

    Stated KV blocks take the place of the share of memory from which they would follow, and a share that of blocks.
    """
    data, scheduler = merged(base, changes), changes.get("scheduler")
    if isinstance(scheduler, dict) and "num_blocks" in scheduler:
        data["gpu_memory_utilization"] = None
    elif changes.get("gpu_memory_utilization") is not None and isinstance(data.get("scheduler"), dict):
        data["scheduler"] = {name: value for name, value in data["scheduler"].items() if name != "num_blocks"}
    return data


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `changes`; nested mappings are merged in the same way."""
    result = dict(base)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(name), dict)
        result[name] = merged(base[name], value) if nested else value
    return result


def parse(model: type[Model], data: Any, where: str, *, typed: bool = False) -> Model:
    """Make a `model` from `data`. Raises UserError that names the first wrong field.

    `typed` data, such as YAML, must not have text in place of a number; data from a command line or a form may.
    """
    check_text(data, where)
    try:
        made = model.model_validate(data)
        _refuse_other_types(data, made, where, typed)
        return made
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join([where, *_way_in(data, first["loc"])])
        if first["type"] == "missing":
            raise UserError(field, None, "is missing; add it") from None
        wanted = remedy(first)
        if first["type"] == "extra_forbidden":
            *way, name = first["loc"]
            near = get_close_matches(str(name), _settings(model, way), n=1)
            wanted = f"is not a setting; did you mean {near[0]}?" if near else "is not a setting; leave it out"
        given = first["input"]
        raise UserError(field, None if isinstance(given, dict) else given, wanted) from None


def _way_in(data: Any, way: Sequence[int | str]) -> Iterator[str]:
    """Yield the names and indices in `data` along `way`, without the union members that pydantic inserts."""
    node = data
    for part in way:
        if isinstance(part, int) or not isinstance(node, int | float | str | list | tuple):
            yield str(part)
            if isinstance(node, dict):
                node = node.get(part)
            else:
                listed = isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)
                node = node[part] if listed else None


def _refuse_other_types(data: Any, made: Any, where: str, typed: bool) -> None:
    """Raise UserError if pydantic made a number from a bool, or, in `typed` data, a number or a bool from text."""
    if isinstance(data, bool) and not isinstance(made, bool) and isinstance(made, int | float):
        raise UserError(where, str(data).lower(), "must be a number")
    if typed and isinstance(data, str) and isinstance(made, int | float):
        raise UserError(where, data, f"must be {'true or false' if isinstance(made, bool) else 'a number'}, no text")
    if isinstance(data, dict):
        for name, value in data.items():
            inner = made.get(name) if isinstance(made, dict) else getattr(made, str(name), None)
            _refuse_other_types(value, inner, f"{where}.{name}", typed)
    elif isinstance(data, list | tuple) and isinstance(made, list | tuple):
        for at, (value, inner) in enumerate(zip(data, made, strict=False)):
            _refuse_other_types(value, inner, f"{where}.{at}", typed)


def check_text(data: Any, where: str) -> None:
    """Raise UserError if `data` has what files cannot hold: bytes, sets, or text that is not UTF-8 or has a NUL."""
    if isinstance(data, str) and ("\0" in data or _NO_TEXT.search(data)):
        raise UserError(where, repr(data), "must be UTF-8 text without a NUL")
    if isinstance(data, bytes | bytearray):
        raise UserError(where, repr(data), "must be text, not bytes")
    if isinstance(data, set | frozenset):
        raise UserError(where, repr(data), "must be a list, which has an order")
    if isinstance(data, dict):
        for name, value in data.items():
            if not isinstance(name, str):
                raise UserError(where, repr(name), "must be text, because it is a name")
            check_text(name, where)
            check_text(value, f"{where}.{name}" if where else name)
    elif isinstance(data, list | tuple):
        for at, value in enumerate(data):
            check_text(value, f"{where}.{at}")


def _settings(model: type[BaseModel], way: list[int | str]) -> list[str]:
    """Return the names of the settings at the end of the path `way` in `model`; of a union, those of all members."""
    models = [model]
    for part in way:
        fields = [kind.model_fields[part] for kind in models if isinstance(part, str) and part in kind.model_fields]
        if fields:  # a list index or the tag of a union member is no field, so `models` stays the same
            models = [inner for field in fields for inner in _models_in(field.annotation)]
    return list(dict.fromkeys(name for kind in models for name in kind.model_fields))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
