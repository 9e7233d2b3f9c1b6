"""A sweep as one HTML file: the figure of the Sweeps page for each of the metrics that matter, and its runs."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from dashboard.html_reports.document import beside, code, details, figure, heading, paragraph, table, warning
from dashboard.sweeps_page.charts import FIRST, drawn, opening_view, provenance
from planning.exports.sweep import Sweep, SweepView
from planning.sweep.results import SweepResults
from serving.metrics import METRICS

_ROWS = 1000  # more are in Parquet and CSV
_VALUES = 100  # of a parameter


def sweep_report(source: Sweep) -> tuple[str, list[str]]:
    """Title and blocks, of the runs that the source holds."""
    found = source.results
    complete = found.complete
    failed = found.runs.num_rows - complete.num_rows
    varied = ", ".join(f"{name} ({len(found.values(name))})" for name in found.parameters)
    blocks = [
        paragraph(f"{found.runs.num_rows:,} runs · varied: {varied or 'nothing'}", soft=True),
        warning(f"{failed:,} runs failed.") if failed else "",
        *(_figures(found, complete, source.view or opening_view(found)) if complete.num_rows and found.metrics else ()),
        *_runs(found, complete),
        *_failures(found),
        *_origin(found),
    ]
    name = source.path.resolve().name
    return name if name.lower().startswith("sweep") else f"Sweep {name}", blocks


def _figures(found: SweepResults, complete: pa.Table, view: SweepView) -> Iterator[str]:
    """The view, and the same of every metric that most are after."""
    rated = provenance(complete)
    names = [name for name in dict.fromkeys((view.y, *FIRST)) if name in found.metrics]
    yield heading(f"{found.metrics[view.y]} against {view.x}")
    yield figure(drawn(found, complete, view), rated)
    known = METRICS.get(view.y) or METRICS.get(view.y.rpartition("_")[0])
    if known:
        yield paragraph(f"{known.label}: {known.definition}.", soft=True)
    others = [figure(drawn(found, complete, view._replace(y=name)), rated, found.metrics[name]) for name in names[1:]]
    for at in range(0, len(others), 2):
        yield beside(others[at : at + 2])


def _runs(found: SweepResults, complete: pa.Table) -> Iterator[str]:
    metrics = [name for name in FIRST if name in found.metrics]
    shown = complete.select([*found.parameters, *metrics, "standing"]).slice(0, _ROWS)
    titles = {name: found.metrics[name] for name in metrics}
    yield heading("Runs")
    if complete.num_rows > _ROWS:
        yield paragraph(f"The first {_ROWS:,} of {complete.num_rows:,}.", soft=True)
    yield table([{titles.get(name, name): value for name, value in row.items()} for row in shown.to_pylist()])


def _failures(found: SweepResults) -> Iterator[str]:
    rows = found.runs.select(["status", *found.parameters, "error"]).to_pylist()
    failed = [row for row in rows if row.pop("status") != "complete"]
    if failed:
        yield heading("Runs that failed")
        yield table(failed[:_ROWS])


def _origin(found: SweepResults) -> Iterator[str]:
    """What all runs have in common, and the values of the rest."""
    versions = [] if "version" not in found.runs.column_names else found.runs["version"].unique().to_pylist()
    varied = {found.paths[name]: found.values(name)[:_VALUES] for name in found.parameters}
    yield heading("How to get it again")
    yield paragraph(
        f"Made by tokentwin {', '.join(filter(None, versions)) or 'of an unknown version'} with this command:"
    )
    yield code("tokentwin sweep FILE -o OUT")
    yield details(
        "the base of all runs, and the values of what was varied", {"base": dict(found.base), "varied": varied}
    )
