"""Maps of the measured steps among the possible steps of a deployment, with marks for the steps of one run.

For our own engine, a map shows the steps to which its calibration was fitted, and the box that they span. For an engine
that is predicted by kernel tables, it shows the uncertainty of a step of each size.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.features import STEP_FEATURES, MeasuredSteps, recorded_sizes
from tokentwin.calibration.steps.interval import REACH
from tokentwin.calibration.steps.observed import pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.steps.step_trust import Beyond, beyond, factor_beyond, first_reason, step_trust
from tokentwin.calibration.trust import Trust, TrustLevel
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.calibration.validation.evidence import NEGLIGIBLE
from tokentwin.dashboard.bundled import DEMO
from tokentwin.dashboard.library import calibrations
from tokentwin.dashboard.series import column, thin
from tokentwin.planning.repricing import Source, fitting_sources, repriced, source_of
from tokentwin.serving.cost_model import DECODE_BUCKETS, padded
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.traces.recording import Recording

Floats = NDArray[np.float64]

NO_ROWS = 0.35  # place of steps without decode rows on a logarithmic axis
STEP_COLUMNS = (
    "start_ns", "end_ns", "plan_ns", "sample_ns", "host_ns", "decode_rows", "decode_context", "sampled_rows",
    "prefill_rows", "prefill_tokens", "prefill_context", "prefill_pairs", "draft_tokens",
)  # fmt: skip
_MOST_STEPS = 4000  # largest number of steps drawn
_MOST_JUDGED = 100_000
_CELLS = 26
_DECODE = ("decoding requests", "context tokens per request (mean)")
_PROMPTS = ("prompt tokens", "decoding requests in the same step")


class Map(NamedTuple):
    """A panel: cells between the edges `x` and `y`, and the steps of the run as points.

    Attributes:
        known: number of steps measured in each cell, or its uncertainty in percent; NaN outside;
            `[len(y) - 1, len(x) - 1]`
        outside: factor beyond the nearest measured step, or percent; NaN where known; same shape as `known`
        points: x and y of the run's steps, `[steps, 2]`
        out: mask of the points that lie outside
    """

    x_title: str
    y_title: str
    x: Floats
    y: Floats
    known: Floats
    outside: Floats
    points: Floats
    out: NDArray[np.bool_]


class Domain(NamedTuple):
    """The maps of decode steps and of steps with prompts, and the share of the run that lies outside.

    Attributes:
        counted: True if the maps count measured steps; otherwise they show percent
        steps, of: number of judged steps, and number of all steps
        beyond: share of the judged steps that lie outside
    """

    about: str
    counted: bool
    decode: Map
    prompts: Map
    steps: int
    all_steps: int
    beyond: Beyond
    level: str
    reason: str

    @property
    def counted_steps(self) -> str:
        """The number of judged steps, and of all steps, in words."""
        return (
            f"{self.steps:,} steps" if self.steps == self.all_steps else f"{self.steps:,} (of {self.all_steps:,}) steps"
        )

    @property
    def trust(self) -> Trust:
        if not self.beyond.steps:
            return Trust(self.level, f"none of {self.counted_steps} lies outside the measured range")
        return Trust(self.level, f"{self.beyond} lie outside the measured range, most because of {self.reason}")


def timed_by(recording: Recording, runs: Path, calibration: str) -> Source | None:
    """Return the source that timed a simulated run; for a real run, the calibration with this id or for its engine.

    It is searched under `runs` and among the bundled calibrations. Returns None if it is not found.
    """
    known = [*calibrations(runs).values(), DEMO / "calibration"]
    if recording.run["clock"] == "virtual":
        return source_of(recording.run, known)
    fitting = fitting_sources(recorded_deployment(recording), known)
    named = source_of({**recording.run, "calibration": calibration}, known)
    return named if named in fitting else next(iter(fitting), None)


def domain(recording: Recording, source: Source) -> Domain:
    """Return the maps for a recording, whose steps `source` timed or would time.

    Raises UserError if either is damaged.
    """
    table = recording.table("steps", STEP_COLUMNS)
    if not table.num_rows:
        raise UserError("recording", recording.run["run_id"], "has no steps to mark; choose another recording")
    deployment = recorded_deployment(recording)
    fleet = deployment.fleet
    if fleet is not None and any(p.deployment or p.gpu or p.calibration or p.speed != 1 for p in fleet.pools):
        remedy = "is of a fleet with different pools, and steps do not state their pool; choose another recording"
        raise UserError("recording", recording.run["run_id"], remedy)
    steps: _MeasuredDomain | _KernelDomain
    if source.calibration is not None and source.gpu is None:
        steps = _MeasuredDomain(Path(source.calibration), table, deployment)
    else:
        cost = pure(repriced(source, deployment).cost)
        assert isinstance(cost, OperationCost)  # because the kernel tables of a GPU time it
        steps = _KernelDomain(cost, table, deployment)
    scheduler, prompts = deployment.scheduler, steps.tokens > 0
    context_edges = _edges(scheduler.max_model_len)
    token_edges = _edges(max(scheduler.max_num_batched_tokens, int(steps.tokens.max())))
    beside_edges = np.concatenate(([NO_ROWS**2 / 0.5], steps.row_edges))
    decode_points = np.column_stack((steps.rows, steps.per_row))
    prompt_points = np.column_stack((steps.tokens, np.maximum(steps.rows, NO_ROWS)))
    decode_cells = steps.decode_cells(steps.row_edges, context_edges)
    prompt_cells = steps.prompt_cells(token_edges, beside_edges)
    return Domain(
        about=steps.about,
        counted=steps.counted,
        decode=_map(
            _DECODE, steps.row_edges, context_edges, decode_cells, decode_points[~prompts], steps.out[~prompts]
        ),
        prompts=_map(_PROMPTS, token_edges, beside_edges, prompt_cells, prompt_points[prompts], steps.out[prompts]),
        steps=len(steps.out),
        all_steps=table.num_rows,
        beyond=steps.beyond,
        level=steps.level.word,
        reason=steps.reason,
    )


class _Cells(NamedTuple):
    """The cells of a map, `[y, x]`: whether each was measured, its uncertainty, and its distance to known cells."""

    inside: NDArray[np.bool_]
    known: Floats
    outside: Floats


class _MeasuredDomain:
    """The domain of our own engine: the steps that were measured, and the box around them."""

    counted = True

    def __init__(self, directory: Path, table: pa.Table, deployment: Deployment) -> None:
        self._calibration = Calibration.load(directory)
        steps = MeasuredSteps([table], self._calibration.drafts, self._calibration.knees)
        padded_rows, context, self.tokens = (
            steps.step[:, list(STEP_FEATURES).index(name)]
            for name in ("decode_rows_padded", "decode_context", "prefill_tokens")
        )
        self.rows, self.per_row = column(table, "decode_rows"), context / np.maximum(padded_rows, 1)
        every = beyond(self._calibration, steps.step, steps.regime)
        self.out = np.asarray(every.any(axis=1))
        self.beyond, self.reason = (
            Beyond.from_steps(self.out, steps.step_ns),
            first_reason(self._calibration, every, steps.regime),
        )
        self.level = TrustLevel.EXTRAPOLATED if self.beyond.steps > NEGLIGIBLE else TrustLevel.VALIDATED
        most_rows = int(max(padded(deployment.scheduler.max_num_seqs), padded_rows.max()))
        self.row_edges = np.array([0.5, *(bucket + 0.5 for bucket in DECODE_BUCKETS if bucket <= most_rows)])
        self._measured = _measured(directory)
        count = len(self._measured["decode_rows"])
        self.about = f"calibration {self._calibration.id} of our own engine, {count:,} steps measured"

    def decode_cells(self, x: Floats, y: Floats) -> _Cells:
        rows, per_row = np.meshgrid(np.floor(x[1:]), _centres(y))
        factor = self._factor("decode", decode_rows_padded=rows, decode_context=rows * per_row)
        of_rows, context = self._measured["decode_rows"], self._measured["decode_context"]
        return self._counted(x, y, factor, of_rows, context / np.maximum(of_rows, 1), prompts=False)

    def prompt_cells(self, x: Floats, y: Floats) -> _Cells:
        tokens, rows = np.meshgrid(_centres(x), np.floor(y[1:]))
        alone = self._factor("prefill", prefill_tokens=tokens)
        beside = self._factor("mixed", prefill_tokens=tokens, decode_rows_padded=rows)
        of_tokens, of_rows = self._measured["prefill_tokens"], np.maximum(self._measured["decode_rows"], NO_ROWS)
        return self._counted(x, y, np.where(rows > 0, beside, alone), of_tokens, of_rows, prompts=True)

    def _factor(self, regime: str, **amounts: Floats) -> Floats:
        ranges = self._calibration.domain.get(regime)
        if ranges is None:
            return np.full(next(iter(amounts.values())).shape, np.inf)
        return factor_beyond(ranges, amounts)

    def _counted(self, x: Floats, y: Floats, factor: Floats, of_x: Floats, of_y: Floats, prompts: bool) -> _Cells:
        mine = (self._measured["prefill_tokens"] > 0) == prompts
        count = np.histogram2d(of_y[mine], of_x[mine], bins=(y, x))[0]
        inside = (factor <= 1) | (count > 0)  # a cell on the edge of the box counts as measured if steps in it were
        return _Cells(inside, count, factor)


def _measured(directory: Path) -> dict[str, Floats]:
    names = ("decode_rows", "decode_context", "prefill_tokens")
    path = directory / "steps.parquet"
    if not path.is_file():
        return {name: np.empty(0) for name in names}
    try:
        table = pq.read_table(path, columns=list(names))
    except (pa.ArrowException, OSError) as error:
        raise UserError("calibration", f"{directory.name}/{path.name}", f"is damaged: {error}") from None
    return {name: column(table, name) for name in names}


class _KernelDomain:
    """The domain of an engine whose kernels are known."""

    counted = False

    def __init__(self, cost: OperationCost, table: pa.Table, deployment: Deployment) -> None:
        self._cost = cost
        table = table.take(thin(table.num_rows, _MOST_JUDGED))
        sizes = recorded_sizes(table)
        self.rows, self.tokens = sizes.decode_rows, sizes.prefill_tokens
        self.per_row = (column(table, "decode_context") + self.rows) / np.maximum(self.rows, 1)
        self.row_edges = _edges(max(deployment.scheduler.max_num_seqs, int(self.rows.max())))
        levels = step_trust(self._cost, sizes).level
        took = column(table, "end_ns") - column(table, "start_ns")
        self.out, self.level = levels >= TrustLevel.EXTRAPOLATED, TrustLevel(int(levels.max()))
        self.beyond = Beyond.from_steps(self.out, took)
        self.reason = f"{self._weakest(sizes, took)}, beyond measured shapes" if self.out.any() else ""
        self.about = (
            f"kernel tables of the {cost.kernels.gpu.name}, {cost.correction.source or 'without measured steps'}"
        )

    def decode_cells(self, x: Floats, y: Floats) -> _Cells:
        rows, per_row = np.meshgrid(_centres(x), _centres(y))
        return self._known(StepSizes(decode_rows=rows, decode_context=rows * per_row, sampled_rows=rows))

    def prompt_cells(self, x: Floats, y: Floats) -> _Cells:
        decoding = self.rows > 0
        usual = float(np.median(self.per_row[decoding])) if decoding.any() else 0.0
        tokens, rows = np.meshgrid(_centres(x), np.concatenate(([0.0], _centres(y[1:]))))
        one = np.ones_like(tokens)
        return self._known(
            StepSizes(
                prefill_rows=one, prefill_tokens=tokens, prefill_context=0 * one,
                prefill_pairs=tokens * (tokens + 1) / 2,
                decode_rows=rows, decode_context=rows * usual, sampled_rows=rows + 1,
            )
        )  # fmt: skip

    def _known(self, sizes: StepSizes) -> _Cells:
        trust = step_trust(self._cost, sizes)
        percent = 100 * (np.exp(REACH * trust.sigma) - 1)
        return _Cells(trust.level < TrustLevel.EXTRAPOLATED, percent, percent)

    def _weakest(self, sizes: StepSizes, took: Floats) -> str:
        """Return the operation because of which the longest of the steps outside lies outside."""
        longest = np.flatnonzero(self.out)[took[self.out].argmax()]
        amounts = {name: np.asarray(values) for name, values in vars(sizes).items()}
        return explain(self._cost, StepSizes(**{n: float(v[longest]) for n, v in amounts.items() if v.ndim})).why


def _map(titles: tuple[str, str], x: Floats, y: Floats, cells: _Cells, points: Floats, out: NDArray[np.bool_]) -> Map:
    kept = thin(len(points), _MOST_STEPS)
    known, outside = np.where(cells.inside, cells.known, np.nan), np.where(cells.inside, np.nan, cells.outside)
    return Map(*titles, x, y, known, outside, points[kept], out[kept])


def _edges(most: int) -> Floats:
    """Return edges of equal cells on a logarithmic axis, from 1 to `most`."""
    step = max(np.log2(max(most, 2)) / (_CELLS - 1), 0.25)
    return np.exp2(np.arange(-0.5, np.ceil(np.log2(max(most, 2)) / step) + 1) * step)


def _centres(edges: Floats) -> Floats:
    return np.sqrt(edges[1:] * edges[:-1])
