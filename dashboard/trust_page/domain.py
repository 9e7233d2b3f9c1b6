"""What was measured, as maps over the steps that a deployment admits, with the steps of one run to mark on them.

Of our own engine, a map holds the steps its calibration was fitted to, in the box of what they span. Of an engine that
kernel tables predict, it holds how well a step of each size is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from calibration.kernels.times import Coverage
from calibration.operations import StepSizes
from calibration.provenance import Provenance
from calibration.steps.coverage import Beyond, step_coverage
from calibration.steps.explanation import explain
from calibration.steps.features import STEP_FEATURES, MeasuredSteps, recorded_sizes
from calibration.steps.interval import REACH
from calibration.steps.measured_domain import beyond, factor_beyond, first_reason
from calibration.steps.observed import pure
from calibration.steps.operation_cost import OperationCost
from calibration.steps.step_cost import Calibration
from calibration.validation.decision_replay import recorded_deployment
from dashboard.bundled import DEMO
from dashboard.library import calibrations
from dashboard.series import column, thin
from planning.repricing import Source, fitting_sources, repriced, source_of
from serving.deployments.config import Deployment
from serving.deployments.decode_buckets import DECODE_BUCKETS, padded
from serving.errors import UserError
from traces.recording import Recording

Floats = NDArray[np.float64]

NO_ROWS = 0.35  # where steps without decode rows stand on a logarithmic axis
NEGLIGIBLE = 0.01  # the share of steps outside that does not change how a run stands, as in StepCost
STEP_COLUMNS = (
    "start_ns", "end_ns", "plan_ns", "sample_ns", "host_ns", "decode_rows", "decode_context", "sampled_rows",
    "prefill_rows", "prefill_tokens", "prefill_context", "prefill_pairs", "draft_tokens",
)  # fmt: skip
_MOST_STEPS = 4000  # that are drawn
_MOST_JUDGED = 100_000
_CELLS = 26


class Map(NamedTuple):
    """One panel: cells between the edges `x` and `y`, and the steps of the run as points.

    known       `[len(y) - 1, len(x) - 1]`: steps measured in it, or percent to which its kernels are known; NaN outside
    outside     the same, times beyond the nearest measured step, or percent; NaN where known
    points      `[steps, 2]`, and which of them are `out`
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
    """The maps of decode steps and of steps with prompts, and how much of the run lies outside.

    counted     whether maps count measured steps; otherwise they are percent
    steps, of   how many steps were judged, of how many
    beyond      how many of those lie outside
    """

    about: str
    counted: bool
    decode: Map
    prompts: Map
    steps: int
    of: int
    beyond: Beyond
    mark: str
    reason: str

    @property
    def counted_steps(self) -> str:
        """How many steps were judged, of how many, in words."""
        return f"{self.steps:,} steps" if self.steps == self.of else f"{self.steps:,} (of {self.of:,}) steps"

    @property
    def provenance(self) -> Provenance:
        """How the run stands."""
        if not self.beyond.steps:
            return Provenance(self.mark, f"none of {self.counted_steps} lies beyond what was measured")
        return Provenance(self.mark, f"{self.beyond} lie outside what was measured, most by {self.reason}")


def timed_by(recording: Recording, runs: Path, calibration: str) -> Source | None:
    """What timed a simulated run; for a real one the calibration of this id, or any of its engine.

    Looked for under `runs` and among what is bundled; None if it is not there.
    """
    known = [*calibrations(runs).values(), DEMO / "calibration"]
    if recording.run["clock"] == "virtual":
        return source_of(recording.run, known)
    fitting = fitting_sources(recorded_deployment(recording), known)
    named = source_of({**recording.run, "calibration": calibration}, known)
    return named if named in fitting else next(iter(fitting), None)


def domain(recording: Recording, source: Source) -> Domain:
    """The maps for a recording, by what timed its steps, or would. Raises UserError when either is damaged."""
    table = recording.table("steps", STEP_COLUMNS)
    if not table.num_rows:
        raise UserError("recording", recording.run["run_id"], "holds no steps; there is nothing to mark")
    deployment = recorded_deployment(recording)
    fleet = deployment.fleet
    if fleet is not None and any(p.deployment or p.gpu or p.calibration or p.speed != 1 for p in fleet.pools):
        remedy = "is of a fleet whose pools differ; steps do not say which pool they are of"
        raise UserError("recording", recording.run["run_id"], remedy)
    if source.calibration is not None and source.gpu is None:
        directory = Path(source.calibration)
        return _own_domain(Calibration.load(directory), directory, table, deployment)
    cost = pure(repriced(source, deployment).cost)
    assert isinstance(cost, OperationCost)  # since it is of a GPU
    return _kernel_domain(cost, table, deployment)


