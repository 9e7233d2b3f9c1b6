"""The share of a device's peak that a step uses: MFU and MBU, from the model's shapes and a datasheet, on either clock.

The work counted is the model's, not the kernels': padding, recomputed scores and activations in memory count as lost
utilisation. FLOPs are 2 for each weight that a token meets and 4 x heads x head size for each query-key pair (Chowdhery
et al., "PaLM", 2022, appendix B, without the backward pass). Bytes are the weights, read once a step, and the KV that
its rows attend to or write (Agarwal et al., "LLM Inference Performance Engineering: Best Practices", Databricks 2023).
Left out: a draft model, states of linear attention, norms, the embedding's rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from serving.deployments.attention import SPARSE, CompressedAttention
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import GpuSpec, gpus
from serving.deployments.kv_layout import kv_dtype
from serving.deployments.model_catalogue import find_model
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import DTYPE_BYTES, stored, weights_dtype
from serving.errors import UserError
from traces.numeric_columns import Floats, known_or_zero, numbers
from traces.recording_notes import notes_of

FLOPS_OF = ["prefill_tokens", "prefill_pairs", "decode_rows", "decode_context", "sampled_rows", "draft_tokens"]
BYTES_OF = ["prefill_rows", "prefill_tokens", "prefill_context", "decode_rows", "decode_context", "draft_tokens"]
_OUR_NAMES = {"smollm2": "SmolLM2-135M"}  # names of the real engine for models of the catalogue


class StepWork:
    """The work of the steps of one engine, and the peak of all its GPUs together.

    Attributes:
        flop_per_s, bytes_per_s: datasheet peaks, of dense GEMMs in the type of the weights and of memory
    """

    def __init__(self, model: ModelSpec, deployment: Deployment, gpu: GpuSpec) -> None:
        self._model, self._deployment = model, deployment
        self.flop_per_s = deployment.gpus * gpu.flop_per_s(weights_dtype(model, deployment))
        self.bytes_per_s = deployment.gpus * gpu.memory_bytes_per_s

    @classmethod
    def from_run(cls, run: Mapping[str, Any], peak: GpuSpec | None = None) -> StepWork | None:
        """Return the work of a row of `runs`, against `peak` or else the GPU that it ran on or that timed it.

        None if the GPU or the model is not known, as on a CPU, and for a fleet whose pools are not all alike.
        """
        gpu = peak or _gpu_of(run)
        if gpu is None:
            return None
        try:
            deployment = Deployment.model_validate_json(run["deployment"] or "")
            model = find_model(_OUR_NAMES.get(deployment.model, deployment.model))
        except (UserError, ValueError):
            return None
        pools = deployment.fleet.pools if deployment.fleet else ()
        return None if any(pool.deployment or pool.gpu for pool in pools) else cls(model, deployment, gpu)

    def flops(self, steps: pa.Table) -> Floats:
        """Return the FLOPs of each step, over all devices."""
        model, ranks = self._model, self._deployment.data_parallel_size
        head = model.vocab_size * model.hidden_size
        body = model.active_parameters - model.embedding_parameters
        rows, drafts = numbers(steps, "decode_rows"), known_or_zero(steps, "draft_tokens")
        tokens = numbers(steps, "prefill_tokens") + rows + drafts
        queries = 1 + drafts / np.maximum(rows, 1)
        seen = (numbers(steps, "decode_context") + rows) * queries
        prompts, pairs = numbers(steps, "prefill_tokens"), numbers(steps, "prefill_pairs")
        attended = model.full_layers * _clipped(model, seen, rows * queries, pairs, prompts)
        if model.sliding_layers:
            window = float(model.sliding_window)
            attended += model.sliding_layers * (
                np.minimum(seen, rows * queries * window) + np.minimum(pairs, prompts * window)
            )
        if isinstance(latent := model.latent, CompressedAttention):
            layers_by_ratio = zip(*np.unique(latent.compress_ratios, return_counts=True), strict=True)
            attended = sum(
                count
                * (attended_pairs(latent, ratio, seen, rows * queries) + attended_pairs(latent, ratio, pairs, prompts))
                for ratio, count in layers_by_ratio
            )
        per_pair = 4 * model.num_heads * model.head_dim
        if model.latent is not None:
            per_pair = 2 * model.num_heads * (model.latent.qk_head_dim + model.latent.v_head_dim)
        logits = numbers(steps, "sampled_rows") + drafts
        return np.asarray(ranks * (2.0 * body * tokens + 2.0 * head * logits + per_pair * attended))

    def moved_bytes(self, steps: pa.Table) -> Floats:
        """Return the bytes of memory that each step reads and writes, over all devices."""
        model, deployment = self._model, self._deployment
        ranks = deployment.data_parallel_size
        rows, drafts = numbers(steps, "decode_rows"), known_or_zero(steps, "draft_tokens")
        tokens = numbers(steps, "prefill_tokens") + rows + drafts
        past = numbers(steps, "prefill_context") + numbers(steps, "decode_context")
        everywhere = model.kv_bytes_per_token(int(DTYPE_BYTES[kv_dtype(deployment)]))
        kv = everywhere * (past + tokens)
        if model.sliding_layers:
            share = model.sliding_layers / model.kv_layers
            requests = numbers(steps, "prefill_rows") + rows
            within = np.minimum(past, requests * model.sliding_window) + tokens
            kv = kv * (1 - share) + share * everywhere * within
        weights = ranks * self._taken("qkv", model.attention_parameters, model.kv_layers)
        weights += ranks * self._taken("linear in", model.linear_parameters, model.linear_layers)
        dense = model.num_layers - model.moe_layers
        weights += ranks * self._taken("gate and up", model.mlp_parameters(model.intermediate_size), dense)
        weights += ranks * DTYPE_BYTES[deployment.dtype] * model.vocab_size * model.hidden_size
        if model.moe_layers:
            shared = model.mlp_parameters(model.shared_intermediate_size) if model.shared_intermediate_size else 0
            weights += ranks * self._taken("shared gate and up", shared, model.moe_layers)
            touched = 1 - (1 - model.experts_per_token / model.num_experts) ** (ranks * tokens)
            experts = self._taken("experts", model.num_experts * model.expert_parameters, model.moe_layers)
            return np.asarray(weights + experts * touched + ranks * kv)
        return np.asarray(weights + ranks * kv)

    def _taken(self, projection: str, parameters: int, layers: int) -> float:
        """Return the bytes of a layer's `parameters` in `layers` layers, in the types that they are stored in."""
        kept = stored(self._model, self._deployment, projection, layers)
        return parameters * sum(part.layers * part.width for part in kept)


