"""Dense decoders of the Llama family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

One class serves Llama, Qwen2, Qwen3, Mistral and SmolLM: a `ModelSpec` says whether QKV has a bias, whether queries
and keys are normalised, and whether the embedding is also the head. QKV and gate-up are merged GEMMs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from realengine.attention import Attention
from realengine.batch import Batch
from realengine.kv_cache import KvCache
from realengine.rope import Rope
from serving.model_spec import ModelSpec


class Layer:
    """The weights of one decoder layer, from a state dict with Hugging Face names."""

    def __init__(self, spec: ModelSpec, state: Mapping[str, torch.Tensor], index: int) -> None:
        def get(name: str) -> torch.Tensor:
            return state[f"model.layers.{index}.{name}"]

        projections = [f"self_attn.{p}_proj" for p in "qkv"]
        self.qkv = torch.cat([get(f"{p}.weight") for p in projections])
        self.qkv_bias = torch.cat([get(f"{p}.bias") for p in projections]) if spec.qkv_bias else None
        self.query_norm = get("self_attn.q_norm.weight") if spec.qk_norm else None
        self.key_norm = get("self_attn.k_norm.weight") if spec.qk_norm else None
        self.out = get("self_attn.o_proj.weight")
        self.gate_up = torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
        self.down = get("mlp.down_proj.weight")
        self.attention_norm = get("input_layernorm.weight")
        self.mlp_norm = get("post_attention_layernorm.weight")


class Model:
    """A decoder whose `forward` runs one step of a continuous batch."""

    def __init__(
        self, spec: ModelSpec, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in state.items()}
        self._layers = [Layer(spec, state, index) for index in range(spec.num_layers)]
        self._embedding = state["model.embed_tokens.weight"]
        self._head = self._embedding if spec.tied_embeddings else state["lm_head.weight"]
        self._norm = state["model.norm.weight"]
        self._rope = Rope(spec, spec.max_positions, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvCache, attention: Attention) -> torch.Tensor:
        """Logits `[len(batch.sampled), vocab]`; writes this step's keys and values into `kv`.

        Each layer writes KV before it reads: rows of one step may share prefix blocks.
        """
        hidden = embedding(batch.tokens, self._embedding)
        cos, sin = self._rope.at(batch.positions, self.dtype)
        for index, layer in enumerate(self._layers):
            normed = self._normalise(hidden, layer.attention_norm)
            hidden = hidden + self._attend(index, layer, normed, cos, sin, batch, kv, attention)
            gate, up = linear(self._normalise(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        return linear(self._normalise(hidden[batch.sampled], self._norm), self._head)

    def _attend(
        self,
        index: int,
        layer: Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        kv: KvCache,
        attention: Attention,
    ) -> torch.Tensor:
        spec = self.spec
        tokens = hidden.shape[0]
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        merged = linear(hidden, layer.qkv, layer.qkv_bias).view(tokens, sum(heads), spec.head_dim)
        queries, keys, values = merged.split(heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._normalise(queries, layer.query_norm)
            keys = self._normalise(keys, layer.key_norm)
        kv.write(index, batch.slots, self._rope.rotate(keys, cos, sin), values)
        attended = attention.attend(index, self._rope.rotate(queries, cos, sin), batch, kv)
        return linear(attended.flatten(1), layer.out)

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)