# Our own engine: the steps that were measured, and the box around them


def _own_domain(calibration: Calibration, directory: Path, table: pa.Table, deployment: Deployment) -> Domain:
    steps = MeasuredSteps([table])
    every = beyond(calibration, steps.step, steps.regime)
    out = np.asarray(every.any(axis=1))
    share = Beyond.of(out, steps.step_ns)
    reason = first_reason(every, steps.regime)
    measured = _measured(directory)
    names = list(STEP_FEATURES)
    rows, context, tokens = (
        steps.step[:, names.index(name)] for name in ("decode_rows_padded", "decode_context", "prefill_tokens")
    )
    decode_rows, prompts = column(table, "decode_rows"), tokens > 0

    most_rows = int(max(padded(deployment.scheduler.max_num_seqs), rows.max()))
    row_edges = _bucket_edges(most_rows)
    context_edges = _edges(deployment.scheduler.max_model_len)
    token_edges = _edges(max(deployment.scheduler.max_num_batched_tokens, int(tokens.max())))
    buckets, per_row = np.floor(row_edges[1:]), _centres(context_edges)[:, None]
    decode = _boxed(
        ("decode rows", "tokens behind each row (mean)"),
        (row_edges, context_edges),
        _factor(calibration, "decode", decode_rows_padded=buckets + 0 * per_row, decode_context=buckets * per_row),
        _per_row(measured["decode_rows"], measured["decode_context"], measured["prefill_tokens"] == 0),
        np.column_stack((decode_rows, context / np.maximum(rows, 1)))[~prompts],
        out[~prompts],
    )
    y_edges = np.concatenate(([NO_ROWS**2 / 0.5], row_edges))
    centre = _centres(token_edges)
    alone = _factor(calibration, "prefill", prefill_tokens=centre[None, :])
    beside = _factor(
        calibration,
        "mixed",
        prefill_tokens=centre + 0 * buckets[:, None],
        decode_rows_padded=buckets[:, None] + 0 * centre,
    )
    of_prompts = measured["prefill_tokens"] > 0
    with_prompts = _boxed(
        ("prompt tokens", "decode rows beside them"),
        (token_edges, y_edges),
        np.concatenate((alone, beside)),
        np.column_stack((measured["prefill_tokens"], np.maximum(measured["decode_rows"], NO_ROWS)))[of_prompts],
        np.column_stack((tokens, np.maximum(decode_rows, NO_ROWS)))[prompts],
        out[prompts],
    )
    mark = Coverage.EXTRAPOLATED if share.steps > NEGLIGIBLE else Coverage.VALIDATED
    about = f"calibration {calibration.id} of our own engine, {len(measured['decode_rows']):,} steps measured"
    return Domain(about, True, decode, with_prompts, len(out), len(out), share, mark.name.lower(), reason)


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


def _factor(calibration: Calibration, regime: str, **amounts: Floats) -> Floats:
    ranges = calibration.domain.get(regime)
    if ranges is None:
        return np.full(np.broadcast_shapes(*(values.shape for values in amounts.values())), np.inf)
    return factor_beyond(ranges, amounts)


def _per_row(rows: Floats, context: Floats, mine: NDArray[np.bool_]) -> Floats:
    return np.column_stack((rows, context / np.maximum(rows, 1)))[mine]


def _boxed(
    titles: tuple[str, str],
    edges: tuple[Floats, Floats],
    factor: Floats,
    measured: Floats,
    points: Floats,
    out: NDArray[np.bool_],
) -> Map:
    count = np.histogram2d(measured[:, 1], measured[:, 0], bins=(edges[1], edges[0]))[0]
    inside = (factor <= 1) | (count > 0)  # a cell that the box cuts through was measured where it was
    return _map(titles, edges, inside, count, factor, points, out)


# An engine of which kernels are known