def _clipped(model: ModelSpec, seen: Floats, queries: Floats, pairs: Floats, prompts: Floats) -> Floats:
    """Return the query-key pairs of a layer of full attention, which an indexer bounds."""
    most = float(model.latent.index_topk) if model.latent is not None else 0.0
    return np.minimum(seen, queries * most) + np.minimum(pairs, prompts * most) if most else seen + pairs


def attended_pairs(latent: CompressedAttention, ratio: int, pairs: Any, queries: Any) -> Any:
    """Return the query-key pairs of a layer of compressed attention with this compression ratio.

    `pairs` are the pairs of `queries` with all tokens before them. A query attends to the tokens in the window and to
    entries of `ratio` tokens; a sparse layer's indexer chooses some of these entries.
    """
    within = np.minimum(pairs, queries * float(latent.sliding_window))
    if not ratio:
        return within
    return within + np.minimum(pairs / ratio, queries * float(latent.index_topk) if ratio == SPARSE else np.inf)


def _gpu_of(run: Mapping[str, Any]) -> GpuSpec | None:
    """Return the catalogued GPU that timed a simulated run, or the one whose name fits CUDA's name of a real device."""
    if run["clock"] == "virtual":
        return gpus().get(str(notes_of(run).get("gpu")))
    device = str(json.loads(run["hardware"] or "{}").get("gpu", ""))
    fitting = [name for name in gpus() if all(re.search(rf"\b{part}b?\b", device, re.I) for part in name.split("-"))]
    return gpus()[max(fitting, key=len)] if fitting else None
