"""The metrics of the steps of a recorded run: one value per step, in the order of the table `steps`.

A run may have many steps, so columns are read in pieces, and at most two numbers per step are in memory.

MFU and MBU are the shares of a device's peak FLOPs and memory bandwidth that a step uses. They are computed from the
model's shapes and a datasheet, for real and for simulated runs. The counted work is that of the model and not of the
kernels: padding, recomputed scores and memory traffic of activations count as lost utilisation. FLOPs are 2 for each
weight that a token meets and 4 x heads x head size for each query-key pair (Chowdhery et al., "PaLM", 2022, appendix B,
without the backward pass). Bytes are the weights, which are read once per step, and the KV that the step's rows attend
to or write (Agarwal et al., "LLM Inference Performance Engineering: Best Practices", Databricks 2023). Draft models,
states of linear attention, norms and rows of the embedding are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.serving.deployments.attention import SPARSE, CompressedAttention
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec, gpus
from tokentwin.serving.deployments.kv_layout import kv_dtype
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES, stored, weights_dtype
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.power import GpuPower
from tokentwin.traces.recording import notes_of
from tokentwin.traces.tables import (
    Datasets,
    Distribution,
    Floats,
    MemoryTables,
    as_stored,
    known,
    known_or_zero,
    numbers,
    ratio,
    weighted_mean,
)

FLOPS_OF = ["prefill_tokens", "prefill_pairs", "decode_rows", "decode_context", "sampled_rows", "draft_tokens"]
BYTES_OF = ["prefill_rows", "prefill_tokens", "prefill_context", "decode_rows", "decode_context", "draft_tokens"]
_OUR_NAMES = {"smollm2": "SmolLM2-135M"}  # the real engine's name of a model -> name in the catalogue
STEP_METRICS = ("step_ms", "batch_tokens", "running", "waiting", "kv_usage", "kv_pressure", "mfu", "mbu")
_COLUMNS = {  # columns that each metric is computed from
    "step_ms": ["start_ns", "end_ns"],
    "batch_tokens": ["prefill_tokens", "decode_rows", "draft_tokens"],
    "running": ["running"],
    "waiting": ["waiting"],
    "kv_usage": ["used_blocks"],
    "kv_pressure": ["used_blocks", "waiting_blocks"],
    "mfu": FLOPS_OF,
    "mbu": BYTES_OF,
}
_RARE_COLUMNS = ["stages_ns", "draft_tokens", "longest_free_blocks"]  # columns that are null in all rows of most runs
_PIECE = 1 << 18  # number of steps at once, because memory for millions takes longer to touch than to sum


class StepWork:
    """The work of the steps of one engine, and the peak of all its GPUs together.

    Attributes:
        gpus: number of GPUs
        flop_per_s, bytes_per_s: datasheet peaks of dense GEMMs in the weights' number type, and of memory
        power: power of one GPU; None if it is not known
    """

    def __init__(self, model: ModelSpec, deployment: Deployment, gpu: GpuSpec) -> None:
        self._model, self._deployment = model, deployment
        self.gpus = deployment.gpus
        self.flop_per_s = deployment.gpus * gpu.flop_per_s(weights_dtype(model, deployment))
        self.bytes_per_s = deployment.gpus * gpu.memory_bytes_per_s
        self.power = GpuPower.from_gpu(gpu, deployment.power_limit_w)
        self._flop_per_s_in_16_bits = deployment.gpus * gpu.bf16_flop_per_s

    @classmethod
    def from_run(cls, run: Mapping[str, Any], peak: GpuSpec | None = None) -> StepWork | None:
        """Return the work of a row of `runs`, relative to the GPU `peak` or else the GPU of the run.

        The GPU of a simulated run is the one whose kernel times were used. The result is None if the GPU or the model
        is not known (as on a CPU), and for a fleet with different pools.
        """
        gpu = peak or _gpu_of(run)
        if gpu is None:
            return None
        try:
            deployment = Deployment.model_validate_json(run["deployment"] or "")
        except (UserError, ValueError):
            return None
        return cls.on(deployment, gpu)

    @classmethod
    def on(cls, deployment: Deployment, gpu: GpuSpec) -> StepWork | None:
        """Return the work of a deployment on `gpu`; None for an unknown model, and for a fleet with different pools."""
        pools = deployment.fleet.pools if deployment.fleet else ()
        try:
            model = find_model(_OUR_NAMES.get(deployment.model, deployment.model))
        except (UserError, ValueError):
            return None
        return None if any(pool.deployment or pool.gpu for pool in pools) else cls(model, deployment, gpu)

    def flops(self, steps: pa.Table) -> Floats:
        """Return the FLOPs of each step on all devices together."""
        model, ranks = self._model, self._deployment.data_parallel_size
        head = model.vocab_size * model.hidden_size
        body = model.active_parameters - model.embedding_parameters
        rows, drafts = numbers(steps, "decode_rows"), known_or_zero(steps, "draft_tokens")
        tokens = numbers(steps, "prefill_tokens") + rows + drafts
        queries = 1 + drafts / np.maximum(rows, 1)
        seen = (numbers(steps, "decode_context") + rows) * queries
        prompts, pairs = numbers(steps, "prefill_tokens"), numbers(steps, "prefill_pairs")
        if model.bidirectional:
            pairs = 2 * pairs - prompts
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
        """Return the bytes that each step reads and writes in the memory of all devices."""
        model, deployment = self._model, self._deployment
        ranks = deployment.data_parallel_size
        groups = ranks * deployment.prefill_context_parallel_size  # each reads all weights but experts
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
        weights = groups * self._taken("qkv", model.attention_parameters, model.kv_layers)
        weights += groups * self._taken("linear in", model.linear_parameters, model.linear_layers)
        dense = model.num_layers - model.moe_layers
        weights += groups * self._taken("gate and up", model.mlp_parameters(model.intermediate_size), dense)
        if not model.pooling:  # the LM head; a step reads few rows of the embedding
            weights += groups * DTYPE_BYTES[deployment.dtype] * model.vocab_size * model.hidden_size
        if model.moe_layers:
            shared = model.mlp_parameters(model.shared_intermediate_size) if model.shared_intermediate_size else 0
            weights += groups * self._taken("shared gate and up", shared, model.moe_layers)
            touched = 1 - (1 - model.experts_per_token / model.num_experts) ** (ranks * tokens)
            experts = self._taken("experts", model.num_experts * model.expert_parameters, model.moe_layers)
            return np.asarray(weights + experts * touched + ranks * kv)
        return np.asarray(weights + ranks * kv)

    def joules_beyond_idle(self, steps: pa.Table, seconds: Floats) -> Floats | None:
        """Return the energy of the GPUs of each step, which takes `seconds`, without that of their idle power.

        A step of a data-parallel rank is on the rank's own GPUs. The result is None if the power is not known.
        """
        if self.power is None:
            return None
        gpus = self.gpus // self._deployment.data_parallel_size
        computing = ratio(self.flops(steps) / self._flop_per_s_in_16_bits, seconds)
        moving = ratio(self.moved_bytes(steps) / self.bytes_per_s, seconds)
        return np.asarray(gpus * seconds * (self.power.watts(computing, moving) - self.power.idle_w))

    def _taken(self, projection: str, parameters: int, layers: int) -> float:
        """Return the bytes of a layer's `parameters` in `layers` layers, in their stored number types."""
        kept = stored(self._model, self._deployment, projection, layers)
        return parameters * sum(part.layers * part.width for part in kept)


