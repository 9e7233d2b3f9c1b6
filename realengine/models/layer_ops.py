"""The interface of the small operations between GEMMs and attention, and their implementation in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, silu

from tokentwin.realengine import sampling
from tokentwin.realengine.attention.kv_cache import LayerKv, write
from tokentwin.realengine.models.linear import DenseProjection, Fp8Rows, PackedWeight, Projection, StoredWeight, stacked
from tokentwin.realengine.step_input import Batch
from tokentwin.serving.deployments.model_spec import ModelSpec


class Rope:
    """The cosines and sines `[max_positions, head_dim / 2]` of RoPE in float32, and the layout of pairs in a head.

    If `rope_interleaved`, dimension 2i is paired with 2i+1; otherwise i is paired with i + head_dim/2.
    """

    def __init__(self, spec: ModelSpec, positions: int, device: torch.device) -> None:
        frequencies = _frequencies(spec).to(device)
        angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        self.interleaved = spec.rope_interleaved

    def cosines_and_sines(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for `positions` `[T]`, each `[T, 1, head_dim / 2]`."""
        return self.cos[positions, None], self.sin[positions, None]

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate `x` `[T, heads, head_dim]`."""
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _frequencies(spec: ModelSpec) -> torch.Tensor:
    """Return inverse frequencies `[head_dim / 2]`; Llama 3.1's scaling stretches long wavelengths by `factor`."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponent
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    wavelength = 2 * math.pi / frequencies
    long = scaling.original_max_positions / scaling.low_freq_factor
    short = scaling.original_max_positions / scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelength > long, frequencies / scaling.factor, frequencies)
    return torch.where((wavelength <= long) & (wavelength >= short), blended, scaled)


class HeadNorms(NamedTuple):
    """RMSNorm weights `[head_dim]` of queries and keys, for models that normalise them."""

    query: torch.Tensor
    key: torch.Tensor


class Routing(NamedTuple):
    """The assignment of tokens to experts.

    Attributes:
        choices: `[T * k]` choices of all tokens, sorted by expert; choice n of a token is `token * k + n`
        offsets: `[experts + 1]` int32: index of the first choice of each expert of this rank; other choices belong to
            other ranks
        shares: `[T, k]` float32: the weight of each choice
    """

    choices: torch.Tensor
    offsets: torch.Tensor
    shares: torch.Tensor


