"""The cost model that is a sum of operations, made fast enough for the simulator by tables.

Times that depend on the number of tokens (GEMMs, experts, norms, collectives) or of sampled rows are tabulated once
with numpy. Decode attention is piecewise linear in the context for each number of rows. Prompt attention is
interpolated over a grid of numbers of prompts, lengths and past tokens. The entries of the tables are the corrected
parts that `explain` shows. `StepPrices` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.adapter_fit import fitted_times
from tokentwin.calibration.kernels.collectives import rate_between_nodes
from tokentwin.calibration.logit_changes import SCORED_AT_A_TIME, changing_operations, scoring_operations
from tokentwin.calibration.operations import Collective, KernelTimes, Operation, StepSizes
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.calibration_file import Price
from tokentwin.calibration.steps.correction import Correction, parts_of, step_parts
from tokentwin.calibration.steps.draft_cost import DraftCost, ModelDraft, StatedDraft
from tokentwin.calibration.steps.interval import SURE, StepInterval
from tokentwin.calibration.steps.launches import UNKNOWN, LaunchCost, LaunchingPs, launching_ps, outside_graphs
from tokentwin.calibration.steps.shared_prefix import read_once, readable_prefix
from tokentwin.calibration.vision_tower import tower_times
from tokentwin.serving.cost_model import MASK_NS, decode_plans, padded
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engines import captured_tokens
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec, check_vocabulary, draft_module, module_deployment
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.step_prices import Cell, DecodeRows, PromptCells, StepPrices

_GRAPH_TOKENS = 512  # steps with up to this number of tokens run as CUDA graphs, padded to a bucket
_DECODE_PARTS = ("decode attention",)
_PROMPT_PARTS = ("prompt attention", "past attention")
_ADDED = "host and launch"
WAITING = "waiting for launches"
_SHARED = ("experts", "dispatch", "combine")  # operations over the tokens of all data-parallel ranks
_AT_ONCE = 64  # number of curves (one for each number of rows) that are made together
_MOST_SCALED = 8  # maximum number of scaled cost models that are kept; each has about 1 MB of tables

Tables = dict[object, dict[str, NDArray[np.float64]]]


@dataclass(frozen=True)
class HostTimes:
    """CPU time of an engine between two steps, which an overlapped loop hides behind the running step.

    Attributes:
        step_ns: time per step, for scheduling, making tensors, sampling on the host and sending tokens
        row_ns: time per request in the step
        launches: time per kernel launch, for steps that do not run as CUDA graphs
    """

    step_ns: Price = 0.0
    row_ns: Price = 0.0
    launches: LaunchCost = UNKNOWN

    @property
    def times_ns(self) -> dict[str, float]:
        """The times per step and per row, by name."""
        return {"step_ns": self.step_ns, "row_ns": self.row_ns}

    @property
    def launch_ns(self) -> float:
        """The time per kernel; 0 if it is not known."""
        return self.launches.ns or 0.0

    def scaled(self, factor: float, launching: float | None = None) -> HostTimes:
        """Return the times multiplied by `factor`; `launching`, if given, is the factor for the launch time."""
        launches = self.launches.scaled(factor if launching is None else launching)
        return HostTimes(self.step_ns * factor, self.row_ns * factor, launches)


class OperationCost:
    """`CostModel` of a model on a GPU: kernel times of its operations, corrected by measured steps.

    Attributes:
        known_interval: 90 % interval of the error that all steps of a run have in common, for measured kernels
        untaught: sentence about an important part of the configuration that was not measured; empty if there is none
        adapters: times of LoRA adapters; None if the deployment serves none
        encoder: times of the encoder of images and videos; None if the deployment has none, or none that is known
        stages: cost models of the pipeline stages in order; empty without pipeline parallelism
        tables: uncorrected parts by table name, shared with cost models that differ only in factors
        shared_prefix: number of tokens at the start of every context that some steps read once for all rows
    """

    def __init__(
        self,
        model: ModelSpec,
        deployment: Deployment,
        kernels: KernelTimes,
        correction: Correction | None = None,
        host: HostTimes | None = None,
        interval: StepInterval = SURE,
        untaught: str = "",
        tables: Tables | None = None,
        shared_prefix: int = 0,
    ) -> None:
        self.model, self.deployment, self.kernels = model, deployment, kernels
        self.shared_prefix = readable_prefix(shared_prefix, model, deployment, kernels.gpu)
        self.correction = correction or Correction()
        self.host = host or HostTimes()
        self.known_interval = interval
        self.untaught = untaught
        scheduler = deployment.scheduler
        self._most_rows = padded(scheduler.max_num_seqs)
        self._most_tokens = max(scheduler.max_num_batched_tokens, self._most_rows)
        self._longest = scheduler.max_model_len
        speculative = scheduler.speculative
        self._drafts = speculative.num_speculative_tokens if speculative else 0  # draft tokens of a decode row
        self._drafting = self._draft_cost()
        self._most_logits = self._most_rows * (1 + self._drafts)
        self._added = {name: round(1000 * ns) for name, ns in self.correction.added_ns.items()}
        self._scaled: dict[tuple[float, float, float | None], OperationCost] = {}
        self._tables: Tables = {} if tables is None else tables
        self._curves: dict[int, DecodeRows] = {}
        self._logits_ps: dict[tuple[int, int], int] = {}  # by changed rows and scored tokens
        self._prompts = _PromptGrid(self)
        self._captured = captured_tokens(deployment, kernels.gpu)
        self.own_parts(StepSizes(prefill_tokens=1, sampled_rows=1), "a token")  # raises if there is no price
        self.stages = self._stages()
        self.adapters = fitted_times(model, kernels.gpu, deployment)
        self.encoder = tower_times(model, kernels, deployment, self.host.launch_ns)

    def _stages(self) -> list[OperationCost]:
        return []

    def __getstate__(self) -> dict[str, Any]:
        # `_prices` is made again from the tables
        kept = {name: value for name, value in vars(self).items() if name != "_prices"}
        return kept | {"_tables": {}}

    def parts(self, sizes: StepSizes) -> dict[str, NDArray[np.float64]]:
        """Return corrected nanoseconds of each part of one step or many. The tables are made from these parts."""
        parts = self.own_parts(sizes)
        if self.host.launch_ns:
            parts[WAITING] = self.waiting_ns(sizes, sum(parts.values()))
        if self._drafting:
            parts["drafting"] = self._drafting.ns(sizes, sum(parts.values()))
        return parts

    def own_parts(self, sizes: StepSizes, table: object = None) -> dict[str, NDArray[np.float64]]:
        """Return the corrected parts without the drafting at the end of the step and without waits for the host.

        If `table` is given, the uncorrected times of these sizes are kept under this name.
        """
        raw = self._tables.get(table)
        if raw is None:
            read = self._as_read(sizes)
            raw = step_parts(self.model, self.deployment, self.kernels, read, self.correction.by_type)
            if table is not None:
                self._tables[table] = raw
        return self.correction.apply(raw, sizes)

    def _as_read(self, sizes: StepSizes) -> StepSizes:
        """Return `sizes` with the context that decode rows read, of which the shared prefix may be read once."""
        if not self.shared_prefix:
            return sizes
        rows, context = np.asarray(sizes.decode_rows), np.asarray(sizes.decode_context)
        once = read_once(rows, self.shared_prefix, self.model, self.deployment, self.kernels.gpu)
        read = np.maximum(context - (rows - 1) * self.shared_prefix, context / np.maximum(rows, 1))
        return replace(sizes, decode_context=np.where(once, read, context))

    def waiting_ns(self, sizes: StepSizes, device_ns: Any) -> Any:
        """Return the time that a step of `device_ns` waits for the host, which launches kernels outside of graphs."""
        return np.maximum(self.launching_ns(sizes, self._captured) - device_ns, 0.0)

    def launching_ns(self, sizes: StepSizes, captured: float) -> Any:
        """Return the time of all launches in a step; steps with prompts are graphs up to `captured` tokens."""
        return self.host.launch_ns * outside_graphs(self.model, self.deployment, sizes, captured)

    def operations(self, sizes: StepSizes) -> list[Operation]:
        """Return the operations of a step of `sizes` on one device, including the drafting at its end."""
        own = step_operations(self.model, self.deployment, sizes)
        return own + self._drafting.operations(sizes) if self._drafting else own

    def _draft_cost(self) -> DraftCost | None:
        speculative = self.deployment.scheduler.speculative
        if speculative is None:
            return None
        if speculative.method == "mtp":
            module, alone = draft_module(self.model), module_deployment(self.deployment)
            return ModelDraft(speculative, self._of_draft(module, alone))
        if speculative.model is None:
            return StatedDraft(speculative)
        draft = find_model(speculative.model)
        check_vocabulary(self.model, draft)
        own: dict[str, object] = {"model": speculative.model}
        if not draft.num_experts:
            own["expert_imbalance"] = 1.0
            own |= {"quantization": "none"} if self.deployment.quantization == "mxfp4" else {}
        deployment = self.deployment.rescheduled(speculative=None).model_copy(update=own)
        return ModelDraft(speculative, self._of_draft(draft, deployment))

    def _of_draft(self, draft: ModelSpec, deployment: Deployment) -> OperationCost:
        """Return the cost model of a draft model, with this model's correction and launches."""
        host = HostTimes(launches=self.host.launches)
        return OperationCost(draft, deployment, self.kernels, self.correction.of_kernels(), host)

    def scaled(self, decode: float, prompts: float, launching: float | None = None) -> OperationCost:
        """Return the cost model with decode, prompt and (if given) launch times multiplied by these factors."""
        factors = decode, prompts, launching
        if factors not in self._scaled:
            if len(self._scaled) == _MOST_SCALED:
                del self._scaled[next(iter(self._scaled))]
            made = self.correction.scaled(decode, prompts), self.host.scaled(decode, launching)
            tables = None if self.correction.wider else self._tables  # the fastest weight type depends on the factors
            same: dict[str, Any] = {"untaught": self.untaught, "tables": tables, "shared_prefix": self.shared_prefix}
            alike = type(self)(self.model, self.deployment, self.kernels, *made, **same)
            self._scaled[factors] = alike
        return self._scaled[factors]

    def with_shared_prefix(self, tokens: int) -> OperationCost:
        """Return the cost model for requests whose prompts all start with the same `tokens` tokens."""
        if not readable_prefix(tokens, self.model, self.deployment, self.kernels.gpu):
            return self
        known = self.correction, self.host, self.known_interval, self.untaught
        return type(self)(self.model, self.deployment, self.kernels, *known, shared_prefix=tokens)

    # CostModel

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._prices.cpu_ns(plan.decode_rows + plan.prefill_rows) + MASK_NS * plan.masked_rows

    def step_ns(self, plan: StepPlan) -> int:
        logits = plan.sampled_rows + plan.draft_tokens if self._drafting else plan.sampled_rows
        total = self._prices.step_ps(plan, logits)
        if plan.routed_tokens >= 0:
            shared = self._shared_ps
            total += shared[min(plan.routed_tokens, self._most_tokens)] - shared[min(plan.tokens, self._most_tokens)]
        over, prompts = plan.tokens > self._captured, plan.prefill_tokens > 0
        if over or prompts:
            total = max(total, self._launching_ps[over][plan.decode_rows > 0, prompts, logits > 0])
        if self._drafting:
            total += self._drafting.ps(plan, total)
        if plan.changed_rows or plan.scored_tokens:
            total += self.logits_ps(plan.changed_rows, plan.scored_tokens)
        return total // 1000

    def logits_ps(self, changed_rows: int, scored_tokens: int) -> int:
        """Return the time in ps that rules for logits and log-probabilities of prompts add to a step."""
        return self._added_ps(changed_rows, 0) + self._added_ps(0, scored_tokens)

    @property
    def logits_said(self) -> str:
        """A sentence about the times that rules for logits and log-probabilities of prompts add."""
        row_us, token_us = self.logits_ps(1, 0) / 1e6, self.logits_ps(0, SCORED_AT_A_TIME) / (1e6 * SCORED_AT_A_TIME)
        return (
            f"penalties of one row take {row_us:.3g} us, log-probabilities of a prompt {token_us:.3g} us a token "
            "(extrapolated from the bytes and the head of vLLM's kernels; nobody measured them)"
        )

    def _added_ps(self, changed_rows: int, scored_tokens: int) -> int:
        known = self._logits_ps.get((changed_rows, scored_tokens))
        if known is None:
            parts: dict[str, Any] = {}
            operations = [
                *changing_operations(self.model, changed_rows),
                *scoring_operations(self.model, self.deployment, scored_tokens),
            ]
            for name, ns in parts_of(operations, self.kernels, self.correction.by_type):
                parts[name] = parts.get(name, 0.0) + ns
            sizes = StepSizes(prefill_tokens=scored_tokens)
            corrected = self.correction.of_kernels().apply(parts, sizes)
            known = round(1000 * float(sum(ns.item() for ns in corrected.values())))
            self._logits_ps[changed_rows, scored_tokens] = known
        return known

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        if self._drafting:
            return [self.cpu_ns(plan) + self.step_ns(plan) for plan in decode_plans(rows, context, squares, steps)]
        cpu = self._prices.cpu_ns(rows)
        if rows > self._captured and (least := self._launching_ps[True][True, False, True] // 1000):
            return [cpu + max(ns, least) for ns in self._prices.run(rows, context, squares, steps, 0)]
        return self._prices.run(rows, context, squares, steps, cpu)

    def network_ns(self, tokens: int) -> int:
        return self._network_ns[min(tokens, self._most_tokens)]

    # Tables

    @cached_property
    def _network_ns(self) -> list[int]:
        """Return a list of nanoseconds by number of tokens: the time of bytes between nodes at the link's rate."""
        tokens, gpu = np.arange(self._most_tokens + 1, dtype=np.float64), self.kernels.gpu
        busy = np.zeros_like(tokens)
        for operation in step_operations(self.model, self.deployment, StepSizes(prefill_tokens=tokens)):
            if isinstance(operation, Collective) and operation.link is not None:
                busy += 1e9 * operation.count * operation.sent_between_nodes / rate_between_nodes(gpu, operation)
        return [round(ns) for ns in busy.tolist()]

    @cached_property
    def _launching_ps(self) -> tuple[LaunchingPs, LaunchingPs]:
        """The time of a step's launches if its prompts are captured, and if they are not."""
        within, beyond = (launching_ps(partial(self.launching_ns, captured=captured)) for captured in (np.inf, 0.0))
        return within, beyond

    @cached_property
    def _dense_ps(self) -> list[int]:
        # The sizes have neither decode rows nor past tokens: `_token_parts` leaves out attention, which has its own
        # tables.
        return _picoseconds(self._token_parts("tokens", StepSizes(prefill_tokens=self._run_tokens)))

    @cached_property
    def _shared_ps(self) -> list[int]:
        """The part of `_dense_ps` that depends on the tokens of all data-parallel ranks, by mean tokens per rank."""
        sizes = StepSizes(prefill_tokens=self._run_tokens)
        operations = step_operations(self.model, self.deployment, sizes)
        shared = [operation for operation in operations if operation.name.startswith(_SHARED)]
        parts: dict[str, NDArray[np.float64]] = {}
        for name, ns in parts_of(shared, self.kernels, self.correction.by_type):
            parts[name] = parts.get(name, np.zeros_like(ns)) + ns
        corrected = self.correction.of_kernels().apply(parts, sizes)
        return _picoseconds(np.sum(list(corrected.values()), axis=0))

    @cached_property
    def _run_tokens(self) -> NDArray[np.float64]:
        """The number of computed tokens, by number of tokens in the step; a graph also computes padding."""
        run = np.arange(self._most_tokens + 1)
        if not self.deployment.enforce_eager:
            buckets = np.array([padded(int(n)) for n in run[: _GRAPH_TOKENS + 1]])
            run[: len(buckets)] = np.minimum(buckets, max(self._most_tokens, 1))
        return run.astype(np.float64)

    def _token_parts(self, table: str, sizes: StepSizes) -> NDArray[np.float64]:
        left_out = (*_DECODE_PARTS, *_PROMPT_PARTS, "imbalance", _ADDED)
        parts = self.own_parts(sizes, table)
        return sum((ns for name, ns in parts.items() if name not in left_out), np.zeros_like(sizes.prefill_tokens))

    @cached_property
    def _sampled_ps(self) -> list[int]:
        rows = np.arange(self._most_logits + 1, dtype=np.float64)
        sizes = StepSizes(prefill_tokens=np.zeros_like(rows), sampled_rows=rows)
        return _picoseconds(self._token_parts("logits", sizes))

    @cached_property
    def _prices(self) -> StepPrices:
        added = self._added
        return StepPrices(
            self._dense_ps,
            self._sampled_ps,
            added["step"],
            added["prompt"],
            added["prompts only"],
            added["prompts only, token"],
            self.host.step_ns,
            self.host.row_ns,
            self._rows,
            PromptCells(self._prompts.cell),
        )

    def _rows(self, rows: int) -> DecodeRows:
        if rows not in self._curves:
            first = (rows - 1) // _AT_ONCE * _AT_ONCE + 1
            self._make_rows(range(first, first + _AT_ONCE))
        return self._curves[rows]

    def _make_rows(self, many: range) -> None:
        """Make the curves of several numbers of rows together, which is fast in numpy.

        Every row is assumed to verify a whole draft. Reading its KV takes most of the time, and the KV is read only
        once.
        """
        lengths = np.unique(np.round(np.geomspace(1, max(self._longest, 2), 48)).astype(np.int64))
        rows = np.array(many)[:, None]
        contexts = np.concatenate((np.zeros_like(rows), lengths[None, :] * rows), axis=1)
        sizes = StepSizes(
            decode_rows=np.broadcast_to(rows, contexts.shape).astype(np.float64),
            decode_context=contexts.astype(np.float64),
            decode_spread=np.ones(contexts.shape),
            draft_tokens=np.broadcast_to(rows * self._drafts, contexts.shape).astype(np.float64),
        )
        parts = self.own_parts(sizes, many)
        attention = np.maximum.accumulate(parts["decode attention"], axis=1)
        for at, count in enumerate(many):
            values = [round(1000 * ns) + count * self._added["decode row"] for ns in attention[at].tolist()]
            per_spread = 1000.0 * float(parts["imbalance"][at, 0])
            self._curves[count] = DecodeRows(count, contexts[at].tolist(), values, per_spread)


def _picoseconds(ns: NDArray[np.float64]) -> list[int]:
    return [round(1000 * one) for one in ns.tolist()]


class _PromptGrid:
    """Log picoseconds of prompt attention on a grid of powers of two: number of prompts, length and past tokens."""

    def __init__(self, cost: OperationCost) -> None:
        self._cost = cost
        self._corners: dict[tuple[int, int, int], float] = {}

    def cell(self, i: int, j: int, k: int) -> Cell:
        """Return the coefficients of the trilinear interpolation between the eight corners of a cell."""
        near, far = (self._face(i, j, k + step) for step in (0, 1))
        a, b, c, d = near
        e, f, g, h = (beyond - here for here, beyond in zip(near, far, strict=True))
        return a, b, c, d, e, f, g, h

    def _face(self, i: int, j: int, k: int) -> tuple[float, float, float, float]:
        low, up, right, both = (self._at(i + di, j + dj, k) for di, dj in ((0, 0), (1, 0), (0, 1), (1, 1)))
        return low, up - low, right - low, both - up - right + low

    def _at(self, i: int, j: int, k: int) -> float:
        """Return the log picoseconds at a corner: 2^i prompts of 2^j tokens with 2^k - 1 past tokens each."""
        if (i, j, k) not in self._corners:
            scheduler = self._cost.deployment.scheduler
            most, longest = scheduler.max_num_batched_tokens.bit_length(), scheduler.max_model_len.bit_length()
            self._tabulate(range(max(i, 3) + 1), range(max(j, most) + 1), range(max(k, longest) + 1))
        return self._corners[i, j, k]

    def _tabulate(self, prompts: range, lengths: range, pasts: range) -> None:
        corners = [(i, j, k) for i in prompts for j in lengths for k in pasts]
        exponents = np.array(corners, dtype=np.float64)
        rows, n, behind = 2.0 ** exponents[:, 0], 2.0 ** exponents[:, 1], 2.0 ** exponents[:, 2] - 1.0
        sizes = StepSizes(
            prefill_rows=rows,
            prefill_tokens=rows * n,
            prefill_context=rows * behind,
            prefill_pairs=rows * (n * behind + n * (n + 1) / 2),
        )
        parts = self._cost.own_parts(sizes, (prompts, lengths, pasts))
        ps = 1000.0 * np.sum([parts[part] for part in _PROMPT_PARTS if part in parts], axis=0)
        self._corners.update(zip(corners, np.log(ps).tolist(), strict=True))
