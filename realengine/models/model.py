"""Decoders of the Llama family: RMSNorm, RoPE, grouped-query attention, and SwiGLU MLPs or mixtures of experts.

One class serves Llama, Qwen2, Qwen3, Mistral, SmolLM and the MoE families of `tokentwin.realengine.models.mlp`. A
`ModelSpec` states whether QKV has a bias, whether queries and keys are normalised, whether the embedding is also the
head, and which layers have how many experts. Query, key and value are one GEMM, and so are gate and up. The same class
is also one rank of a tensor-parallel group: it has a share of the model's weights, and each layer has two sums over the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
from torch.nn.functional import embedding

from tokentwin.realengine.attention.backend import Attention
from tokentwin.realengine.attention.kv_cache import KvCache
from tokentwin.realengine.devices.device import OpTimes
from tokentwin.realengine.models.layer_ops import HeadNorms, LayerOps, Rope
from tokentwin.realengine.models.linear import DenseProjection, Projection, StoredWeight
from tokentwin.realengine.models.lora_slots import LoraSlots
from tokentwin.realengine.models.mlp import DenseMlp, Mixture
from tokentwin.realengine.models.weight_loader import WeightLoader
from tokentwin.realengine.parallel.tensor_parallel import Collective
from tokentwin.realengine.step_input import Batch
from tokentwin.serving.deployments.model_spec import ModelSpec

_PIECE_ROWS = 4


class Layer:
    """The weights of one decoder layer, taken out of `weights` by their Hugging Face names.

    `own` are this rank's experts.
    """

    def __init__(self, spec: ModelSpec, weights: WeightLoader, index: int, own: range) -> None:
        def get(name: str) -> torch.Tensor:
            return weights.take(f"model.layers.{index}.{name}")

        def projection(*names: str, bias: bool = False) -> Projection:
            return weights.projection([f"model.layers.{index}.{name}" for name in names], bias)

        self.qkv = projection(*(f"self_attn.{p}_proj" for p in "qkv"), bias=spec.qkv_bias)
        self.out = projection("self_attn.o_proj")
        self.mlp: Mixture | DenseMlp
        if spec.num_experts and index not in spec.dense_at:
            self.mlp = Mixture(spec, weights, index, own)
        else:
            self.mlp = DenseMlp(weights, *(f"model.layers.{index}.mlp.{part}_proj" for part in ("gate", "up", "down")))
        self.head_norms = (
            HeadNorms(get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")) if spec.qk_norm else None
        )
        self.kv_scales = weights.kv_scales(index)
        self.attention_norm = get("input_layernorm.weight")
        self.mlp_norm = get("post_attention_layernorm.weight")


class Model:
    """A decoder, or one rank's share of it; `forward` runs one step of a continuous batch.

    Attributes:
        spec: shape of one rank's share of the model: its heads, its slice of the MLP; `vocab_size` is the whole
            vocabulary
        state: weights of that rank; they are removed from it as they are loaded
        own: experts of the rank; None for all experts
        slots: slots for LoRA adapters, which the model's projections add to; None without adapters
        quantization: type to which 16-bit weights are rounded, as `Deployment` names it

    `expert_tokens` `[moe_layers, num_experts]`, int32, is the number of tokens that each expert got in the last step;
    None in a dense model. The dummy request's tokens do not count.
    """

    def __init__(
        self,
        spec: ModelSpec,
        state: dict[str, StoredWeight],
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps,
        attention: Attention,
        *,
        quantization: str = "none",
        collective: Collective | None = None,
        own: range | None = None,
        slots: LoraSlots | None = None,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.ops = ops
        self.attention = attention
        self._collective = collective or Collective()
        weights = WeightLoader(spec, state, dtype, device, ops, quantization, slots)
        experts = own or range(spec.num_experts)
        self._layers = [Layer(spec, weights, index, experts) for index in range(spec.num_layers)]
        shape = (spec.moe_layers, spec.num_experts)
        self.expert_tokens = torch.zeros(shape, dtype=torch.int32, device=device) if spec.moe_layers else None
        self._embedding = weights.take("model.embed_tokens.weight")
        head = self._embedding if spec.tied_embeddings else weights.take("lm_head.weight")
        self._head = DenseProjection(_share_of_head(head, self._collective))
        self._norm = weights.take("model.norm.weight")
        self.rope = Rope(spec, spec.max_positions, device)

    @property
    def kv_scales(self) -> list[tuple[float, float]]:
        """The scales of each layer's keys and values in an FP8 cache; keys and values are divided by them."""
        return [layer.kv_scales for layer in self._layers]

    def piece(self) -> Callable[[], object]:
        """Return a function that runs a fixed piece of a step's work, which depends on no request.

        It runs the MLP of one layer, and that of the next layer at each further call.
        """
        rows = self._embedding[:_PIECE_ROWS]
        layers = cycle(self._layers)

        @torch.inference_mode()
        def run() -> torch.Tensor:
            return next(layers).mlp(rows, self.ops, OpTimes())

        return run

    def forward(
        self, tokens: torch.Tensor, batch: Batch, kv: KvCache, times: OpTimes | None = None, every: bool = False
    ) -> torch.Tensor:
        """Return hidden states `[S, hidden]` at the positions to sample after, and write this step's KV into `kv`.

        If `every`, return those of all tokens, `[T, hidden]`.

        Args:
            tokens: `[T]` token ids, none of which is a placeholder for a token that the host has not seen

        Each layer writes its KV before it reads any, because rows of one step may share prefix blocks.
        """
        times = times or OpTimes()
        ops, join = self.ops, self._collective
        with times("embedding"):
            hidden = embedding(tokens, self._embedding)
            views = [batch.for_group(table) for table in kv.tables]
            rotations = [ops.rotation(self.rope, view) for view in views]
            plans = [self.attention.plan(view, window) for view, window in zip(views, kv.windows, strict=True)]
        mlp: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            cache, kind = kv.layer(index), kv.kind_of[index]
            with times("norm"):
                x, residual = (hidden, None) if mlp is None else (mlp, hidden)
                normed = ops.add_norm(x, residual, layer.attention_norm, layer.qkv.fp8)
            with times("qkv"):
                qkv = layer.qkv(normed)
            with times("rope_store"):
                queries = ops.rope_store(qkv, rotations[kind], layer.head_norms, cache, views[kind])
            with times("attention"):
                attended = self.attention.attend(queries, plans[kind], cache)
            with times("out"):
                attended = layer.out(attended.flatten(1))
            attended = join.sum(attended, times)
            with times("norm"):
                normed = ops.add_norm(attended, hidden, layer.mlp_norm, layer.mlp.fp8)
            mlp = join.sum(layer.mlp(normed, ops, times), times)
        if self.expert_tokens is not None:
            with times("expert_tokens"):
                self._count_experts(self.expert_tokens, batch.slots >= kv.block_size)
        assert mlp is not None  # the output of the last layer's MLP
        with times("norm"):
            if not (batch.layout.decodes_only or every):
                mlp, hidden = mlp[batch.sampled], hidden[batch.sampled]
            return ops.add_norm(mlp, hidden, self._norm)

    def compute_logits(self, hidden: torch.Tensor, times: OpTimes | None = None) -> torch.Tensor:
        """Return logits `[S, vocab]` of hidden states that `forward` returned."""
        times = times or OpTimes()
        with times("head"):
            logits = self._head(hidden)
        return self._collective.join(logits, times)[:, : self.spec.vocab_size]

    def _count_experts(self, counts: torch.Tensor, counted: torch.Tensor) -> None:
        """Count tokens by layer and expert into `counts`; `counted` `[T]` is True for tokens that count."""
        chosen = torch.stack([layer.mlp.chosen.flatten() for layer in self._layers if isinstance(layer.mlp, Mixture)])
        ones = counted.int().repeat_interleave(self.spec.experts_per_token).expand_as(chosen)
        counts.zero_().scatter_add_(1, chosen.long(), ones)


def _share_of_head(head: torch.Tensor, collective: Collective) -> torch.Tensor:
    """Return this rank's rows of the head, padded with zeros, because all ranks need equally many rows."""
    rows = -(-len(head) // collective.size)
    mine = head[collective.rank * rows : (collective.rank + 1) * rows]
    if len(mine) == rows:
        return mine
    return torch.cat([mine, mine.new_zeros(rows - len(mine), mine.shape[1])])