def _clipped(model: ModelSpec, seen: Floats, queries: Floats, pairs: Floats, prompts: Floats) -> Floats:
    """Return the query-key pairs of a layer of full attention; an indexer limits the pairs of a query."""
    most = float(model.latent.index_topk) if model.latent is not None else 0.0
    return np.minimum(seen, queries * most) + np.minimum(pairs, prompts * most) if most else seen + pairs


def attended_pairs(latent: CompressedAttention, ratio: int, pairs: Any, queries: Any) -> Any:
    """Return the query-key pairs of a layer of compressed attention with this compression ratio.

    `pairs` is the number of pairs of the `queries` with all tokens before them. A query attends to the tokens in the
    window and to compressed entries, each of which stands for `ratio` tokens. In a sparse layer an indexer chooses some
    of these entries.
    """
    within = np.minimum(pairs, queries * float(latent.sliding_window))
    if not ratio:
        return within
    return within + np.minimum(pairs / ratio, queries * float(latent.index_topk) if ratio == SPARSE else np.inf)


def _gpu_of(run: Mapping[str, Any]) -> GpuSpec | None:
    """Return the catalogued GPU of a simulated run, or the one whose name fits the CUDA name of a real device."""
    if run["clock"] == "virtual":
        return gpus().get(str(notes_of(run).get("gpu")))
    device = str(json.loads(run["hardware"] or "{}").get("gpu", ""))
    fitting = [name for name in gpus() if all(re.search(rf"\b{part}b?\b", device, re.I) for part in name.split("-"))]
    return gpus()[max(fitting, key=len)] if fitting else None