class Scores(NamedTuple):
    """What a router computes for `[T]` tokens, and the experts `own` of this rank.

    Attributes:
        logits: `[T, experts]`
        bias: `[experts]` float32: scores are then sigmoids, and experts are chosen by score plus bias (DeepSeek-V3);
            None: scores are softmaxes
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    own: range


class LayerOps:
    """A reference, for any torch device, of a decoder layer's operations other than GEMMs and attention.

    `spec` is one rank's share of the model.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def packed(self, weight: PackedWeight, dtype: torch.dtype, bias: torch.Tensor | None) -> Projection:
        """Return a projection with packed integer weights, for activations of `dtype`."""
        return DenseProjection(weight.dense(dtype), bias)

    def expert_weights(self, weights: Iterable[StoredWeight], count: int, dtype: torch.dtype) -> Any:
        """Return the weights of one linear layer of `count` experts in the form that `experts` takes.

        All must be stored in the same way. Activations have the type `dtype`.
        """
        return stacked((w if isinstance(w, torch.Tensor) else w.dense(dtype) for w in weights), count)

    def rotation(self, rope: Rope, batch: Batch) -> Any:
        """Return what `rope_store` needs to rotate this step's tokens; it is the same for every layer."""
        return rope, *rope.cosines_and_sines(batch.positions), batch.slots.long()

    def rope_store(
        self, qkv: torch.Tensor, rotation: Any, norms: HeadNorms | None, kv: LayerKv, batch: Batch
    ) -> torch.Tensor:
        """Normalise and rotate the heads of `qkv` `[T, (heads + 2 * kv_heads) * head_dim]`, and store keys and values.

        Keys and values go into `kv` at the batch's slots; the queries `[T, heads, head_dim]` are returned.
        """
        spec = self._spec
        rope, cos, sin, slots = rotation
        cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        queries, keys, values = qkv.view(len(qkv), sum(heads), spec.head_dim).split(heads, dim=1)
        if norms is not None:
            queries, keys = self._normalise(queries, norms.query), self._normalise(keys, norms.key)
        write(kv, slots, rope.rotate(keys, cos, sin), values)
        return rope.rotate(queries, cos, sin)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, fp8: bool = False) -> Any:
        """Return the RMSNorm of `x`, or of `residual + x`, which is then stored in `residual`; all `[T, hidden]`.

        If `fp8`, the result is an `Fp8Rows`.
        """
        normed = self._normalise(x if residual is None else residual.add_(x), weight)
        return Fp8Rows.from_tensor(normed) if fp8 else normed

    def silu_mul(self, gate_up: torch.Tensor, fp8: bool = False) -> Any:
        """Return SwiGLU's product: `[T, 2 * n]` to `[T, n]`; if `fp8`, the result is an `Fp8Rows`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return Fp8Rows.from_tensor(silu(gate) * up) if fp8 else silu(gate) * up

    def route(self, scores: Scores) -> tuple[torch.Tensor, Routing]:
        """Return the experts `[T, k]` of each token, and the routing.

        Mixtral's softmax over the best k experts equals the softmax over all experts, normalised to the best k.
        """
        spec, bias, logits = self._spec, scores.bias, scores.logits.float()
        values = logits.softmax(-1) if bias is None else logits.sigmoid()
        ranked = values if bias is None else values + bias
        if spec.expert_groups:
            ranked = self._within_groups(ranked, 1 if bias is None else 2)
        chosen = ranked.topk(spec.experts_per_token).indices
        shares = values.gather(1, chosen)
        if spec.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        ordered, choices = chosen.flatten().sort(stable=True)
        bounds = torch.arange(scores.own.start, scores.own.stop + 1, device=logits.device)
        offsets = torch.searchsorted(ordered, bounds, out_int32=True)
        factor = spec.routed_scaling_factor
        return chosen, Routing(choices, offsets, shares if factor == 1 else shares * factor)

    def _within_groups(self, ranked: torch.Tensor, best_of: int) -> torch.Tensor:
        """Set scores outside the best groups to -inf.

        A group is ranked by the sum of its `best_of` best experts: two in DeepSeek-V3, one in V2.
        """
        groups = ranked.unflatten(1, (self._spec.expert_groups, -1))
        best = groups.topk(best_of).values.sum(-1).topk(self._spec.groups_per_token).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(outside[..., None], -torch.inf).flatten(1)

    def experts(self, x: torch.Tensor, gate_up: Any, down: Any, routing: Routing) -> torch.Tensor:
        """Return the weighted sum of the answers of each token's experts, by `routing`, for `x` `[T, hidden]`.

        Args:
            gate_up: `expert_weights` of layers `[2 * n, hidden]`
            down: `expert_weights` of layers `[hidden, n]`
        """
        out, shares = torch.zeros_like(x), routing.shares.to(x.dtype).flatten()
        topk = routing.shares.shape[1]
        for expert, (first, end) in enumerate(pairwise(routing.offsets.tolist())):
            if first < end:
                chosen = routing.choices[first:end]
                tokens = chosen // topk
                answer = linear(self.silu_mul(linear(x[tokens], gate_up[expert])), down[expert])
                out.index_add_(0, tokens, answer * shares[chosen, None])
        return out

    def mask(self, logits: torch.Tensor, samples: torch.Tensor, bits: torch.Tensor) -> None:
        """Set the logits `[S, vocab]` of forbidden tokens to -inf, in place.

        `samples` and `bits` are the fields of `TokenMasks`.
        """
        tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        forbidden = (bits[:, tokens // 32] >> (tokens % 32)) & 1 == 0
        rows = samples.long()
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

    def sample(self, logits: torch.Tensor, batch: Batch, greedy: bool) -> torch.Tensor:
        """Return a token `[S]`, int32, for each row of `logits` `[S, vocab]`; `greedy` if no row draws."""
        if greedy:
            return logits.argmax(-1).int()
        return sampling.draw(logits, batch.temperature, batch.top_k, batch.top_p, batch.uniform)

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weight, self._spec.norm_eps)
