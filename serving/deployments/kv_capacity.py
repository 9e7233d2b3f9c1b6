"""An estimate of the number of KV blocks that an engine will have, by vLLM's arithmetic.

vLLM loads the weights, runs one step of maximum size, and measures how much of its memory (`gpu_memory_utilization`) is
left for KV. Here the size of the weights is exact. The activations of the step are estimated from the shapes of the
model, so the number of blocks has an interval. The terms are those of `tokentwin.realengine.devices.memory`, which
measures them on a real engine.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tokentwin.serving.answers.figures import shown_gib
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.kv_layout import kv_groups, layers_of_a_group, most_held, page_bytes, with_states
from tokentwin.serving.deployments.lora import slot_elements
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec, draft_module, module_deployment, stage_models
from tokentwin.serving.deployments.multimodal import find_tower
from tokentwin.serving.deployments.weight_types import (
    DTYPE_BYTES,
    check_format,
    check_heads,
    check_linear_heads,
    stored,
    weights_dtype,
)
from tokentwin.serving.errors import UserError

LEAST_BLOCKS = 2  # the null block and one more
UTILIZATION = 0.9  # default of most vLLM releases; 0.92 in the latest
_GIB = 1024**3
# bytes per logit, measured: float32 logits, sort with 64-bit indices, softmax, cumulative sum, mask
_SAMPLER_BYTES = 38.6
_NON_TORCH = 0.15 * _GIB  # loaded kernels and workspaces: logs of one device show 0.05 to 0.26 GiB
_OVER_PCIE = 0.10 * _GIB  # buffers of collectives: logs show 0.20 to 0.30 GiB with _NON_TORCH (RTX 4090, L40S)
_OVER_NVLINK = 1.0 * _GIB  # logs show 0.95 to 1.38 GiB with _NON_TORCH (H200, GB200)
# vLLM 0.8 to 0.9.1 also counts the CUDA context and whatever else is on the device; pull request 19312 ended that. Two
# logs show 1.1 and 1.3 GiB more than the other terms (vLLM 0.9.0 with LMCache on 2 x RTX 4090, LMCache issue 1241). A
# context takes 0.4 to 0.6 GiB of this.
_COUNTED_TOO = 1.2 * _GIB
_COUNTED_SINCE, _COUNTED_BEFORE = (0, 8), (0, 9, 2)
_MEMORY_SPREAD = 0.003  # difference between boards of one name, as a share of their memory
_RUNTIME_SPREAD = 0.3  # uncertainty of activations and non-torch memory, as a fraction of this memory
_SHARE_DIGITS = 6  # digits of the utilization; the last one is less than a block of 16 tokens on a GPU of 200 GiB
_MXFP4_MULTIPLE = 256  # kernels pad the hidden size of mxfp4 experts to a multiple of this


class KvCapacity(NamedTuple):
    """The memory of the fullest device of a deployment, in bytes.

    Attributes:
        total: memory of the device
        utilization: share of `total` that may be used
        weights: size of the weights and the table of rotary embeddings
        forward: activations of the largest step: `max_num_batched_tokens` through a layer
        sampler: memory of sampling for `max_num_seqs` rows; a profile run sees the larger of `forward` and `sampler`
        non_torch: memory of libraries, workspaces and communication, and what else the release counts
        graphs: memory set aside for CUDA graphs
        block: size of one KV block, summed over the layers that share it; 0 if the model keeps no KV
        adapters: memory of the slots for LoRA adapters
        encoder: weights of the encoder of images and videos, and the encoder cache
        pages: number of blocks that the scheduler counts as one; above 1 only if it treats groups of layers as one
    """

    total: int
    utilization: float
    weights: int
    forward: int
    sampler: int
    non_torch: int
    graphs: int
    block: int
    pages: int = 1
    adapters: int = 0
    encoder: int = 0

    @property
    def activations(self) -> int:
        """The maximum that a profile run allocates: sampling reuses the memory that the step has freed."""
        return max(self.forward, self.sampler)

    @property
    def left(self) -> int:
        """The bytes that are left for KV; may be negative."""
        budget = int(self.total * self.utilization)
        beside = self.weights + self.adapters + self.encoder
        return budget - beside - self.activations - self.non_torch - self.graphs

    @property
    def num_blocks(self) -> int:
        """The number of blocks, including the null block, as in `SchedulerConfig.num_blocks`."""
        return self._blocks(self.left)

    @property
    def interval(self) -> tuple[int, int]:
        """The minimum and maximum number of blocks, from the spread of boards and of logged memory."""
        spread = int(_MEMORY_SPREAD * self.total + _RUNTIME_SPREAD * (self.activations + self.non_torch))
        return self._blocks(self.left - spread), self._blocks(self.left + spread)

    def _blocks(self, left: int) -> int:
        if not self.block:  # no request needs one, so the least that a scheduler can have
            return LEAST_BLOCKS if left >= 0 else 0
        return max(left, 0) // (self.block * self.pages)

    def explain(self) -> list[tuple[str, float]]:
        """Return the terms of the calculation in GiB; a term that takes memory is negative."""
        parts = [
            (f"memory x {self.utilization:g}", self.total * self.utilization),
            ("weights", -self.weights),
            *([("adapters", -self.adapters)] if self.adapters else []),
            *([("encoder", -self.encoder)] if self.encoder else []),
            ("activations of a step" if self.forward >= self.sampler else "activations of sampling", -self.activations),
            ("libraries and communication", -self.non_torch),
            ("CUDA graphs", -self.graphs),
            ("left for KV", self.left),
        ]
        return [(what, value / _GIB) for what, value in parts]

    def check(self, deployment: Deployment) -> None:
        """Raise UserError if there are too few blocks for one request of `max_model_len` and the null block."""
        config = deployment.scheduler
        need = most_held(config, config.max_model_len) + 1
        if self.num_blocks < need:
            # A smaller `max_num_seqs` is only suggested if there is some room: otherwise it would only allow one
            # longest request at a time.
            frugal = self.num_blocks > 0 and self._blocks(self.left + self.activations - self.forward) >= need
            remedy = "lower max_num_seqs, or " if frugal else ""
            raise UserError(
                "gpu",
                shown_gib(self.total),
                f"has room for {self.num_blocks:,} KV blocks beside {self._weights_and_adapters}; a "
                f"request of {config.max_model_len} tokens needs {need}: {remedy}use more or larger devices, or "
                "quantisation",
            )

    @property
    def _weights_and_adapters(self) -> str:
        adapters = f" and {shown_gib(self.adapters)} of adapters" if self.adapters else ""
        encoder = f" and {shown_gib(self.encoder)} of the encoder" if self.encoder else ""
        return f"{shown_gib(self.weights)} of weights{adapters}{encoder}"

    def share_for(self, blocks: int) -> float:
        """Return the utilization, at most 1, that leaves room for exactly `blocks` blocks.

        The result has as few digits as possible.
        """
        beside = self.weights + self.adapters + self.encoder + self.activations + self.non_torch + self.graphs
        needed = (beside + blocks * self.block * self.pages) / self.total
        for digits in range(1, _SHARE_DIGITS + 1):
            share = min(math.ceil(needed * 10**digits) / 10**digits, 1.0)
            if self._replace(utilization=share).num_blocks == blocks:
                break
        return share

    def check_stated(self, blocks: int) -> None:
        """Raise UserError if the stated number of blocks, `blocks`, exceeds the memory beside weights and adapters."""
        page = self.block * self.pages or 1
        most = max(self.total - self.weights - self.adapters - self.encoder, 0) // page
        if blocks > most:
            raise UserError(
                "num_blocks",
                blocks,
                f"takes {shown_gib(blocks * page)} of KV beside {self._weights_and_adapters}, and "
                f"the device has {shown_gib(self.total)}, so {most:,} blocks at most; leave it out, and as many "
                "are taken as fit",
            )


def kv_capacity(model: ModelSpec, gpu: GpuSpec, deployment: Deployment, graph_bytes: int = 0) -> KvCapacity:
    """Return the memory of a device of `deployment`. With pipeline stages, it is of the stage with the fewest blocks.

    Blocks are counted for the groups of layers that `with_kv_groups` sets. `graph_bytes` is the estimate for CUDA
    graphs that vLLM sets aside from 0.21 on; in earlier releases, graphs took memory beyond `gpu_memory_utilization`.
    Raises UserError if heads or layers cannot be split.
    """
    tp = deployment.tensor_parallel_size
    check_heads(model, tp)
    check_format(model, deployment)
    check_linear_heads(model, tp)
    deployment = with_states(model, deployment)
    weights = stage_weight_bytes(model, deployment)
    layers = stage_models(model, deployment.pipeline_parallel_size)
    layouts = [_block_layout(layer, deployment) for layer in layers]
    speculative = deployment.scheduler.speculative
    draft: ModelSpec | None = None
    if speculative is not None and speculative.model is not None:
        draft = find_model(speculative.model)
        weights[-1] += weight_bytes(draft, deployment)
    elif speculative is not None and speculative.method == "mtp":
        draft = draft_module(model)
        joining = DTYPE_BYTES[deployment.dtype] * draft.join_parameters
        weights[-1] += int(_layer_bytes(draft, module_deployment(deployment)) + joining)
    if draft is not None:  # the draft's KV is in the same blocks, after the target's
        layouts[-1]["block"] += page_bytes(draft, deployment) * draft.num_layers // layouts[-1].get("pages", 1)
    forward, last = _forward_bytes(model, deployment), len(layers) - 1
    received = 2 * DTYPE_BYTES[deployment.dtype] * model.hidden_size * deployment.scheduler.max_num_batched_tokens
    stages = [
        KvCapacity(
            total=gpu.memory_bytes,
            utilization=deployment.gpu_memory_utilization or UTILIZATION,
            weights=weights[stage],
            forward=forward + (int(received) if stage else 0),
            sampler=_sampler_bytes(model, deployment) if stage == last else 0,
            non_torch=_non_torch_bytes(gpu, deployment),
            graphs=graph_bytes,
            adapters=_adapter_bytes(model, deployment),
            encoder=_encoder_bytes(model, deployment),
            **layouts[stage],
        )
        for stage in range(len(layers))
    ]
    return min(stages, key=lambda stage: (stage.num_blocks, stage.left / max(stage.block, 1)))


def _adapter_bytes(model: ModelSpec, deployment: Deployment) -> int:
    """Return the bytes of all slots for adapters on one device, which an engine with pipeline stages cannot have."""
    lora = deployment.lora
    if lora is None:
        return 0
    elements = slot_elements(model, lora, deployment.tensor_parallel_size)
    return int(lora.max_loras * DTYPE_BYTES[deployment.dtype] * elements)


def check_encoder(model: ModelSpec, gpu: GpuSpec, deployment: Deployment) -> None:
    """Raise UserError if `gpu` has too little memory for the encoder of an engine that only encodes."""
    needed = _encoder_bytes(model, deployment)
    if needed > gpu.memory_bytes:
        remedy = f"has less memory than the {shown_gib(needed)} of the encoder and its cache; choose another"
        raise UserError("gpu", gpu.name, remedy)


def _encoder_bytes(model: ModelSpec, deployment: Deployment) -> int:
    """Return the bytes of the encoder's weights and of the full encoder cache on one device; 0 without a known tower.

    The cache holds embeddings of the model's hidden size, on each device of a tensor-parallel group.
    """
    multimodal = deployment.multimodal
    tower = find_tower(deployment.model, multimodal) if multimodal is not None else None
    if multimodal is None or tower is None:
        return 0
    split = multimodal.mm_encoder_tp_mode == "weights"
    weights = tower.parameters(model.hidden_size, deployment.tensor_parallel_size if split else 1)
    cached = deployment.staged_settings.encoder_cache_size or 0
    return int(DTYPE_BYTES[deployment.dtype] * (weights + cached * model.hidden_size * tower.width))


def weight_bytes(model: ModelSpec, deployment: Deployment) -> int:
    """Return the bytes of weights on one device of the fullest stage; see `stage_weight_bytes`."""
    return max(stage_weight_bytes(model, deployment))


def engine_weight_bytes(deployment: Deployment) -> int:
    """Return the bytes of weights on all devices of an engine that is not data-parallel.

    Raises UserError if the deployment's model is not known.
    """
    stages = stage_weight_bytes(find_model(deployment.model), deployment)
    return deployment.tensor_parallel_size * deployment.prefill_context_parallel_size * sum(stages)


def stage_weight_bytes(model: ModelSpec, deployment: Deployment) -> list[int]:
    """Return the bytes of weights on one device of each pipeline stage, with the table of rotary embeddings.

    The embedding is on the first stage; the last norm and the head are on the last stage. If embedding and head are
    tied, the last stage has a copy of the embedding. A model for pooling has no head. Embedding and head stay in
    `dtype`.
    """
    stages = stage_models(model, deployment.pipeline_parallel_size)
    tp, plain = deployment.tensor_parallel_size, DTYPE_BYTES[deployment.dtype]
    rotary = plain * model.max_positions * model.head_dim * model.rotary_share
    norm, matrix = model.hidden_size, model.vocab_size * model.hidden_size / tp
    ends = [0.0] * len(stages)
    ends[0] += matrix
    headless = model.pooling or (model.tied_embeddings and len(stages) == 1)
    ends[-1] += norm + (0.0 if headless else matrix)
    return [
        int(_layer_bytes(layers, deployment) + plain * end + rotary) for layers, end in zip(stages, ends, strict=True)
    ]


def _layer_bytes(model: ModelSpec, deployment: Deployment) -> float:
    """Return the bytes of the weights of all layers, on one device.

    Norms and routers stay in `dtype`. KV projections are repeated if there are fewer KV heads than devices. Experts are
    spread over all tensor-parallel groups of a stage.
    """
    tp, hidden = deployment.tensor_parallel_size, model.hidden_size
    plain, sparse = DTYPE_BYTES[deployment.dtype], model.moe_layers
    mxfp4 = weights_dtype(model, deployment) == "mxfp4"
    padded = -(-hidden // _MXFP4_MULTIPLE) * _MXFP4_MULTIPLE / hidden if mxfp4 else 1

    def taken(projection: str, weights: float, layers: int) -> float:
        return weights * sum(part.layers * part.width for part in stored(model, deployment, projection, layers))

    def mlp(which: str, intermediate_size: int, layers: int) -> float:
        down = hidden * intermediate_size
        gate_and_up = model.mlp_parameters(intermediate_size) - down
        return taken(f"{which}gate and up", gate_and_up / tp, layers) + taken(f"{which}down", down / tp, layers)

    repeated = max(tp // model.num_kv_heads, 1) - 1
    keys_and_values = 2 * hidden * model.num_kv_heads * model.head_dim
    own, shared, expanding = model.attention_parameters + repeated * keys_and_values, 0, 0.0
    # decode needs the expansion matrices in 16 bits, so quantised weights have a second copy
    if model.latent is not None:
        own, shared = model.attention_parameters, model.latent.shared_parameters(hidden)
        quantised = [part for part in stored(model, deployment, "qkv", model.kv_layers) if part.width != plain]
        copies = sum(part.layers for part in quantised)
        expanding = plain * copies * model.latent.expansion_parameters(model.num_heads) / tp
    out = model.attention_out_parameters
    linear_out = hidden * model.linear.value_dim if model.linear is not None else 0
    return (
        taken("qkv", shared + (own - shared - out) / tp, model.kv_layers)
        + taken("attention out", out / tp, model.kv_layers)
        + taken("linear in", (model.linear_parameters - linear_out) / tp, model.linear_layers)
        + taken("linear out", linear_out / tp, model.linear_layers)
        + expanding
        + plain * (2 * hidden * model.num_layers + model.plain_parameters)
        + taken(
            "experts",
            model.num_experts * model.expert_parameters * padded / deployment.expert_gpus,
            sparse,
        )
        + plain * model.router_parameters * sparse
        + (mlp("shared ", model.shared_intermediate_size, sparse) if model.shared_intermediate_size else 0.0)
        + mlp("", model.intermediate_size, model.num_layers - sparse)
    )


def _forward_bytes(model: ModelSpec, deployment: Deployment) -> int:
    """Return the maximum bytes of activations during a layer, for all tokens of the largest step.

    Four hidden states are always kept (residual, input, normed, output), two of them with all residual streams. In
    addition a dense MLP holds gate, up and their product, routed experts hold a row for each expert of a token, and
    attention holds Q, K, V and its output.
    """
    tp, tokens = deployment.tensor_parallel_size, deployment.scheduler.max_num_batched_tokens
    tokens = -(-tokens // deployment.prefill_context_parallel_size)
    ranks = deployment.expert_gpus // tp
    widths = [2 * (model.num_heads + model.num_kv_heads) * model.head_dim / tp]
    if model.latent is not None:
        widths = [2 * model.num_heads * (model.head_dim + model.latent.v_head_dim) / tp]
    if model.linear is not None:
        widths.append(2 * (model.linear.conv_dim + model.linear.value_dim) / tp)
    if model.moe_layers < model.num_layers:
        widths.append(3 * model.intermediate_size / tp)
    if model.moe_layers:
        inter = model.moe_intermediate_size / (1 if deployment.enable_expert_parallel else tp * ranks)
        # DeepEP sends a row only to its experts; otherwise every device gets the rows of all ranks
        spread = 1 / tp if deployment.all2all_backend.startswith("deepep") else ranks
        routed = spread * model.experts_per_token * (max(2 * inter, model.hidden_size) + inter)
        widths.append(routed + 3 * model.shared_intermediate_size / tp)
    return int(
        DTYPE_BYTES[deployment.dtype] * tokens * ((2 + 2 * model.residual_streams) * model.hidden_size + max(widths))
    )


def _sampler_bytes(model: ModelSpec, deployment: Deployment) -> int:
    config = deployment.scheduler
    if model.pooling:
        return 0
    return int(_SAMPLER_BYTES * min(config.max_num_seqs, config.max_num_batched_tokens) * model.vocab_size)


def _non_torch_bytes(gpu: GpuSpec, deployment: Deployment) -> int:
    """Return the bytes that torch did not allocate and that the engine's release counts."""
    engine = deployment.engine_name
    counts_all = engine.name == "vllm" and _COUNTED_SINCE <= (engine.numbers or ()) < _COUNTED_BEFORE
    bytes_of_one = _NON_TORCH + (_COUNTED_TOO if counts_all else 0.0)
    if deployment.gpus == 1:
        return int(bytes_of_one)
    return int(bytes_of_one + (_OVER_NVLINK if gpu.link_bytes_per_s > gpu.pcie_bytes_per_s else _OVER_PCIE))


def _block_layout(model: ModelSpec, deployment: Deployment) -> dict[str, int]:
    """Return `block` and `pages` of `KvCapacity` for the layers of `model`."""
    if model.bidirectional:
        return {"block": 0}
    page = page_bytes(model, deployment)
    full = model.full_layers
    if model.linear is not None:
        return {"block": page * layers_of_a_group(model)}
    if not model.sliding_layers or not full:
        return {"block": page * model.num_layers}
    layers = layers_of_a_group(model)
    return {"block": page * layers, "pages": 1 if kv_groups(model, deployment) else -(-full // layers)}