class StepSummary(NamedTuple):
    """A metric's distribution over the steps, and its mean weighted by step duration (None without values)."""

    distribution: Distribution
    by_time: float | None


class StepMetrics:
    """The metrics of the table `steps`. Without `work`, MFU and MBU are not known."""

    def __init__(self, run: Datasets, num_blocks: float | None, work: StepWork | None = None) -> None:
        self._run = run
        self._work = work
        self._num_blocks = float(num_blocks or math.nan)
        self._summaries: dict[str, StepSummary] = {}
        self._seconds: dict[str, float | None] = {}

    @property
    def count(self) -> int:
        return self._run.rows("steps")

    @property
    def gpus(self) -> int:
        """Number of GPUs of an engine; 0 if it is not known."""
        return self._work.gpus if self._work else 0

    @cached_property
    def _rare(self) -> list[str]:
        return self._run.filled("steps", _RARE_COLUMNS)

    def values(self, name: str) -> Floats:
        """Return the values of one of STEP_METRICS; a missing value is NaN."""
        if name == "step_ms":
            return self._step_ms
        return self._used(name) if name in ("mfu", "mbu") else self._made(name)

    def _made(self, name: str) -> Floats:
        values, at = np.empty(self.count), 0
        for piece in self._run.pieces("steps", self._columns(name), _PIECE):
            values[at : at + piece.num_rows] = self._values_of(name, piece)
            at += piece.num_rows
        return values

    def _columns(self, *metrics: str) -> list[str]:
        names = dict.fromkeys(name for metric in metrics for name in _COLUMNS[metric])
        return [name for name in names if name not in _RARE_COLUMNS or name in self._rare]

    def _values_of(self, name: str, steps: pa.Table) -> NDArray[Any]:
        match name:
            case "step_ms":
                return np.subtract(as_stored(steps, "end_ns"), as_stored(steps, "start_ns"), dtype=np.float64) / 1e6
            case "batch_tokens":
                tokens = np.add(as_stored(steps, "prefill_tokens"), as_stored(steps, "decode_rows"), dtype=np.float64)
                return tokens + known_or_zero(steps, "draft_tokens")
            case "kv_usage":
                return as_stored(steps, "used_blocks") / self._num_blocks
            case "kv_pressure":
                demanded = np.add(as_stored(steps, "used_blocks"), as_stored(steps, "waiting_blocks"), dtype=np.float64)
                return demanded / self._num_blocks
            case _:
                return as_stored(steps, name)

    def at_rows(self, rows: NDArray[np.int64]) -> StepMetrics:
        """Return the metrics of only the steps in `rows`, without MFU and MBU."""
        steps = self._run.table("steps", self._columns(*STEP_METRICS[:-2])).take(pa.array(rows))
        return StepMetrics(MemoryTables(steps=steps), self._num_blocks)

    def summary(self, name: str, values: Floats | None = None) -> StepSummary:
        """Return the summary of one of STEP_METRICS; `values` has its values if the caller knows them."""
        if name not in self._summaries:
            spent = values is None and name != "step_ms"
            made = self.values(name) if values is None else values
            count, sums = 0, np.zeros(3)
            for first in range(0, len(made), _PIECE):
                part, step_ms = made[first : first + _PIECE], self._step_ms[first : first + _PIECE]
                if math.isnan(weighed := float((part * step_ms).sum())):
                    filled = ~(np.isnan(part) | np.isnan(step_ms))
                    part, step_ms = part[filled], step_ms[filled]
                    weighed = float((part * step_ms).sum())
                count += len(part)
                sums += part.sum(), weighed, step_ms.sum()
            by_time = float(sums[1] / sums[2] if sums[2] > 0 else sums[0] / count) if count else None
            self._summaries[name] = StepSummary(Distribution.from_values(made, spent), by_time)
        return self._summaries[name]

    def used_s(self, name: str) -> float | None:
        """Return the seconds that all steps would take at the peak FLOPs (`mfu`) or bandwidth (`mbu`) of all GPUs.

        The result is None if the work or the peak is not known.
        """
        if name not in self._seconds:
            self.summary(name)
        return self._seconds[name]

    def _used(self, name: str) -> Floats:
        """Return the share of the GPUs' peak that each step used, and store the seconds for `used_s`."""
        shares, at, work = np.full(self.count, math.nan), 0, self._work
        seconds = None
        for piece in self._run.pieces("steps", self._columns(name), _PIECE) if work is not None else ():
            assert work is not None
            flops = name == "mfu"
            used_s = work.flops(piece) / work.flop_per_s if flops else work.moved_bytes(piece) / work.bytes_per_s
            shares[at : at + piece.num_rows] = ratio(used_s, self.under_way_ms[at : at + piece.num_rows] / 1e3)
            at += piece.num_rows
            if len(known_s := known(used_s)):
                seconds = (seconds or 0.0) + float(known_s.sum())
        self._seconds[name] = seconds
        return shares

    def joules(self, gpu_seconds: float) -> float | None:
        """Return the energy of all GPUs, which are there for `gpu_seconds` in total; None if it is not known."""
        work, total, at = self._work, None, 0
        if work is None or work.power is None:
            return None
        for piece in self._run.pieces("steps", self._columns("mfu", "mbu"), _PIECE):
            seconds = self.under_way_ms[at : at + piece.num_rows] / 1e3
            at += piece.num_rows
            if len(used := known(np.asarray(work.joules_beyond_idle(piece, seconds)))):
                total = (total or 0.0) + float(used.sum())
        return None if total is None else total + work.power.idle_w * gpu_seconds

    @cached_property
    def _step_ms(self) -> Floats:
        return self._made("step_ms")

    @cached_property
    def under_way_ms(self) -> Floats:
        """The milliseconds of each step during which no earlier step of its replica was still running.

        Steps of a replica start and end in order, and overlap only with pipeline parallelism.
        """
        if "stages_ns" not in self._rare:
            return self._step_ms
        start, end, replica = (self._column(name) for name in ("start_ns", "end_ns", "replica"))
        order = np.lexsort((start, replica))
        follows = np.diff(replica[order], prepend=np.nan) == 0
        before = np.where(follows, np.concatenate(([0.0], end[order][:-1])), 0.0)
        own = np.empty(len(start))
        own[order] = end[order] - np.maximum(start[order], before)
        return own / 1e6

    def pipeline_bubble(self) -> float | None:
        """Return the share of time that pipeline stages are idle while a step is running; None without stages.

        Source: Huang et al., "GPipe", 2019.
        """
        if "stages_ns" not in self._rare:
            return None
        stages_ns = self._run.table("steps", ["stages_ns"]).column(0)
        stages = pc.cast(pc.list_value_length(stages_ns), pa.float64()).to_numpy()
        worked = pc.sum(pc.list_flatten(stages_ns)).as_py()
        return 1.0 - worked / 1e6 / float(np.nansum(stages * self.under_way_ms))

    def external_fragmentation(self) -> float | None:
        """Return the mean of 1 - (longest contiguous run of free blocks) / (free blocks); None if KV is paged."""
        if "longest_free_blocks" not in self._rare:
            return None
        free = self._num_blocks - self._column("used_blocks")
        scattered = free - self._column("longest_free_blocks")
        shares = np.divide(scattered, free, out=np.zeros(len(free)), where=free > 0)
        return weighted_mean(shares, self._step_ms)

    def _column(self, name: str) -> NDArray[Any]:
        return as_stored(self._run.table("steps", [name]), name)
