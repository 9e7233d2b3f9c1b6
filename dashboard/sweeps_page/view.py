"""What is drawn of a sweep: which metric against which parameter, and a colour for each value of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from calibration.provenance import Provenance, noted, weakest
from dashboard.sweeps_page import charts as sweep_charts
from planning.exports.sweep import SweepView
from planning.sweep.results import SweepResults

FIRST = ("slo_attainment", "ttft_ms_p99", "tpot_ms_p99", "e2e_ms_p99", "tok_s_gpu", "usd_per_mtok_out")
SERIES = 4  # shown at first


def opening_view(found: SweepResults) -> SweepView:
    """What the page opens on. The sweep must have a metric."""
    y, x = metrics_in_order(found)[0], parameters_in_order(found)[0]
    by = next(iter(others_in_order(found, x)), None)
    return SweepView(y, x, by, (None,) if by is None else some(found.values(by)))


def metrics_in_order(found: SweepResults) -> list[str]:
    """Those that most are after come first."""
    return sorted(found.metrics, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def parameters_in_order(found: SweepResults) -> list[str]:
    """For the axis: numbers of many values come first, seeds late."""
    parameters = list(found.parameters) or ["run_id"]
    likely = sorted(parameters, key=lambda name: (not numeric(found, name), name.endswith("seed")))
    likely.sort(key=lambda name: -len(found.values(name)) if numeric(found, name) else 0)
    return likely


def others_in_order(found: SweepResults, x: str) -> list[str]:
    """For the colours: all other parameters, names of few values first."""
    others = [name for name in list(found.parameters) or ["run_id"] if name != x]
    return sorted(others, key=lambda name: (numeric(found, name), len(found.values(name))))


def some(values: Sequence[Any], most: int = SERIES) -> list[Any]:
    """At most so many of the values, from the first to the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def numeric(found: SweepResults, name: str) -> bool:
    """Whether a column holds numbers."""
    kind = found.runs.schema.field(name).type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def drawn(found: SweepResults, runs: pa.Table, view: SweepView) -> Any:
    """The figure of `runs`, which are some of the sweep's."""
    y, x, by, values, log_y = view
    ends = [end for end in (f"{y}_low", f"{y}_high") if end in runs.column_names]
    columns = dict.fromkeys([x, y, *ends, "standing", *([by] if by else [])])
    titles = {**found.metrics, x: sweep_charts.parameter_title(x)}
    return sweep_charts.metric_over(runs.select(list(columns)).to_pandas(), x, y, by, titles, values, log_y)


def provenance(runs: pa.Table) -> Provenance:
    """Of the runs shown together."""
    columns = (runs[name].to_pylist() for name in ("standing", "standing_reason"))
    each = ({"mark": mark, "reason": reason} for mark, reason in zip(*columns, strict=True))
    return weakest((noted(mark, "the run does not say how far to trust it") for mark in each), "runs")