def _kernel_domain(cost: OperationCost, table: pa.Table, deployment: Deployment) -> Domain:
    of = table.num_rows
    table = table.take(thin(of, _MOST_JUDGED))
    sizes = recorded_sizes(table)
    rows, tokens, context = sizes.decode_rows, sizes.prefill_tokens, column(table, "decode_context")
    marks = step_coverage(cost, sizes)
    out = marks.coverage >= Coverage.EXTRAPOLATED
    took = column(table, "end_ns") - column(table, "start_ns")
    prompts = tokens > 0

    scheduler = deployment.scheduler
    row_edges = _edges(max(scheduler.max_num_seqs, int(rows.max())))
    context_edges = _edges(scheduler.max_model_len)
    token_edges = _edges(max(scheduler.max_num_batched_tokens, int(tokens.max())))
    of_rows, of_context = np.meshgrid(_centres(row_edges), _centres(context_edges))
    decode_sizes = StepSizes(decode_rows=of_rows, decode_context=of_rows * of_context, sampled_rows=of_rows)
    per_row = (context + rows) / np.maximum(rows, 1)
    usual = float(np.median(per_row[rows > 0])) if (rows > 0).any() else 0.0
    y_edges = np.concatenate(([NO_ROWS**2 / 0.5], row_edges))
    of_tokens, beside = np.meshgrid(_centres(token_edges), np.concatenate(([0.0], _centres(row_edges))))
    one = np.ones_like(of_tokens)
    prompt_sizes = StepSizes(
        prefill_rows=one, prefill_tokens=of_tokens, prefill_context=0 * one,
        prefill_pairs=of_tokens * (of_tokens + 1) / 2,
        decode_rows=beside, decode_context=beside * usual, sampled_rows=beside + 1,
    )  # fmt: skip
    return Domain(
        about=f"kernel tables of the {cost.kernels.gpu.name}, {cost.correction.source or 'nothing learnt from steps'}",
        counted=False,
        decode=_marked(
            ("decode rows", "tokens behind each row (mean)"), (row_edges, context_edges), cost, decode_sizes,
            np.column_stack((rows, per_row))[~prompts], out[~prompts],
        ),
        prompts=_marked(
            ("prompt tokens", "decode rows beside them"), (token_edges, y_edges), cost, prompt_sizes,
            np.column_stack((tokens, np.maximum(rows, NO_ROWS)))[prompts], out[prompts],
        ),
        steps=len(out),
        of=of,
        beyond=Beyond.of(out, took),
        mark=Coverage(int(marks.coverage.max())).name.lower(),
        reason=f"{_weakest(cost, sizes, out, took)}, beyond measured shapes" if out.any() else "",
    )  # fmt: skip


def _weakest(cost: OperationCost, sizes: StepSizes, out: NDArray[np.bool_], took: Floats) -> str:
    """The operation that puts the longest of the steps outside there."""
    longest = np.flatnonzero(out)[took[out].argmax()]
    amounts = {name: np.asarray(values) for name, values in vars(sizes).items()}
    return explain(cost, StepSizes(**{n: float(v[longest]) for n, v in amounts.items() if v.ndim})).why


def _marked(
    titles: tuple[str, str],
    edges: tuple[Floats, Floats],
    cost: OperationCost,
    sizes: StepSizes,
    points: Floats,
    out: NDArray[np.bool_],
) -> Map:
    marks = step_coverage(cost, sizes)
    percent = 100 * (np.exp(REACH * marks.sigma) - 1)
    return _map(titles, edges, marks.coverage < Coverage.EXTRAPOLATED, percent, percent, points, out)


# Cells


def _map(
    titles: tuple[str, str],
    edges: tuple[Floats, Floats],
    inside: NDArray[np.bool_],
    known: Floats,
    outside: Floats,
    points: Floats,
    out: NDArray[np.bool_],
) -> Map:
    kept = thin(len(points), _MOST_STEPS)
    cells = np.where(inside, known, np.nan), np.where(inside, np.nan, outside)
    return Map(*titles, *edges, *cells, points[kept], out[kept])


def _bucket_edges(most: int) -> Floats:
    """Edges between the sizes that decode rows are padded to."""
    return np.array([0.5, *(bucket + 0.5 for bucket in DECODE_BUCKETS if bucket <= most)])


def _edges(most: int) -> Floats:
    """Edges of equal cells on a logarithmic axis, from 1 to `most`."""
    step = max(np.log2(max(most, 2)) / (_CELLS - 1), 0.25)
    return np.exp2(np.arange(-0.5, np.ceil(np.log2(max(most, 2)) / step) + 1) * step)


def _centres(edges: Floats) -> Floats:
    return np.sqrt(edges[1:] * edges[:-1])
